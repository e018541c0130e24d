"""The models that this project supports: one table a family, chosen by the checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from areal_megatron.config import ConfigError
from areal_megatron.errors import printable
from areal_megatron.json_input import parse_json
from areal_megatron.models.llama import LLAMA
from areal_megatron.models.qwen2 import QWEN2
from areal_megatron.models.qwen3 import QWEN3, QWEN3_MOE
from areal_megatron.models.table import EMBEDDING, FINAL_NORM, HEAD, SCORE, Dimensions, Family, Row

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
}
"""The class that config.json names in `architectures` → the table."""

_LANGUAGE, _REWARD = "ForCausalLM", "ForSequenceClassification"
"""How the names of the classes of language models end, and of reward models."""

_CLASS_OF_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


_MOST_ROWS = 1 << 24
"""Most rows or columns of a tensor. Larger sizes are errors, and would use up the memory of whoever plans for them."""
_MOST = {"num_hidden_layers": 4096, "num_experts": 65536, "num_attention_heads": 65536, "num_key_value_heads": 65536}
_MOST_TENSORS = 1 << 18
"""Most experts of all layers together."""


@dataclass(frozen=True)
class Architecture:
    """One model: the table of its family, and its sizes."""

    name: str
    family: Family
    dimensions: Dimensions
    tied: bool
    """Whether the output layer is the embedding; the checkpoint has no lm_head then."""
    is_reward_model: bool = False
    """Whether the output layer gives a score in place of logits."""

    @property
    def output_layer(self) -> Row | None:
        """None: it is the embedding."""
        return SCORE if self.is_reward_model else None if self.tied else HEAD

    @cached_property
    def canonical(self) -> dict[str, tuple[int, ...]]:
        """The canonical tensors, in the order of the model: the checkpoint's name as a pattern → shape."""
        rows = [EMBEDDING, *(row.of_layers() for row in self.family.layer), FINAL_NORM]
        rows += [self.output_layer] if self.output_layer else []
        return {name: self.dimensions.shape(axes) for row in rows for name, axes in row.tensors.items()}


def read_config(path: str | Path) -> dict[str, Any]:
    """Returns config.json of a Hugging Face model folder. Raises ConfigError if it is missing or no JSON object."""
    file = Path(path) / "config.json"
    try:
        config = parse_json(file.read_bytes())
    except OSError as e:
        raise ConfigError(f"model.path: cannot read {file}: {e.strerror}") from None
    except ValueError as e:
        raise ConfigError(f"model.path: {file} is not JSON: {e}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"model.path: {file} holds no JSON object")
    return config


def architecture(hf_config: Mapping[str, Any]) -> Architecture:
    """Returns the architecture that a checkpoint's config.json describes.

    Raises ConfigError for a model without a table, a flag that adds unknown parameters, or a missing size.
    """
    classes = hf_config.get("architectures")
    named = (classes[0] if isinstance(classes, list) and classes else classes) or hf_config.get("model_type")
    name = _CLASS_OF_MODEL_TYPE.get(named, named) if isinstance(named, str) else None
    is_reward_model = name is not None and name.endswith(_REWARD)
    if is_reward_model:
        name = name.removesuffix(_REWARD) + _LANGUAGE
    if name not in FAMILIES:
        raise ConfigError(
            f"model.path: config.json names {shown(named)}, which has no table; known are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    for flag in family.refused:
        if hf_config.get(flag):
            raise ConfigError(f"model.path: config.json sets {flag}, whose parameters the table of {name} lacks")

    def size(key: str, default: int | None = None) -> int:
        value = hf_config.get(key)
        value = default if value is None else value
        if type(value) is not int or value <= 0:
            raise ConfigError(f"model.path: config.json needs a positive integer {key}, has {shown(value)}")
        if value > (most := _MOST.get(key, _MOST_ROWS)):
            raise ConfigError(f"model.path: config.json has {key}={shown(value)}, no model has more than {most}")
        return value

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    kv_heads = size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"model.path: config.json has num_attention_heads={heads}, no multiple of num_key_value_heads={kv_heads}"
        )
    dimensions = Dimensions(
        layers=size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size("head_dim", hidden // heads),
        ffn=0 if family.has_experts else size("intermediate_size"),
        vocabulary=size("vocab_size"),
        # transformers 5 writes num_local_experts, the published checkpoints have num_experts
        experts=size("num_experts", hf_config.get("num_local_experts")) if family.has_experts else 0,
        expert_ffn=size("moe_intermediate_size") if family.has_experts else 0,
    )
    if family.has_experts and size("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            "model.path: config.json has a decoder_sparse_step other than 1: layers without experts, "
            f"which the table of {name} lacks"
        )
    if (tensors := dimensions.layers * max(dimensions.experts, 1)) > _MOST_TENSORS:
        raise ConfigError(
            f"model.path: config.json has {dimensions.layers} layers of {dimensions.experts} experts; {tensors} are "
            f"more than the {_MOST_TENSORS} that any model has"
        )
    if is_reward_model:
        if not isinstance(labels := hf_config.get("id2label"), dict) or len(labels) != 1:
            raise ConfigError(f"model.path: config.json names {shown(named)} without one label; a reward model has one")
        return Architecture(shown(named), family, dimensions, tied=False, is_reward_model=True)
    return Architecture(name, family, dimensions, bool(hf_config.get("tie_word_embeddings", False)))


def as_reward_model(hf_config: Mapping[str, Any], pad_token: int | None = None) -> dict[str, Any]:
    """Returns the config.json of the reward model that has a language model's layers, and a score in place of its
    output layer, as transformers' class for the classification of sequences; one of a reward model is returned as it
    is.

    `pad_token`: the token with which callers fill up batches; None: they must not. The score is that of the last other
    token.
    """
    model = architecture(hf_config)
    if model.is_reward_model:
        return dict(hf_config)
    added = {
        "architectures": [model.name.removesuffix(_LANGUAGE) + _REWARD],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": pad_token,
    }
    return dict(hf_config) | added


def shown(value: Any) -> str:
    """Returns what config.json says, as a part of a message of one line."""
    return printable(
        repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a number of many digits", 60
    )
