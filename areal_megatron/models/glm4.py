"""GLM-4.5, 4.6 and 4.7 with experts: the first layers are dense, every token goes through shared experts, and routers
choose by sigmoid scores and a bias. GLM-4.7-Flash has DeepSeek-V3's attention."""

from dataclasses import replace

from areal_megatron.models.deepseek import DEEPSEEK_V3
from areal_megatron.models.qwen2 import QKV_BIAS
from areal_megatron.models.qwen3 import HEAD_NORMS
from areal_megatron.models.table import ATTENTION, EXPERTS, MLP, ROUTER, ROUTER_BIAS, SHARED_EXPERTS, Family

_ROUTER = replace(ROUTER, engine_dtype="float32")

GLM4_MOE = Family(
    (
        *ATTENTION,
        replace(QKV_BIAS, when="attention_bias"),
        *(replace(norm, when="use_qk_norm") for norm in HEAD_NORMS),
        *MLP,
        _ROUTER,
        ROUTER_BIAS,
        *EXPERTS,
        *SHARED_EXPERTS,
    ),
    refused=("sliding_window",),
    reward_models=False,
)
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    layer=tuple(_ROUTER if row is ROUTER else row for row in DEEPSEEK_V3.layer),
    fixed=DEEPSEEK_V3.fixed | {"first_k_dense_replace": 1},
    reward_models=False,
)
