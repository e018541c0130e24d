"""Whether the model of a config can be trained by the layout of that config, from its config.json alone.

The launcher asks before anything starts; imports neither torch nor megatron.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_megatron.config import Config, ConfigError
from areal_megatron.reshard.architectures import Dimensions, architecture, read_config

ROPE_TYPES = ("default", "linear", "llama3")
"""Rotary embeddings whose frequencies depend neither on the sequence nor on a scale of the attention."""


def check_model(config: Config) -> None:
    """Raises ConfigError, naming the key and the numbers, if the model cannot be trained or does not fit."""
    path = config.model.path
    if not Path(path).is_dir():
        raise ConfigError(f"model.path: there is no folder {path}")
    hf = read_config(path)
    model = architecture(hf)
    _check_computation(hf, path)
    _check_layout(config, model.dimensions)
    if config.mode == "rl":
        _check_engine(config, hf, model.dimensions)
    if not list(Path(path).glob("*.safetensors")):
        raise ConfigError(f"model.path: {path} holds no *.safetensors file")


def _check_computation(hf: dict[str, Any], path: str) -> None:
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ConfigError(f"model.path: {path}/config.json asks for rotary embeddings of type {rope_type!r}; "
                          f"known are {', '.join(ROPE_TYPES)}")  # fmt: skip
    if hf.get("use_sliding_window"):
        raise ConfigError(f"model.path: {path}/config.json sets use_sliding_window, which the trainer does not have")
    if hf.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"model.path: {path}/config.json has hidden_act {hf['hidden_act']!r}; known is silu")


def _check_layout(config: Config, model: Dimensions) -> None:
    tp = config.trainer.tp
    for key, count in (
        ("num_attention_heads", model.heads),
        ("num_key_value_heads", model.kv_heads),
        ("intermediate_size", model.ffn),
    ):
        if count % tp:
            raise ConfigError(f"trainer.tp: {tp} does not divide {key}={count} of {config.model.path}")


def _check_engine(config: Config, hf: dict[str, Any], model: Dimensions) -> None:
    tp, longest = config.rollout.tp, config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if model.heads % tp or (model.kv_heads % tp and tp % model.kv_heads):
        raise ConfigError(f"rollout.tp: {tp} does not divide num_attention_heads={model.heads} and "
                          f"num_key_value_heads={model.kv_heads} of {config.model.path}")  # fmt: skip
    if longest > (limit := hf.get("max_position_embeddings", longest)):
        raise ConfigError(f"rollout.max_new_tokens: with data.max_prompt_tokens={config.data.max_prompt_tokens} an answer "
                          f"may reach {longest} tokens, {config.model.path} has max_position_embeddings={limit}")  # fmt: skip
