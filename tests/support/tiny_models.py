"""Tiny Hugging Face models with random weights, as oracle and as folder to load from."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import torch
import transformers

from tests.support.delta_oracle import compute_exactly

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SIZES = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "initializer_range": 0.05,
    "rms_norm_eps": 1e-6,
}
YARN = {
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
}
TIED_AND_SMALL = {"tie_word_embeddings": True, "vocab_size": 100}
"""Padded to 256 for two tensor-parallel ranks: the second holds nothing but padding."""
HEADS = {"head_dim": 32, "tie_word_embeddings": False}
EXPERTS = {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
LATENTS = {
    "tie_word_embeddings": False,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,  # the only widths that engines have kernels for, this and 64
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 64,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 32,
}
GLM4 = {
    **HEADS,
    "attention_bias": True,
    "use_qk_norm": True,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 32,
}
MODELS = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {**TIED_AND_SMALL, **YARN}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, HEADS),
    "llama": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False},
    ),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, EXPERTS),
    "qwen3_balanced": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {**EXPERTS, "norm_topk_prob": False, "output_router_logits": True, "router_aux_loss_coef": 0.1},
    ),
    "glm4_moe": (transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM, GLM4),
    "glm4_yarn": (transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM, {**GLM4, **YARN}),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        transformers.DeepseekV3ForCausalLM,
        {
            **LATENTS,
            "q_lora_rank": 20,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "max_position_embeddings": 128,
            "rope_parameters": {**YARN["rope_parameters"], "mscale": 0.7, "mscale_all_dim": 1.0},
        },
    ),
    "moonlight": (
        transformers.DeepseekV3Config,
        transformers.DeepseekV3ForCausalLM,
        {**LATENTS, "q_lora_rank": None, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    ),
    "glm4_moe_lite": (
        transformers.Glm4MoeLiteConfig,
        transformers.Glm4MoeLiteForCausalLM,
        {**LATENTS, "q_lora_rank": 20, "v_head_dim": 48, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
    ),
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        transformers.Qwen3NextForCausalLM,
        {
            "tie_word_embeddings": False,
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,  # vLLM's kernels take no smaller ones
            "linear_value_head_dim": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "qwen3_5": (
        transformers.Qwen3_5TextConfig,
        transformers.Qwen3_5ForCausalLM,
        {
            "tie_word_embeddings": True,
            "head_dim": 64,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
        },
    ),
    "qwen3_5_moe": (
        transformers.Qwen3_5MoeTextConfig,
        transformers.Qwen3_5MoeForCausalLM,
        {
            "tie_word_embeddings": False,
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "qwen3_deep": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {**HEADS, "num_hidden_layers": 5}),
}


def save_model(name: str, folder: Path, **sizes) -> Path:
    """One of MODELS in `folder`; norms and biases are random too, so that no test passes by luck."""
    make_config, make_model, own = MODELS[name]
    torch.manual_seed(7)
    model = make_model(make_config(**deepcopy({**SIZES, **own, **sizes})))  # transformers writes into rope_parameters
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    return folder


def load_oracle(folder: Path) -> torch.nn.Module:
    compute_exactly()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
    )
    # transformers gives the norms of latents 1e-6 whatever the model's is; engines and trainers have the model's
    for name, module in model.named_modules():
        if name.endswith("_a_layernorm"):
            module.variance_epsilon = model.config.rms_norm_eps
    return model


def canonical(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters or gradients by the names of a checkpoint; a model in memory has all experts of a layer in one."""
    named = {}
    for name, tensor in tensors.items():
        layer, experts, part = name.rpartition(".experts.")
        for number, expert in enumerate(tensor if experts else ()):
            projections = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[part]
            for projection, rows in zip(projections, expert.chunk(len(projections)), strict=True):
                named[f"{layer}.experts.{number}.{projection}.weight"] = rows
        if not experts:
            named[name] = tensor
    return named
