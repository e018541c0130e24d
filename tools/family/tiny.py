"""A tiny model with random weights that has all that a config.json describes but its sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import lcm
from operator import eq
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from areal_megatron.models.architecture import architecture
from areal_megatron.models.described import EXPERT_COUNTS

LAYERS = 4
VOCABULARY = 191
"""Divided by no number of ranks, so that its padding is tried too; engines pad it to 192."""
_WIDTHS: dict[str, tuple[int, int]] = {
    "hidden_size": (128, 32),
    "intermediate_size": (96, 32),
    "moe_intermediate_size": (64, 64),  # of half of an expert engines on CPU pad what 32 does not divide
    "shared_expert_intermediate_size": (64, 32),
}
"""Key of config.json → the least width in the tiny model, which has some of the model's own divisors, and the step by
which it may be larger."""
_SIZES: dict[str, int] = {
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,  # the only widths that engines have kernels for, this and 64
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "linear_key_head_dim": 64,  # vLLM's kernels take no smaller ones
    "linear_value_head_dim": 64,
}
"""Key of config.json → its value in the tiny model, where the model has it."""
_MOST: dict[str, int] = {
    "first_k_dense_replace": 1,
    "full_attention_interval": LAYERS,
    "n_shared_experts": 2,
    "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
}
"""Key of config.json → the largest value in the tiny model."""
_IMAGES = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "num_position_embeddings": 16}
"""The sizes of the tiny model's part for images."""
_DERIVED = ("head_dim", "qk_head_dim")
"""Keys that transformers writes beside those from which it computes them, in models with latents."""
_LEFT_OUT = ("quantization_config", "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "auto_map")


def shrunk(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the tiny model: all flags stay as they are, lists with an entry for each layer keep
    the entries of the layers that stay, and numbers of heads and experts are divided by 2, 3, 4 and 8 where the
    model's are, as far as small numbers can be."""
    left_out = (*_LEFT_OUT, *(_DERIVED if architecture(hf_config).family.has_latents else ()))
    config = {key: value for key, value in hf_config.items() if key not in left_out}
    has = {key for key, value in config.items() if value is not None}
    config |= {key: value for key, value in _SIZES.items() if key in has}
    config |= {key: _width(config[key], *sizes) for key, sizes in _WIDTHS.items() if key in has}
    config |= {key: min(config[key], most) for key, most in _MOST.items() if key in has}
    divided = hf_config["hidden_size"] % hf_config["num_attention_heads"] == 0
    config |= _experts(config, has) | _heads(config, has, divided) | _by_layer(config)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := config.get(key), dict) and "original_max_position_embeddings" in rope:
            config[key] = rope | {"original_max_position_embeddings": 1024}
        if isinstance(rope, dict) and "mrope_section" in rope:
            config[key] = rope | {"mrope_section": _sections(rope, config)}
    return config | {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "initializer_range": 0.05}


def _sections(rope: Mapping[str, Any], config: Mapping[str, Any]) -> list[int]:
    """Returns the sections of the pairs that are rotated of a tiny head, in about the shares that `rope` has."""
    given = rope["mrope_section"]
    pairs = int(config["head_dim"] * rope.get("partial_rotary_factor", 1)) // 2
    others = [pairs * size // sum(given) for size in given[1:]]
    return [pairs - sum(others), *others]


def with_images(hf_config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a tiny model that takes images as the one of `hf_config` does; `text`: what `shrunk`
    returns of its language model."""
    sizes = {key: value for key, value in _IMAGES.items() if key in hf_config["vision_config"]}
    vision = hf_config["vision_config"] | sizes | {"out_hidden_size": text["hidden_size"]}
    kind = hf_config["text_config"].get("model_type")
    named = {"text_config": {**text, "model_type": kind}, "vision_config": vision}
    tied = text.get("tie_word_embeddings", False)
    return (
        {key: value for key, value in hf_config.items() if key not in _LEFT_OUT} | named | {"tie_word_embeddings": tied}
    )


def _like(value: int, most: int, least: int = 1) -> int:
    """Returns a number of least to `most` that is divided by 2, 3, 4 and 8 where `value` is, as far as there is one; by
    preference one that divides it."""
    return max(
        range(least, most + 1),
        key=lambda n: (
            n % 2 == value % 2,
            sum(map(eq, _divided(n), _divided(value))),
            min(n, value, 2),
            value % n == 0,
            n,
        ),
    )


def _divided(number: int) -> list[bool]:
    return [number % divisor == 0 for divisor in (2, 3, 4, 8)]


def _width(value: int, least: int, step: int) -> int:
    """Returns a width of at least `least` with the remainder that `value` leaves after multiples of `step`, divided by
    3 where that is; a multiple of `step` where `least` is one step."""
    remainder = value % step if least > step else 0
    candidates = (least + remainder + step * more for more in range(3))
    return next(n for n in candidates if (n % 3 == 0) == (value % 3 == 0))


def _heads(config: Mapping[str, Any], has: Collection[str], divided: bool) -> dict[str, int]:
    """Returns the numbers of heads, and the hidden size if it depends on them; `divided`: whether they divide the
    model's."""
    shared = {"num_attention_heads": "num_key_value_heads", "linear_num_value_heads": "linear_num_key_heads"}
    made = {}
    for key, of in shared.items():
        if key in has:
            groups = config[of] if of in has else config[key]
            each = _like(config[key] // groups, 7)
            made |= {key: each * _like(groups, 7)} | ({of: _like(groups, 7)} if of in has else {})
    heads = made["num_attention_heads"]
    if "head_dim" not in has and "qk_rope_head_dim" not in has:
        made["hidden_size"] = _SIZES["head_dim"] * heads  # vLLM's kernels take no heads of 16
    elif divided:  # which some classes of transformers demand
        made["hidden_size"] = -(-_WIDTHS["hidden_size"][0] // lcm(32, heads)) * lcm(32, heads)
    return made


def _experts(config: Mapping[str, Any], has: Collection[str]) -> dict[str, int]:
    """Returns the numbers of experts and of their groups, and how many of them are chosen."""
    [count, *_] = [config[key] for key in EXPERT_COUNTS if key in has] or [0]
    if not count:
        return {}
    groups = config["n_group"] if "n_group" in has else 1
    few = _like(groups, 5)
    experts = few * (_like(count // groups, 3, least=2) if groups > 1 else _like(count, 12))
    made = {key: experts for key in EXPERT_COUNTS if key in has}
    kept = 1
    if "topk_group" in has:
        kept = few if config["topk_group"] >= groups else min(max(config["topk_group"] * few // groups, 1), few - 1)
        made |= {"n_group": few, "topk_group": kept} if "n_group" in has else {"topk_group": kept}
    return made | {"num_experts_per_tok": min(config["num_experts_per_tok"], 3, kept * experts // few)}


def _by_layer(config: Mapping[str, Any]) -> dict[str, list]:
    """Returns the lists with an entry for each layer, for the layers of the tiny model: the first ones, repeated if
    there are fewer, the last of them replaced by the first of a kind that would be missing."""
    count, kinds = config["num_hidden_layers"], config.get("layer_types")
    taken = [number % count for number in range(LAYERS)]
    if isinstance(kinds, list) and len(kinds) == count:
        missing = {*map(str, kinds)} - {str(kinds[number]) for number in taken}
        first = sorted([*map(str, kinds)].index(kind) for kind in missing)
        taken[LAYERS - len(first) :] = first[:LAYERS]
    lists = {key: value for key, value in config.items() if isinstance(value, list) and len(value) == count}
    return {key: [value[number] for number in taken] for key, value in lists.items() if key != "architectures"}


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
    words = {f"<{number}>": number for number in range(config.get("text_config", config)["vocab_size"])}
    library = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<1>", unk_token="<0>")
    tokenizer.save_pretrained(folder)
    return load_file(folder / "model.safetensors")
