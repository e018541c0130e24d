"""Ranks with megatron-core's own gated delta net and gated attention, for the tests of `areal convert`."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from megatron.core import dist_checkpointing
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from areal_megatron.checkpoint import hf
from areal_megatron.models.architecture import read_config
from areal_megatron.reshard import trainer_layout
from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.run.folder import RunFolder
from areal_megatron.trainer.layers import RMSNorm, _attention
from areal_megatron.trainer.parallel import initialise
from tests.support.ranks.trainer_checks import make_config
from tests.support.tiny_models import load_oracle

TOLERANCE = 1e-5


def check_layers(folder: Path, rank: int, model: str, tp: int) -> None:
    """Has megatron-core load its own layers from the checkpoint that `from_hf` made of a model, compares what they hold
    with the layout of a trainer, and what they compute with transformers."""
    config = make_config(folder, model, {"tp": tp})
    initialise(config, RunFolder(folder / f"run-{tp}"), rank)
    described, oracle = transformers.AutoConfig.from_pretrained(folder / model), load_oracle(folder / model).model
    sizes = MegatronSizes.of(config.trainer)
    layout = trainer_layout.layout(read_config(folder / model), sizes, rank)
    expected = {name: torch.empty(shape) for name, shape in layout.parameters.items()}
    hf.load(expected, layout, folder / model)
    hidden = torch.randn(33, 2, described.hidden_size, generator=torch.Generator().manual_seed(3))
    for number, kind in enumerate(described.layer_types):
        layer, prefix = _layer(described, sizes, number), f"decoder.layers.{number}.self_attention."
        loaded = dist_checkpointing.load(layer.sharded_state_dict(prefix), str(folder / f"{model}-checkpoint/trainer"))
        layer.load_state_dict({name.removeprefix(prefix): value for name, value in loaded.items()})
        for name, value in layer.named_parameters():
            assert torch.equal(value, expected[prefix + name]), (number, name)
        with torch.no_grad():
            if kind == "linear_attention":
                found, _ = layer(hidden, None)
                wanted = oracle.layers[number].linear_attn(hidden.transpose(0, 1)).transpose(0, 1)
                assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max(), number
            else:
                _check_heads(layer, oracle.layers[number].self_attn, hidden, rank, tp)


def _check_heads(layer: torch.nn.Module, oracle: torch.nn.Module, hidden: Tensor, rank: int, tp: int) -> None:
    query, key, value, gate = layer.get_query_key_value_tensors(hidden, output_gate=True)
    both = oracle.q_proj(hidden).unflatten(-1, (-1, 2, oracle.head_dim))
    heads = {"key": (key, oracle.k_proj(hidden)), "value": (value, oracle.v_proj(hidden))}
    heads |= {"query": (query, both[..., 0, :].flatten(2)), "gate": (gate, both[..., 1, :].flatten(2))}
    for name, (found, wanted) in heads.items():
        wanted = wanted.unflatten(-1, (-1, oracle.head_dim)).chunk(tp, 2)[rank]
        assert (found.reshape(wanted.shape) - wanted).abs().max() < TOLERANCE * wanted.abs().max(), name


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def _layer(described: transformers.PretrainedConfig, sizes: MegatronSizes, number: int) -> torch.nn.Module:
    """Returns the attention or the gated delta net of a layer; kernels of a library that needs a GPU are replaced by
    megatron-core's own ones in torch."""
    config = TransformerConfig(
        num_layers=described.num_hidden_layers,
        hidden_size=described.hidden_size,
        num_attention_heads=described.num_attention_heads,
        num_query_groups=described.num_key_value_heads,
        kv_channels=described.head_dim,
        layernorm_epsilon=described.rms_norm_eps,
        normalization="RMSNorm",
        add_bias_linear=False,
        activation_func=F.silu,
        attention_output_gate=True,
        deterministic_mode=True,
        tensor_model_parallel_size=sizes.tp,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=4,
        linear_conv_kernel_dim=described.linear_conv_kernel_dim,
        linear_key_head_dim=described.linear_key_head_dim,
        linear_value_head_dim=described.linear_value_head_dim,
        linear_num_key_heads=described.linear_num_key_heads,
        linear_num_value_heads=described.linear_num_value_heads,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if described.layer_types[number] == "full_attention":
        return build_module(_attention(config), config=config, layer_number=number + 1, pg_collection=groups)
    gated_delta_net.l2norm = _unit
    parts = gated_delta_net.GatedDeltaNetSubmodules(ColumnParallelLinear, RMSNorm, RowParallelLinear)
    return gated_delta_net.GatedDeltaNet(config, parts, layer_number=number + 1, pg_collection=groups)
