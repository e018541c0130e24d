"""The engine's layout: which part of a model each rank of a vLLM engine holds. Imports no vllm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_megatron.config import ConfigError, RolloutConfig
from areal_megatron.models.adapter import Adapter, adapted
from areal_megatron.models.architecture import architecture
from areal_megatron.models.table import EMBEDDING, FINAL_NORM, HEAD, LAYER_PREFIX, Dimensions
from areal_megatron.reshard.boxes import Layout, Rows
from areal_megatron.reshard.shard import ShardBuilder, Share

VOCABULARY_MULTIPLE = 64
"""vLLM's DEFAULT_VOCAB_PADDING_SIZE."""


@dataclass(frozen=True)
class EngineSizes:
    """The parallel sizes of one engine. Ranks are numbered with tp as the fastest axis, then dp."""

    tp: int = 1
    dp: int = 1
    expert_parallel: bool = False
    """Whether each rank holds some experts whole (vLLM's --enable-expert-parallel, linear placement) instead of a part
    of every expert."""

    @classmethod
    def of(cls, rollout: RolloutConfig) -> EngineSizes:
        """Returns the sizes that a run's config asks for."""
        return cls(tp=rollout.tp, expert_parallel=rollout.expert_parallel)

    @property
    def ranks(self) -> int:
        return self.tp * self.dp


def layout(hf_config: Mapping[str, Any], sizes: EngineSizes, rank: int, adapter: Adapter | None = None) -> Layout:
    """Returns what rank `rank` of an engine holds of the model, or of an adapter's factors. Raises ConfigError if the
    sizes do not fit the model."""
    model = adapted(architecture(hf_config), adapter)
    dimensions, whole = model.dimensions, not sizes.expert_parallel
    if sizes.expert_parallel and dimensions.experts < sizes.ranks:
        raise ConfigError(
            f"rollout.expert_parallel: {sizes.ranks} ranks of an engine cannot share {dimensions.experts} experts"
        )
    shard = ShardBuilder(
        dimensions,
        tensor=Share(rank % sizes.tp, sizes.tp, "rollout.tp"),
        expert_tensor=Share(rank, sizes.ranks, "rollout.tp") if whole else Share(0, 1, "rollout.expert_parallel"),
        experts=range(dimensions.experts) if whole else _own_experts(dimensions.experts, sizes.ranks, rank),
        vocabulary=-(-dimensions.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        fuse_heads=_stacked_heads,
        sections_apart=False,
    )
    if not model.is_adapter:
        shard.add(EMBEDDING, EMBEDDING.vllm)
    for row in model.layer:
        shard.add_layers(row, LAYER_PREFIX + row.vllm, range(dimensions.layers), row.engine_dtype or row.dtype)
    if not model.is_adapter:
        shard.add(FINAL_NORM, FINAL_NORM.vllm)
        if not model.tied:
            shard.add(HEAD, HEAD.vllm)
    return shard.build()


def _own_experts(experts: int, ranks: int, rank: int) -> range:
    """Returns consecutive experts; the first ranks have one more if they cannot be divided evenly."""
    each, more = divmod(experts, ranks)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def _stacked_heads(dimensions: Dimensions, share: Share, names: tuple[str, ...], gated: bool) -> list[Rows]:
    """Returns the rank's query heads, each with its gate if it has one, then its key heads, then its value heads; with
    tp above kv_heads the last two are replicated."""
    query, key, value = names
    own_heads = max(dimensions.kv_heads // share.count, 1)
    first = share.index * dimensions.kv_heads // share.count
    own = (first * dimensions.head_dim, (first + own_heads) * dimensions.head_dim)
    queries = dimensions.query_and_gate if gated else dimensions.query
    return [Rows(query, *share.of(queries)), Rows(key, *own), Rows(value, *own)]
