"""Parts of a decoder layer whose activations are recomputed in the backward pass instead of kept.

Whole layers are recomputed by megatron-core's transformer block. Its selective recomputation is for all layers alike
and repeats the whole MLP; here each layer has its own setting, and an MLP recomputes only the input of its last
product, never the product itself.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from areal_megatron.config import Config, TrainerConfig
from areal_megatron.trainer.experts import Experts
from areal_megatron.trainer.made_again import made_again


def decided(config: Config) -> Config:
    """Returns a config whose trainer.recompute is not `auto`. Launchers have decided it; without one nothing is
    recomputed on CPU, and whole layers are on GPUs, of whose memory nobody has told."""
    if config.trainer.recompute != "auto":
        return config
    what = "none" if config.machine.is_cpu or config.trainer.recompute_modules else "full"
    if what == "full":
        print("trainer.recompute=auto: full, since no launcher has decided it by the memory of the GPUs", flush=True)
    return replace(config, trainer=replace(config.trainer, recompute=what))


def recompute(chunk: GPTModel, trainer: TrainerConfig) -> None:
    """Makes each layer of a virtual stage recompute norms and MLP as `trainer.recompute` asks.

    A norm that TransformerEngine has fused with the product after it is kept, and so are the products of its grouped
    experts.
    """
    layers = chunk.decoder.layers
    if trainer.recompute == "full" and trainer.recompute_layers:
        _give_padding_to_all(chunk)
    for layer, what in zip(layers, trainer.recomputed(len(layers)), strict=True):
        assert isinstance(layer, TransformerLayer)
        if what not in ("elementwise", "mlp"):
            continue
        layer.recompute_input_layernorm = not isinstance(layer.input_layernorm, IdentityOp)
        layer.recompute_pre_mlp_layernorm = not isinstance(layer.pre_mlp_layernorm, IdentityOp)
        for module in cast(torch.nn.Module, layer.mlp).modules():  # the MLP itself, or every expert
            if isinstance(module, SharedExpertMLP):  # has no second result
                module.forward = partial(_shared_forward, module, what == "mlp")
            elif isinstance(module, MLP):
                module.forward = partial(_forward, module, what == "mlp")
            elif isinstance(module, TEGroupedMLP):
                module.activation_recompute = True
            elif isinstance(module, Experts):
                module.recompute = what


def _give_padding_to_all(chunk: GPTModel) -> None:
    """Gives the layers the mask of the tokens that the balance loss of routers leaves out. Where a transformer block
    recomputes some of its layers, megatron-core forgets it in the calls of the others."""
    current = {}

    def remember(_block: Any, _inputs: Any, options: dict[str, Any]) -> None:
        current["padding_mask"] = options.get("padding_mask")

    def give(_layer: Any, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return inputs, (options if options.get("padding_mask") is not None else options | current)

    chunk.decoder.register_forward_pre_hook(remember, with_kwargs=True)
    for layer in chunk.decoder.layers:
        layer.register_forward_pre_hook(give, with_kwargs=True)


def _forward(
    mlp: MLP, repeats_product: bool, hidden_states: Tensor, per_token_scale: Tensor | None = None, **options
) -> tuple[Tensor, None]:
    """Computes what MLP.forward does, without biases. The input of the last product is freed, and recomputed in the
    backward pass from the result of the first product or, if `repeats_product`, from `hidden_states`."""
    if not torch.is_grad_enabled():
        return MLP.forward(mlp, hidden_states, per_token_scale, **options)
    first = mlp.linear_fc1 if repeats_product else _same
    parts = SimpleNamespace(config=mlp.config, activation_func=mlp.activation_func, linear_fc1=first, linear_fc2=_same)
    activation = cast(MLP, parts)
    given = hidden_states if repeats_product else mlp.linear_fc1(hidden_states)[0]
    output = made_again(
        lambda *inputs: MLP.forward(activation, *inputs)[0], (given, per_token_scale), lambda x: mlp.linear_fc2(x)[0]
    )
    # The norm before the MLP is made again when the gradient of what is returned here is known; that has to be before
    # the norm's result is used to make anything again, which the gradient of `output` sets off.
    return output.view_as(output), None


def _shared_forward(mlp: SharedExpertMLP, repeats_product: bool, hidden_states: Tensor) -> Tensor:
    output, gate = _forward(mlp, repeats_product, hidden_states)[0], mlp.gate_weight
    return output if gate is None else output * F.linear(hidden_states, gate).sigmoid()


def _same(x: Tensor) -> tuple[Tensor, None]:
    """Stands for a linear layer that does nothing and has no bias."""
    return x, None
