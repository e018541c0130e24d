"""GLM-4.5, 4.6 and 4.7 with experts: the first layers are dense, every token goes through shared experts, and routers
choose by sigmoid scores and a bias."""

from dataclasses import replace

from areal_megatron.models.qwen2 import QKV_BIAS
from areal_megatron.models.qwen3 import HEAD_NORMS
from areal_megatron.models.table import ATTENTION, EXPERTS, MLP, ROUTER, ROUTER_BIAS, SHARED_EXPERTS, Family

GLM4_MOE = Family(
    (
        *ATTENTION,
        replace(QKV_BIAS, when="attention_bias"),
        *(replace(norm, when="use_qk_norm") for norm in HEAD_NORMS),
        *MLP,
        replace(ROUTER, engine_dtype="float32"),
        ROUTER_BIAS,
        *EXPERTS,
        *SHARED_EXPERTS,
    ),
    refused=("sliding_window",),
    reward_models=False,
)
