"""The modules of GPTModel's decoder layers, on CUDA with TransformerEngine and elsewhere."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler, TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.trainer import elementwise
from areal_megatron.trainer.attention import CoreAttention
from areal_megatron.trainer.delta_net import DeltaNet
from areal_megatron.trainer.experts import Experts
from areal_megatron.trainer.marks import mark
from areal_megatron.trainer.routing import RouteOverride


class RMSNorm(torch.nn.Module):
    """RMSNorm in float32 whatever the dtype, as in Hugging Face models.

    With `layernorm_zero_centered_gamma` of the config the weights are what is added to 1.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any):
        super().__init__()
        self.eps, self.added_to_one = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        mark(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        # In half precision 1 and a small weight would round to 1.
        weight = 1 + self.weight.float() if self.added_to_one else self.weight
        if not x.is_cuda:
            return elementwise.rms_norm(x, weight, self.eps)
        if self.added_to_one:
            return F.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, self.eps)


class FactorNorm(RMSNorm):
    """RMSNorm whose weights are factors in every model."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.added_to_one = False


class Router(TopKRouter):
    """Megatron's router with a load-balancing loss over the trained tokens only.

    Megatron's own loss is too small by a factor of tp under sequence parallelism, and not a number in a micro-batch
    without trained tokens. Experts that an engine chose can override the router's choice (trainer/routing.py).
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.router_replay = RouteOverride()

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None):
        """Counts the load by which biases move: of all tokens, also of tokens outside the loss."""
        super()._apply_expert_bias(routing_map)

    def _apply_aux_loss(self, probs: Tensor, scores: Tensor, routing_map: Tensor, with_padding_mask: bool = False):
        """Attaches coefficient · N · E · Σ_e f_e · P_e (Switch Transformer, Equation 4) to the probabilities.

        E: the number of experts. N: the trained tokens of the micro-batch, since the gradient is divided by the whole
        batch's number later. f_e: the share of their top-k places that expert e takes. P_e: its mean probability,
        chosen or not. scores [tokens, experts] and routing_map (bool) are zero at tokens that are not trained.
        """
        taken = reduce_from_tensor_model_parallel_region(routing_map.sum(dim=0), self.tp_cp_group)
        tokens = taken.sum().clamp(min=1) / self.topk
        coefficient = self.get_aux_loss_coeff("aux_loss") * scores.size(1) / self.topk
        return MoEAuxLossAutoScaler.apply(probs, coefficient * (scores.sum(dim=0) * taken).sum() / tokens)


class Attention(SelfAttention):
    """Megatron's attention, whose gate (0.16.1) has the query heads of all ranks that share a KV head."""

    def get_query_key_value_tensors(self, *args: Any, output_gate: bool = False, **options: Any) -> tuple:
        found = cast(tuple, super().get_query_key_value_tensors(*args, output_gate=output_gate, **options))
        sharing = self.world_size // cast(int, self.config.num_query_groups)
        if not output_gate or sharing < 2:
            return found
        *others, gate = found
        return *others, gate.chunk(sharing, dim=2)[self.pg_collection.tp.rank() % sharing]


def block_spec(
    config: TransformerConfig, sizes: MegatronSizes, stage: int, grouped: bool = False
) -> TransformerBlockSubmodules:
    """Returns the layers of a virtual pipeline stage of this rank, and the norm after the last layer.

    `stage` is 0 without virtual stages; `grouped` says whether local experts are multiplied together.
    """
    virtual = stage if sizes.vpp > 1 else None
    first, count = get_transformer_layer_offset(config, virtual), get_num_layers_to_build(config, vp_stage=virtual)

    @cache
    def layer(experts: bool, linear: bool) -> ModuleSpec:
        if sizes.fused_layernorm:
            return _engine_layer(config, experts)
        return _local_layer(config, experts, linear, grouped)

    frequency, linear = config.moe_layer_freq, config.linear_attention_freq or [0] * config.num_layers
    assert not isinstance(linear, int)  # transformer_config gives a list
    experts = frequency if isinstance(frequency, list) else [config.num_moe_experts is not None] * config.num_layers
    layers = [layer(bool(experts[number]), bool(linear[number])) for number in range(first, first + count)]
    norm: Any = TENorm if sizes.fused_layernorm else RMSNorm  # Megatron takes classes too
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _engine_layer(config: TransformerConfig, experts: bool) -> ModuleSpec:
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
    submodules: Any = layer.submodules
    submodules.self_attention.submodules.core_attention = CoreAttention
    if experts:
        submodules.mlp.submodules.router = Router
    return layer


def _local_layer(config: TransformerConfig, has_experts: bool, linear: bool, grouped: bool) -> ModuleSpec:
    products = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    if has_experts:
        experts = ModuleSpec(module=Experts, submodules=products, params={"grouped": grouped})
        shared = ModuleSpec(module=SharedExpertMLP, submodules=products)
        submodules = MoESubmodules(experts=experts, shared_experts=shared, router=Router)
        mlp = ModuleSpec(module=MoELayer, submodules=submodules)
    else:
        mlp = ModuleSpec(module=MLP, submodules=products)
    attention = _latent_attention if config.multi_latent_attention else _attention
    add: Any = get_bias_dropout_add  # a function, of which Megatron's type does not know
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=DELTA_NET if linear else attention(config),
            self_attn_bda=add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=add,
            sharded_state_dict_keys_map=checkpoint_names(has_experts, config.multi_latent_attention, linear),
        ),
    )


def _attention(config: TransformerConfig) -> ModuleSpec:
    head_norm = RMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=Attention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _latent_attention(_: TransformerConfig) -> ModuleSpec:
    """Each rank projects its own tokens to latents with the whole weight, as TransformerEngine's layers do: with a
    part of its rows, as in Megatron's own local layers, the gradient of the rotated keys lacks the other ranks'
    part."""
    return ModuleSpec(
        module=MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=Linear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=Linear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm,
            kv_layernorm=RMSNorm,
        ),
    )


DELTA_NET = ModuleSpec(
    module=DeltaNet, submodules=GatedDeltaNetSubmodules(ColumnParallelLinear, FactorNorm, RowParallelLinear)
)


def checkpoint_names(has_experts: bool, has_latents: bool = False, linear: bool = False) -> dict[str, str]:
    """Returns prefix of a local layer's parameters → prefix of TransformerEngine's, under which checkpoints hold both.

    Megatron's own local layers name the norm before experts after a linear layer, too; TransformerEngine's do not.
    """
    names = {"input_layernorm.": f"self_attention.{'in_proj' if linear else 'linear_qkv'}.layer_norm_"}
    if has_latents:
        up = {each: f"self_attention.linear_{each}_up_proj.layer_norm_" for each in ("q", "kv")}
        names = {f"self_attention.{each}_layernorm.": name for each, name in up.items()}
    return names if has_experts else names | {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
