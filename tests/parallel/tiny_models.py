"""Tiny Hugging Face models with random weights, as oracle and as folder to load from."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
SIZES = {"vocab_size": 250, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32768,
         "initializer_range": 0.05, "rms_norm_eps": 1e-6}  # fmt: skip
TIED_AND_SMALL = {"tie_word_embeddings": True, "vocab_size": 100}
"""Padded to 256 for two tensor-parallel ranks: the second holds nothing but padding."""
FAMILIES = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, TIED_AND_SMALL),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32, "tie_word_embeddings": False}),
    "llama": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False},
    ),
}


def save_model(family: str, folder: Path, **sizes) -> Path:
    """A model of that family in `folder`; norms and biases are random too, so that no test passes by luck."""
    make_config, make_model, own = FAMILIES[family]
    torch.manual_seed(7)
    model = make_model(make_config(**{**SIZES, **own, **sizes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    return folder


def load_oracle(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
