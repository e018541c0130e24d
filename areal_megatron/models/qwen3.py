"""Qwen3: RMSNorm on the query and key heads; dense (0.6B – 32B) and with experts (30B-A3B, 235B-A22B)."""

from areal_megatron.models.table import ATTENTION, EXPERTS, MLP, ROUTER, Cut, Family, Row

HEAD_NORMS = tuple(
    Row(
        Cut.WHOLE,
        f"self_attention.{head}_layernorm.weight",
        f"self_attn.{head}_norm.weight",
        {f"self_attn.{head}_norm.weight": "head_dim"},
    )
    for head in ("q", "k")
)

QWEN3 = Family((*ATTENTION, *HEAD_NORMS, *MLP), refused=("attention_bias",), defaults={"head_dim": 128})
QWEN3_MOE = Family(
    (*ATTENTION, *HEAD_NORMS, ROUTER, *EXPERTS),
    refused=("attention_bias", "mlp_only_layers", "shared_expert_intermediate_size"),
)
