"""Architecture tables: each row names one parameter in Megatron, in vLLM and in the checkpoint."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from areal_megatron.models.pattern import numbered


class Cut(enum.Enum):
    """How tensor parallelism shards a parameter."""

    WHOLE = "every rank holds all of it"
    VOCABULARY = "rows of the padded vocabulary"
    HEADS = "query, key and value heads, fused"
    GATED_HEADS = "the same, with a gate after each query head of a checkpoint's tensor"
    SECTIONS = "rows of each section of its tensor"
    GROUPS = "rows of groups of heads, each with a part of every section; Megatron keeps the sections apart"
    ROWS = "rows of each of its tensors, stacked in their order"
    COLUMNS = "columns"


class Layers(enum.Enum):
    """Which decoder layers have a parameter."""

    ALL = "layers"
    DENSE = "dense_layers"
    """Layers with a dense MLP: in a model with experts the first ones, if any."""
    SPARSE = "sparse_layers"
    """Layers with experts."""
    FULL = "full_layers"
    """Layers with attention: all but the LINEAR ones."""
    LINEAR = "linear_layers"
    """Layers with linear attention, a gated delta net."""


@dataclass(frozen=True)
class Row:
    """One parameter. `tensors` is checkpoint name → names of its axes (attributes of Dimensions).

    Names are relative to the layer; a `{}` in them is the number of an expert, and the row has its tensors for every
    expert. Rows that give the same name in vLLM are one parameter there, which stacks them in their order.
    """

    cut: Cut
    megatron: str
    vllm: str
    tensors: dict[str, str]
    grouped: str = ""
    """Megatron's name if TransformerEngine computes all experts of a rank at once."""
    fused: str = ""
    """Megatron's name if TransformerEngine's linear layer holds it."""
    layers: Layers = Layers.ALL
    when: str = ""
    """The flag of config.json without which a model lacks the parameter."""
    unless: str = ""
    """The flag of config.json with which a model lacks the parameter."""
    dtype: str = ""
    """The dtype in which trainers, checkpoints and engines hold it, whatever the model's is; "" for the model's."""
    engine_dtype: str = ""
    """The dtype in which engines alone hold it."""
    sections: tuple[tuple[str, str], ...] = ()
    """The sections of the tensor's rows, for Cut.SECTIONS and Cut.GROUPS: the name that Megatron's checkpoints have for
    each, and its axis."""
    among: tuple[str, ...] = ()
    """The tensors that Cut.HEADS fuses, where the row has only some of them."""

    @property
    def of_experts(self) -> bool:
        return any("experts.{}." in name for name in self.tensors)

    @property
    def of_attention(self) -> bool:
        return self.vllm.startswith(("self_attn.", "linear_attn."))

    def of_layers(self, dimensions: Dimensions) -> Row:
        """Returns the row with the checkpoint's full names, which begin with the layer's number."""
        prefix = numbered(LAYER_PREFIX, dimensions.layers_with(self))
        tensors = {prefix + name: f"{self.layers.value} {axes}" for name, axes in self.tensors.items()}
        return replace(self, tensors=tensors, among=tuple(prefix + name for name in self.among))


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
    """The width of a head's query and key."""
    ffn: int
    """The width of a dense MLP; 0 if no layer has one."""
    vocabulary: int
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """The width of the MLP beside the experts that every token goes through; 0 if there is none."""
    dense_layers: int = 0
    """How many of the first layers have a dense MLP: all of them in a model without experts."""
    value_dim: int = 0
    """The width of a head's value if it differs from its key's."""
    latent: int = 0
    """The width of the latent from which keys and values of all heads are projected; 0: from the hidden states."""
    query_latent: int = 0
    """Likewise of queries."""
    rotated: int = 0
    """The part of head_dim, of a model with latents, that is rotated, and of keys the same for all heads."""
    linear: tuple[int, ...] = ()
    """The numbers of the layers with linear attention; the sizes that follow are of these."""
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    """The width of a head's query and key."""
    linear_value_dim: int = 0
    kernel: int = 0
    """The tokens that the short convolution sees: the last ones."""
    adapter_rank: int = 0
    """The rank of the factors of adapters (models/adapter.py)."""

    @property
    def sparse_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def linear_layers(self) -> int:
        return len(self.linear)

    @property
    def full_layers(self) -> int:
        return self.layers - len(self.linear)

    @property
    def all_alike(self) -> bool:
        """Whether all layers have the same parameters."""
        kinds = ((self.dense_layers, self.sparse_layers), (self.linear_layers, self.full_layers))
        return not any(all(counts) for counts in kinds)

    def layers_with(self, row: Row) -> Sequence[int]:
        """Returns the decoder layers that have a parameter, in ascending order."""
        match row.layers:
            case Layers.ALL:
                return range(self.layers)
            case Layers.DENSE:
                return range(self.dense_layers)
            case Layers.SPARSE:
                return range(self.dense_layers, self.layers)
            case Layers.FULL:
                return tuple(sorted({*range(self.layers)} - {*self.linear}))
            case Layers.LINEAR:
                return self.linear

    @property
    def scores(self) -> int:
        """The outputs of a reward model."""
        return 1

    @property
    def single(self) -> int:
        """An axis of one element."""
        return 1

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def query_and_gate(self) -> int:
        return 2 * self.query

    @property
    def key_value(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def attended(self) -> int:
        """The width of what all heads give: their sums of values."""
        return self.heads * (self.value_dim or self.head_dim)

    @property
    def latent_and_rotated(self) -> int:
        return self.latent + self.rotated

    @property
    def key_and_value_of_latent(self) -> int:
        return self.heads * (self.head_dim - self.rotated) + self.attended

    @property
    def linear_key(self) -> int:
        """The width of the keys of all heads, and of their queries."""
        return self.linear_key_heads * self.linear_key_dim

    @property
    def linear_value(self) -> int:
        return self.linear_value_heads * self.linear_value_dim

    @property
    def convolved(self) -> int:
        """The width of queries, keys and values, which go through the convolution."""
        return 2 * self.linear_key + self.linear_value

    @property
    def linear_projection(self) -> int:
        """The width of queries, keys, values and gates."""
        return self.convolved + self.linear_value

    @property
    def rates(self) -> int:
        """How much each value head writes, and how much it forgets."""
        return 2 * self.linear_value_heads

    def shape(self, axes: str) -> tuple[int, ...]:
        """Returns the sizes of axes named as in Row.tensors, e.g. "ffn hidden"."""
        return tuple(getattr(self, axis) for axis in axes.split())


@dataclass(frozen=True)
class Family:
    """One table: the rows of a decoder layer, in the order in which they are applied."""

    layer: tuple[Row, ...]
    refused: tuple[str, ...] = ()
    """Flags of config.json that add parameters this table does not have."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json that choose between computations → the only supported value, also the default of an absent
    key."""
    own_head_dim: bool = True
    """Whether engines read in config.json how wide a head is; if not, it is the hidden size over the heads."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json that are not null → what transformers takes where one is absent, if that is no rule for all
    families: of `head_dim` it is the hidden size over the heads, of `norm_topk_prob` false."""
    reward_models: bool = True
    """Whether transformers has a class of reward models with these layers."""
    added_to_one: bool = False
    """Whether the weights of norms are what is added to 1, but for those inside a gated delta net."""
    positions_of_text: bool = False
    """Whether rotary embeddings may have `mrope_section`: of text the positions are the same in all sections."""
    state_dtype: str = ""
    """The key of config.json in which engines read the dtype of the states of linear attention; "" if in none."""

    @cached_property
    def has_experts(self) -> bool:
        return any(row.of_experts for row in self.layer)

    @cached_property
    def has_latents(self) -> bool:
        """Whether keys and values come from latents."""
        return any("latent" in axes for row in self.layer for axes in row.tensors.values())

    @cached_property
    def has_linear_layers(self) -> bool:
        return any(row.layers is Layers.LINEAR for row in self.layer)

    @cached_property
    def has_shared_experts(self) -> bool:
        return any("shared_ffn" in axes for row in self.layer for axes in row.tensors.values())

    @cached_property
    def has_dense_layers(self) -> bool:
        return any(row.layers is Layers.DENSE for row in self.layer)


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

INPUT_NORM = Row(
    Cut.WHOLE,
    "input_layernorm.weight",
    "input_layernorm.weight",
    {"input_layernorm.weight": "hidden"},
)
ATTENTION_OUTPUT = Row(
    Cut.COLUMNS,
    "self_attention.linear_proj.weight",
    "self_attn.o_proj.weight",
    {"self_attn.o_proj.weight": "hidden attended"},
)
ATTENTION = (
    replace(INPUT_NORM, fused="self_attention.linear_qkv.layer_norm_weight"),
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
    ATTENTION_OUTPUT,
)
"""The attention of a Llama-style decoder layer, with the norm before it; families add rows to it."""

_MLP_NORM = Row(
    Cut.WHOLE,
    "pre_mlp_layernorm.weight",
    "post_attention_layernorm.weight",
    {"post_attention_layernorm.weight": "hidden"},
)
_DENSE = (
    replace(_MLP_NORM, fused="mlp.linear_fc1.layer_norm_weight"),
    Row(
        Cut.ROWS,
        "mlp.linear_fc1.weight",
        "mlp.gate_up_proj.weight",
        {"mlp.gate_proj.weight": "ffn hidden", "mlp.up_proj.weight": "ffn hidden"},
    ),
    Row(Cut.COLUMNS, "mlp.linear_fc2.weight", "mlp.down_proj.weight", {"mlp.down_proj.weight": "hidden ffn"}),
)
MLP = tuple(replace(row, layers=Layers.DENSE) for row in _DENSE)
"""A dense MLP, with the norm before it."""

ROUTER = Row(
    Cut.WHOLE,
    "mlp.router.weight",
    "mlp.gate.weight",
    {"mlp.gate.weight": "experts hidden"},
    layers=Layers.SPARSE,
)
ROUTER_BIAS = Row(
    Cut.WHOLE,
    "mlp.router.expert_bias",
    "mlp.gate.e_score_correction_bias",
    {"mlp.gate.e_score_correction_bias": "experts"},
    layers=Layers.SPARSE,
    dtype="float32",
)
"""What a router adds to the scores by which it chooses experts, not to their weights. It has no gradient."""

_SPARSE = (
    _MLP_NORM,
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
EXPERTS = tuple(replace(row, layers=Layers.SPARSE) for row in _SPARSE)
"""Experts, with the norm before them, which take the place of MLP; a family adds their router."""

SHARED_EXPERTS = (
    Row(
        Cut.ROWS,
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.gate_up_proj.weight",
        {
            "mlp.shared_experts.gate_proj.weight": "shared_ffn hidden",
            "mlp.shared_experts.up_proj.weight": "shared_ffn hidden",
        },
        layers=Layers.SPARSE,
    ),
    Row(
        Cut.COLUMNS,
        "mlp.shared_experts.linear_fc2.weight",
        "mlp.shared_experts.down_proj.weight",
        {"mlp.shared_experts.down_proj.weight": "hidden shared_ffn"},
        layers=Layers.SPARSE,
    ),
)
"""The experts that every token goes through, as one MLP."""
