"""The models this project knows: one table a family, chosen by the checkpoint's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from areal_megatron.config import ConfigError
from areal_megatron.reshard.architectures.llama import LLAMA
from areal_megatron.reshard.architectures.qwen2 import QWEN2
from areal_megatron.reshard.architectures.qwen3 import QWEN3
from areal_megatron.reshard.architectures.table import EMBEDDING, FINAL_NORM, HEAD, Dimensions, Family, Row

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
}
"""By the class that config.json names in `architectures`."""

_CLASS_OF_MODEL_TYPE = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True)
class Architecture:
    """One model: its family's table and its sizes."""

    name: str
    family: Family
    dimensions: Dimensions
    tied: bool
    """The output layer is the embedding; the checkpoint has no lm_head."""

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Canonical tensors: checkpoint name → shape, in the order of the model."""

        def shapes(row: Row, prefix: str = "") -> dict[str, tuple[int, ...]]:
            return {prefix + name: self.dimensions.shape(axes) for name, axes in row.tensors.items()}

        tensors = shapes(EMBEDDING)
        for layer in range(self.dimensions.layers):
            for row in self.family.layer:
                tensors |= shapes(row, layer_prefix(layer))
        return tensors | shapes(FINAL_NORM) | ({} if self.tied else shapes(HEAD))


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face model folder. Raises ConfigError where it is missing or no JSON object."""
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text())
    except OSError as e:
        raise ConfigError(f"model.path: cannot read {file}: {e.strerror}") from None
    except ValueError as e:
        raise ConfigError(f"model.path: {file} is not JSON: {e}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"model.path: {file} holds no JSON object")
    return config


def layer_prefix(layer: int) -> str:
    """Of the canonical names of a decoder layer, counted from 0."""
    return f"model.layers.{layer}."


def architecture(hf_config: Mapping[str, Any]) -> Architecture:
    """The architecture that a checkpoint's config.json describes.

    Raises ConfigError for a model without a table, a flag that adds unknown parameters, or a missing size.
    """
    named = (hf_config.get("architectures") or [None])[0]
    name = named or _CLASS_OF_MODEL_TYPE.get(hf_config.get("model_type"))
    if name not in FAMILIES:
        raise ConfigError(
            f"model.path: config.json names {named or hf_config.get('model_type')!r}, which has no table; "
            f"known are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    for flag in family.refused:
        if hf_config.get(flag):
            raise ConfigError(f"model.path: config.json sets {flag}, whose parameters the table of {name} lacks")

    def size(key: str, default: int | None = None) -> int:
        value = hf_config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or value <= 0:
            raise ConfigError(f"model.path: config.json needs a positive integer {key}, has {value!r}")
        return value

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    kv_heads = size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"model.path: config.json has num_attention_heads={heads}, no multiple of "
                          f"num_key_value_heads={kv_heads}")  # fmt: skip
    dimensions = Dimensions(
        layers=size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size("head_dim", hidden // heads),
        ffn=size("intermediate_size"),
        vocabulary=size("vocab_size"),
    )
    return Architecture(name, family, dimensions, bool(hf_config.get("tie_word_embeddings", False)))
