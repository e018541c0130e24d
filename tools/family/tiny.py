"""A tiny model with random weights that has all that a config.json describes but its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from areal_megatron.models.architecture import EXPERT_COUNTS

LAYERS = 4
VOCABULARY = 203
"""Divided by no number of ranks, so that its padding is tried too."""
_SIZES: dict[str, int] = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,  # the only widths that engines have kernels for, this and 64
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
"""Key of config.json → its value in the tiny model, where the model has it."""
_MOST: dict[str, int] = {
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}
"""Key of config.json → the largest value in the tiny model."""
_LEFT_OUT = ("quantization_config", "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "auto_map")


def shrunk(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the tiny model: all flags stay as they are.

    Query heads share keys and values where they do in the model, by four at most.
    """
    config = {key: value for key, value in hf_config.items() if key not in _LEFT_OUT}
    has = {key for key, value in config.items() if value is not None}
    config |= {key: value for key, value in _SIZES.items() if key in has}
    config |= {key: min(config[key], most) for key, most in _MOST.items() if key in has}
    config |= {key: 8 for key in EXPERT_COUNTS if key in has}
    heads = hf_config["num_attention_heads"]
    shared = min(heads // (hf_config.get("num_key_value_heads") or heads), 4)
    config["num_attention_heads"] = 8 if shared == 4 else 4
    if "head_dim" not in has:
        config["hidden_size"] = _SIZES["head_dim"] * config["num_attention_heads"]  # vLLM's kernels take no heads of 16
    if "num_key_value_heads" in has:
        config["num_key_value_heads"] = config["num_attention_heads"] // shared
    if config.get("num_nextn_predict_layers"):
        config["num_nextn_predict_layers"] = 0
    if isinstance(kinds := config.get("layer_types"), list):
        config["layer_types"] = kinds[:LAYERS]
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := config.get(key), dict) and "original_max_position_embeddings" in rope:
            config[key] = rope | {"original_max_position_embeddings": 1024}
    return config | {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "initializer_range": 0.05}


def write(config: Mapping[str, Any], folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """Has transformers write a random model, with a tokenizer of a word for each token; returns the tensors of its
    file. Norms, biases and buffers are random too, so that nothing is right by luck."""
    name = config["architectures"][0]
    make = getattr(transformers, name)
    torch.manual_seed(seed)
    model = make(make.config_class(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        for key, buffer in model.named_buffers():
            if key in model.state_dict():
                buffer.normal_(std=0.1)
    model.save_pretrained(folder)
    words = {f"<{number}>": number for number in range(config["vocab_size"])}
    library = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<1>", unk_token="<0>")
    tokenizer.save_pretrained(folder)
    return load_file(folder / "model.safetensors")
