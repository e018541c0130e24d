"""Qwen3.5, the language model of the dense ones: layers as those of Qwen3-Next, with a dense MLP, and the projections
into a gated delta net apart in checkpoints."""

from dataclasses import replace

from areal_megatron.models.qwen3_next import GATED_ATTENTION, NET, NET_NORM
from areal_megatron.models.table import MLP, Cut, Family, Layers, Row

_IN = "self_attention.in_proj.weight"
_PROJECTIONS = (
    Row(
        Cut.SECTIONS,
        _IN,
        "linear_attn.in_proj_qkvz.weight",
        {"linear_attn.in_proj_qkv.weight": "convolved hidden"},
        sections=(("query", "linear_key"), ("key", "linear_key"), ("value", "linear_value")),
    ),
    Row(
        Cut.SECTIONS,
        _IN,
        "linear_attn.in_proj_qkvz.weight",
        {"linear_attn.in_proj_z.weight": "linear_value hidden"},
        sections=(("z", "linear_value"),),
    ),
    *(
        Row(
            Cut.SECTIONS,
            _IN,
            "linear_attn.in_proj_ba.weight",
            {f"linear_attn.in_proj_{letter}.weight": "linear_value_heads hidden"},
            sections=((name, "linear_value_heads"),),
        )
        for letter, name in (("b", "beta"), ("a", "alpha"))
    ),
)

QWEN3_5 = Family(
    (
        *(replace(row, layers=Layers.LINEAR) for row in (NET_NORM, *_PROJECTIONS, *NET)),
        *(replace(row, layers=Layers.FULL) for row in GATED_ATTENTION),
        *MLP,
    ),
    refused=("attention_bias",),
    reward_models=False,
    added_to_one=True,
    positions_of_text=True,
    unserved="vLLM imports its layers together with those for images, which nobody has tried here",
)
