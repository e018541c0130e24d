"""Qwen3-Next: most layers have linear attention, a gated delta net, every fourth has attention with a gate on what it
gives, and all have experts and one that every token goes through, with a gate of its own.

Weights of norms are what is added to 1, on both sides and in checkpoints, but for the norm inside the gated delta net,
whose weights are factors.
"""

from dataclasses import replace

from areal_megatron.models.qwen3 import HEAD_NORMS
from areal_megatron.models.table import (
    ATTENTION_OUTPUT,
    EXPERTS,
    INPUT_NORM,
    ROUTER,
    SHARED_EXPERTS,
    Cut,
    Family,
    Layers,
    Row,
)

NET_NORM = replace(INPUT_NORM, fused="self_attention.in_proj.layer_norm_weight")
_PROJECTIONS = (
    Row(
        Cut.GROUPS,
        "self_attention.in_proj.weight",
        "linear_attn.in_proj_qkvz.weight",
        {"linear_attn.in_proj_qkvz.weight": "linear_projection hidden"},
        sections=(("query", "linear_key"), ("key", "linear_key"), ("value", "linear_value"), ("z", "linear_value")),
    ),
    Row(
        Cut.GROUPS,
        "self_attention.in_proj.weight",
        "linear_attn.in_proj_ba.weight",
        {"linear_attn.in_proj_ba.weight": "rates hidden"},
        sections=(("beta", "linear_value_heads"), ("alpha", "linear_value_heads")),
    ),
)
NET = (
    Row(
        Cut.SECTIONS,
        "self_attention.conv1d.weight",
        "linear_attn.conv1d.weight",
        {"linear_attn.conv1d.weight": "convolved single kernel"},
        sections=(("query", "linear_key"), ("key", "linear_key"), ("value", "linear_value")),
    ),
    Row(
        Cut.ROWS,
        "self_attention.dt_bias",
        "linear_attn.dt_bias",
        {"linear_attn.dt_bias": "linear_value_heads"},
    ),
    Row(
        Cut.ROWS,
        "self_attention.A_log",
        "linear_attn.A_log",
        {"linear_attn.A_log": "linear_value_heads"},
        engine_dtype="float32",
    ),
    Row(
        Cut.WHOLE,
        "self_attention.out_norm.weight",
        "linear_attn.norm.weight",
        {"linear_attn.norm.weight": "linear_value_dim"},
    ),
    Row(
        Cut.COLUMNS,
        "self_attention.out_proj.weight",
        "linear_attn.out_proj.weight",
        {"linear_attn.out_proj.weight": "hidden linear_value"},
    ),
)
"""A gated delta net, without the projections into it and the norm before these."""

GATED_ATTENTION = (
    replace(INPUT_NORM, fused="self_attention.linear_qkv.layer_norm_weight"),
    Row(
        Cut.GATED_HEADS,
        "self_attention.linear_qkv.weight",
        "self_attn.qkv_proj.weight",
        {
            "self_attn.q_proj.weight": "query_and_gate hidden",
            "self_attn.k_proj.weight": "key_value hidden",
            "self_attn.v_proj.weight": "key_value hidden",
        },
    ),
    *HEAD_NORMS,
    ATTENTION_OUTPUT,
)


def _of_one(row: Row) -> Row:
    """Returns a row of shared experts with the names that it has where there is one."""
    one = {name.replace("shared_experts.", "shared_expert."): axes for name, axes in row.tensors.items()}
    return replace(row, vllm=row.vllm.replace("shared_experts.", "shared_expert."), tensors=one)


SHARED_EXPERT_GATE = Row(
    Cut.WHOLE,
    "mlp.shared_experts.gate_weight",
    "mlp.shared_expert_gate.weight",
    {"mlp.shared_expert_gate.weight": "single hidden"},
)

GATED_EXPERTS = (ROUTER, *EXPERTS, *map(_of_one, SHARED_EXPERTS), SHARED_EXPERT_GATE)

QWEN3_NEXT = Family(
    (
        *(replace(row, layers=Layers.LINEAR) for row in (NET_NORM, *_PROJECTIONS, *NET)),
        *(replace(row, layers=Layers.FULL) for row in GATED_ATTENTION),
        *GATED_EXPERTS,
    ),
    refused=("attention_bias", "mlp_only_layers", "qkv_bias", "sliding_window"),
    defaults={"head_dim": 256, "norm_topk_prob": True},
    added_to_one=True,
)
