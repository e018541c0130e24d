"""DeepSeek-V3 and R1, Moonlight, Kimi-K2: attention whose keys and values come from one latent a token (MLA), and
layers of experts as in models/glm4.py."""

from dataclasses import replace

from areal_megatron.models.table import (
    ATTENTION_OUTPUT,
    EXPERTS,
    INPUT_NORM,
    MLP,
    ROUTER,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    Cut,
    Family,
    Row,
)

_HAS_QUERY_LATENT = "q_lora_rank"
_DOWN = "self_attn.fused_qkv_a_proj.weight"
"""vLLM's parameter for both latents."""

_QUERY_DOWN = Row(
    Cut.WHOLE,
    "self_attention.linear_q_down_proj.weight",
    _DOWN,
    {"self_attn.q_a_proj.weight": "query_latent hidden"},
    when=_HAS_QUERY_LATENT,
)
_QUERY_NORM = Row(
    Cut.WHOLE,
    "self_attention.q_layernorm.weight",
    "self_attn.q_a_layernorm.weight",
    {"self_attn.q_a_layernorm.weight": "query_latent"},
    fused="self_attention.linear_q_up_proj.layer_norm_weight",
    when=_HAS_QUERY_LATENT,
)
_QUERY_UP = Row(
    Cut.ROWS,
    "self_attention.linear_q_up_proj.weight",
    "self_attn.q_b_proj.weight",
    {"self_attn.q_b_proj.weight": "query query_latent"},
    when=_HAS_QUERY_LATENT,
)
_QUERY = Row(
    Cut.ROWS,
    "self_attention.linear_q_proj.weight",
    "self_attn.q_proj.weight",
    {"self_attn.q_proj.weight": "query hidden"},
    unless=_HAS_QUERY_LATENT,
)
_DOWN_WITH_QUERY = Row(
    Cut.WHOLE,
    "self_attention.linear_kv_down_proj.weight",
    _DOWN,
    {"self_attn.kv_a_proj_with_mqa.weight": "latent_and_rotated hidden"},
    when=_HAS_QUERY_LATENT,
)
_DOWN_ALONE = replace(_DOWN_WITH_QUERY, vllm="self_attn.kv_a_proj_with_mqa.weight", when="", unless=_HAS_QUERY_LATENT)
_NORM = Row(
    Cut.WHOLE,
    "self_attention.kv_layernorm.weight",
    "self_attn.kv_a_layernorm.weight",
    {"self_attn.kv_a_layernorm.weight": "latent"},
    fused="self_attention.linear_kv_up_proj.layer_norm_weight",
)
_UP = Row(
    Cut.ROWS,
    "self_attention.linear_kv_up_proj.weight",
    "self_attn.kv_b_proj.weight",
    {"self_attn.kv_b_proj.weight": "key_and_value_of_latent latent"},
)

DEEPSEEK_V3 = Family(
    (
        INPUT_NORM,
        _QUERY_DOWN,
        _QUERY_NORM,
        _QUERY_UP,
        _QUERY,
        _DOWN_WITH_QUERY,
        _DOWN_ALONE,
        _NORM,
        _UP,
        ATTENTION_OUTPUT,
        *MLP,
        ROUTER,
        ROUTER_BIAS,
        *EXPERTS,
        *SHARED_EXPERTS,
    ),
    refused=("attention_bias", "sliding_window"),
    fixed={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True},
)
