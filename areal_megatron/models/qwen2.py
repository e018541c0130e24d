"""Qwen2, Qwen2.5, R1-Distill-Qwen: a bias on query, key and value."""

from areal_megatron.models.table import ATTENTION, MLP, Cut, Family, Row

QKV_BIAS = Row(
    Cut.HEADS,
    "self_attention.linear_qkv.bias",
    "self_attn.qkv_proj.bias",
    {
        "self_attn.q_proj.bias": "query",
        "self_attn.k_proj.bias": "key_value",
        "self_attn.v_proj.bias": "key_value",
    },
)

QWEN2 = Family((*ATTENTION, QKV_BIAS, *MLP), own_head_dim=False)
