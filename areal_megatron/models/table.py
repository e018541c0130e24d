"""Architecture tables: each row names one parameter in Megatron, in vLLM and in the checkpoint."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace


class Cut(enum.Enum):
    """How tensor parallelism shards a parameter."""

    WHOLE = "every rank holds all of it"
    VOCABULARY = "rows of the padded vocabulary"
    HEADS = "query, key and value heads, fused"
    ROWS = "rows of each of its tensors, stacked in their order"
    COLUMNS = "columns"


@dataclass(frozen=True)
class Row:
    """One parameter. `tensors` is checkpoint name → names of its axes (attributes of Dimensions).

    Names are relative to the layer; a `{}` in them is the number of an expert, and the row has its tensors for every
    expert.
    """

    cut: Cut
    megatron: str
    vllm: str
    tensors: dict[str, str]
    grouped: str = ""
    """Megatron's name if TransformerEngine computes all experts of a rank at once."""

    @property
    def of_experts(self) -> bool:
        return any("experts.{}." in name for name in self.tensors)

    def of_layers(self) -> Row:
        """Returns the row with the checkpoint's full names, which begin with the layer's number."""
        tensors = {LAYER_PREFIX + name: f"layers {axes}" for name, axes in self.tensors.items()}
        return replace(self, tensors=tensors)


LAYER_PREFIX = "model.layers.{}."
"""The prefix of a layer's tensors, in the checkpoint and in vLLM."""


@dataclass(frozen=True)
class Dimensions:
    """The sizes of a model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """The width of a dense MLP; 0 in a model with experts."""
    vocabulary: int
    experts: int = 0
    expert_ffn: int = 0

    @property
    def scores(self) -> int:
        """The outputs of a reward model."""
        return 1

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        return self.kv_heads * self.head_dim

    def shape(self, axes: str) -> tuple[int, ...]:
        """Returns the sizes of axes named as in Row.tensors, e.g. "ffn hidden"."""
        return tuple(getattr(self, axis) for axis in axes.split())


@dataclass(frozen=True)
class Family:
    """One table: the rows of a decoder layer, in the order in which they are applied."""

    layer: tuple[Row, ...]
    refused: tuple[str, ...] = ()
    """Flags of config.json that add parameters this table does not have."""

    @property
    def has_experts(self) -> bool:
        return any(row.of_experts for row in self.layer)


EMBEDDING = Row(
    Cut.VOCABULARY,
    "embedding.word_embeddings.weight",
    "model.embed_tokens.weight",
    {"model.embed_tokens.weight": "vocabulary hidden"},
)
FINAL_NORM = Row(Cut.WHOLE, "decoder.final_layernorm.weight", "model.norm.weight", {"model.norm.weight": "hidden"})
HEAD = Row(Cut.VOCABULARY, "output_layer.weight", "lm_head.weight", {"lm_head.weight": "vocabulary hidden"})
SCORE = Row(Cut.WHOLE, HEAD.megatron, "score.weight", {"score.weight": "scores hidden"})
"""The output layer of a reward model."""
TIED_HEAD = Row(Cut.VOCABULARY, HEAD.megatron, EMBEDDING.vllm, EMBEDDING.tensors)

ATTENTION = (
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
)
"""The attention of a Llama-style decoder layer, with both layer norms; families add rows to it."""

MLP = (
    Row(
        Cut.ROWS,
        "mlp.linear_fc1.weight",
        "mlp.gate_up_proj.weight",
        {"mlp.gate_proj.weight": "ffn hidden", "mlp.up_proj.weight": "ffn hidden"},
    ),
    Row(Cut.COLUMNS, "mlp.linear_fc2.weight", "mlp.down_proj.weight", {"mlp.down_proj.weight": "hidden ffn"}),
)

EXPERTS = (
    Row(Cut.WHOLE, "mlp.router.weight", "mlp.gate.weight", {"mlp.gate.weight": "experts hidden"}),
    Row(
        Cut.ROWS,
        "mlp.experts.local_experts.{}.linear_fc1.weight",
        "mlp.experts.routed_experts.w13_weight",
        {
            "mlp.experts.{}.gate_proj.weight": "experts expert_ffn hidden",
            "mlp.experts.{}.up_proj.weight": "experts expert_ffn hidden",
        },
        grouped="mlp.experts.linear_fc1.weight{}",
    ),
    Row(
        Cut.COLUMNS,
        "mlp.experts.local_experts.{}.linear_fc2.weight",
        "mlp.experts.routed_experts.w2_weight",
        {"mlp.experts.{}.down_proj.weight": "experts hidden expert_ffn"},
        grouped="mlp.experts.linear_fc2.weight{}",
    ),
)
"""A router and its experts, which take the place of MLP."""
