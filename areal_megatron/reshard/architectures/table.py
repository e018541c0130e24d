"""What an architecture table is made of: rows, each naming one parameter in Megatron, in vLLM and in the checkpoint."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Cut(enum.Enum):
    """How tensor parallelism divides a parameter."""

    WHOLE = "every rank holds all of it"
    VOCABULARY = "rows of the padded vocabulary"
    HEADS = "query, key and value heads, fused"
    ROWS = "rows of each of its tensors, stacked in their order"
    COLUMNS = "columns"


@dataclass(frozen=True)
class Row:
    """One parameter. `tensors`: checkpoint name → names of its axes (attributes of Dimensions)."""

    cut: Cut
    megatron: str
    vllm: str
    tensors: dict[str, str]


@dataclass(frozen=True)
class Dimensions:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        return self.kv_heads * self.head_dim

    def shape(self, axes: str) -> tuple[int, ...]:
        """Sizes of axes named as in Row.tensors, e.g. "ffn hidden"."""
        return tuple(getattr(self, axis) for axis in axes.split())


@dataclass(frozen=True)
class Family:
    """One table: the rows of a decoder layer, names relative to the layer, in the order they are applied."""

    layer: tuple[Row, ...]
    refused: tuple[str, ...] = ()
    """Flags of config.json that add parameters this table does not have."""


EMBEDDING = Row(
    Cut.VOCABULARY,
    "embedding.word_embeddings.weight",
    "model.embed_tokens.weight",
    {"model.embed_tokens.weight": "vocabulary hidden"},
)
FINAL_NORM = Row(Cut.WHOLE, "decoder.final_layernorm.weight", "model.norm.weight", {"model.norm.weight": "hidden"})
HEAD = Row(Cut.VOCABULARY, "output_layer.weight", "lm_head.weight", {"lm_head.weight": "vocabulary hidden"})
TIED_HEAD = Row(Cut.VOCABULARY, HEAD.megatron, EMBEDDING.vllm, EMBEDDING.tensors)

DENSE_LAYER = (
    Row(Cut.WHOLE, "input_layernorm.weight", "input_layernorm.weight", {"input_layernorm.weight": "hidden"}),
    Row(
        Cut.HEADS,
        "self_attention.linear_qkv.weight",
        "self_attn.qkv_proj.weight",
        {
            "self_attn.q_proj.weight": "query hidden",
            "self_attn.k_proj.weight": "key_value hidden",
            "self_attn.v_proj.weight": "key_value hidden",
        },
    ),
    Row(
        Cut.COLUMNS,
        "self_attention.linear_proj.weight",
        "self_attn.o_proj.weight",
        {"self_attn.o_proj.weight": "hidden query"},
    ),
    Row(
        Cut.WHOLE,
        "pre_mlp_layernorm.weight",
        "post_attention_layernorm.weight",
        {"post_attention_layernorm.weight": "hidden"},
    ),
    Row(
        Cut.ROWS,
        "mlp.linear_fc1.weight",
        "mlp.gate_up_proj.weight",
        {"mlp.gate_proj.weight": "ffn hidden", "mlp.up_proj.weight": "ffn hidden"},
    ),
    Row(Cut.COLUMNS, "mlp.linear_fc2.weight", "mlp.down_proj.weight", {"mlp.down_proj.weight": "hidden ffn"}),
)
"""A Llama-style decoder layer; the families add to it."""
