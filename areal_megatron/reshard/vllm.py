"""The engine's layout: how vLLM holds a dense model, by tensor parallel rank. Imports no vllm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_megatron.reshard.architectures import architecture, layer_prefix
from areal_megatron.reshard.architectures.table import EMBEDDING, FINAL_NORM, HEAD, Dimensions
from areal_megatron.reshard.layout import Layout, Rows
from areal_megatron.reshard.shard import ShardBuilder

VOCABULARY_MULTIPLE = 64
"""vLLM's DEFAULT_VOCAB_PADDING_SIZE."""


def layout(hf_config: Mapping[str, Any], tp: int, rank: int) -> Layout:
    """What tensor-parallel rank `rank` of an engine with `tp` ranks holds.

    Raises ConfigError where tp does not fit the model.
    """
    model = architecture(hf_config)
    padded = -(-model.dimensions.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    shard = ShardBuilder(model.dimensions, tp, rank, vocabulary=padded, fuse_heads=_stacked_heads, key="rollout.tp")
    shard.add(EMBEDDING, EMBEDDING.vllm)
    for layer in range(model.dimensions.layers):
        for row in model.family.layer:
            shard.add(row, f"{layer_prefix(layer)}{row.vllm}", layer_prefix(layer))
    shard.add(FINAL_NORM, FINAL_NORM.vllm)
    if not model.tied:
        shard.add(HEAD, HEAD.vllm)
    return shard.build()


def _stacked_heads(dimensions: Dimensions, tp: int, rank: int, names: tuple[str, str, str]) -> list[Rows]:
    """Own query heads, then own key heads, then own value heads; with tp above kv_heads, heads are replicated."""
    query, key, value = names
    own_queries = dimensions.query // tp
    own_heads = max(dimensions.kv_heads // tp, 1)
    first = rank * dimensions.kv_heads // tp
    own = (first * dimensions.head_dim, (first + own_heads) * dimensions.head_dim)
    return [Rows(query, rank * own_queries, (rank + 1) * own_queries), Rows(key, *own), Rows(value, *own)]
