"""Qwen3.5, the language model: layers as in Qwen3-Next, some with a dense MLP, some with experts, and the
projections into a gated delta net apart in checkpoints."""

from dataclasses import replace

from areal_megatron.models.qwen3_next import GATED_ATTENTION, GATED_EXPERTS, NET, NET_NORM
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

_ATTENTION = (
    *(replace(row, layers=Layers.LINEAR) for row in (NET_NORM, *_PROJECTIONS, *NET)),
    *(replace(row, layers=Layers.FULL) for row in GATED_ATTENTION),
)

QWEN3_5 = Family(
    (*_ATTENTION, *MLP),
    refused=("attention_bias", "qkv_bias", "sliding_window"),
    defaults={"head_dim": 256},
    reward_models=False,
    added_to_one=True,
    positions_of_text=True,
    state_dtype="mamba_ssm_dtype",
)
QWEN3_5_MOE = replace(QWEN3_5, layer=(*_ATTENTION, *GATED_EXPERTS), fixed={"norm_topk_prob": True})
