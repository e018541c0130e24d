"""The trainer's layout: how megatron-core's GPTModel holds a model, by tensor and pipeline parallel rank.

Names are those of GPTModel.named_parameters(): decoder layers counted from 0 on each pipeline stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from areal_megatron.config import ConfigError, Trainer
from areal_megatron.reshard.architectures import Architecture, architecture, layer_prefix
from areal_megatron.reshard.architectures.table import EMBEDDING, FINAL_NORM, HEAD, TIED_HEAD, Dimensions
from areal_megatron.reshard.layout import Layout, Rows, window
from areal_megatron.reshard.shard import ShardBuilder


class Coordinates(NamedTuple):
    """A rank's place in each dimension of parallelism."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class MegatronSizes:
    """Parallel sizes of the trainer pool. Ranks are numbered in megatron-core's default order, tp-cp-ep-dp-pp."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    vocabulary_multiple: int = 128
    """The vocabulary is padded to a multiple of this times tp (Megatron's make_vocab_size_divisible_by)."""
    fused_layernorm: bool = False
    """TransformerEngine's layers, which hold the layer norms inside the linear layers that follow them."""

    @classmethod
    def of(cls, trainer: Trainer, fused_layernorm: bool = False) -> MegatronSizes:
        """The sizes that a run's config asks for."""
        return cls(tp=trainer.tp, pp=trainer.pp, dp=trainer.dp, fused_layernorm=fused_layernorm)

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(tp, cp, dp, pp)

    def padded_vocabulary(self, vocabulary: int) -> int:
        """The vocab_size to build GPTModel with."""
        multiple = self.vocabulary_multiple * self.tp
        return -(-vocabulary // multiple) * multiple

    def stage_layers(self, layers: int, stage: int) -> range:
        """The decoder layers of a pipeline stage, counted over the model. Raises ConfigError if uneven."""
        if layers % self.pp:
            raise ConfigError(f"trainer.pp: {self.pp} does not divide num_hidden_layers={layers} of the model")
        return range(stage * layers // self.pp, (stage + 1) * layers // self.pp)


_FUSED_LAYERNORM = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def layout(hf_config: Mapping[str, Any], sizes: MegatronSizes, rank: int) -> Layout:
    """What trainer rank `rank` holds. Raises ConfigError where the sizes do not fit the model."""
    at = sizes.coordinates(rank)
    return stage_layout(architecture(hf_config), sizes, at.tp, at.pp)


def layouts(hf_config: Mapping[str, Any], sizes: MegatronSizes) -> list[Layout]:
    """One per trainer rank; ranks that hold the same share one object."""
    model = architecture(hf_config)
    held = cache(lambda tp, pp: stage_layout(model, sizes, tp, pp))
    return [held(at.tp, at.pp) for at in map(sizes.coordinates, range(sizes.ranks))]


def stage_layout(model: Architecture, sizes: MegatronSizes, tp: int, stage: int) -> Layout:
    """What tensor-parallel rank `tp` of pipeline stage `stage` holds."""
    dimensions = model.dimensions
    shard = ShardBuilder(dimensions, sizes.tp, tp, vocabulary=sizes.padded_vocabulary(dimensions.vocabulary),
                         fuse_heads=_interleaved_heads, key="trainer.tp")  # fmt: skip
    first, last = stage == 0, stage == sizes.pp - 1
    if first:
        shard.add(EMBEDDING, EMBEDDING.megatron)
    for number, layer in enumerate(sizes.stage_layers(dimensions.layers, stage)):
        for row in model.family.layer:
            name = _FUSED_LAYERNORM.get(row.megatron, row.megatron) if sizes.fused_layernorm else row.megatron
            shard.add(row, f"decoder.layers.{number}.{name}", layer_prefix(layer))
    if last:
        shard.add(FINAL_NORM, FINAL_NORM.megatron)
        if not model.tied:
            shard.add(HEAD, HEAD.megatron)
        elif not first:
            shard.add(TIED_HEAD, HEAD.megatron)
    return shard.build()


def _interleaved_heads(dimensions: Dimensions, tp: int, rank: int, names: tuple[str, str, str]) -> list[Rows]:
    """Query group by query group: its query heads, its key head, its value head; cut evenly over tp."""
    query, key, value = names
    d, per_group = dimensions.head_dim, dimensions.query // dimensions.kv_heads
    stack = []
    for group in range(dimensions.kv_heads):
        stack += [
            Rows(query, group * per_group, (group + 1) * per_group),
            Rows(key, group * d, (group + 1) * d),
            Rows(value, group * d, (group + 1) * d),
        ]
    height = dimensions.query + 2 * dimensions.key_value
    return list(window(stack, rank * height // tp, (rank + 1) * height // tp))
