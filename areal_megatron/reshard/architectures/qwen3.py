"""Qwen3, dense: RMSNorm on the query and key heads."""

from areal_megatron.reshard.architectures.table import DENSE_LAYER, Cut, Family, Row

QWEN3 = Family(
    (
        *DENSE_LAYER,
        Row(
            Cut.WHOLE,
            "self_attention.q_layernorm.weight",
            "self_attn.q_norm.weight",
            {"self_attn.q_norm.weight": "head_dim"},
        ),
        Row(
            Cut.WHOLE,
            "self_attention.k_layernorm.weight",
            "self_attn.k_norm.weight",
            {"self_attn.k_norm.weight": "head_dim"},
        ),
    ),
    refused=("attention_bias",),
)
