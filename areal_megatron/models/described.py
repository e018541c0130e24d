"""What config.json says beside the sizes: keys that mean the same, numbers, flags, and rotary embeddings.

Trainers read it through transformers, engines through vLLM's own classes as well. What the two would take differently,
and what neither can compute with, is an error here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from areal_megatron.config import ConfigError
from areal_megatron.process.errors import printable

EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Names of the number of experts: of Qwen3-MoE transformers 5 writes the last, published checkpoints have the first."""
_THETA, _PART, _ORIGINAL = "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"
_LENGTH = "max_position_embeddings"
_SAME = (
    EXPERT_COUNTS,
    ("dtype", "torch_dtype"),
    ("num_nextn_predict_layers", "num_mtp_layers"),
    (_THETA, "rotary_emb_base"),
    (_PART, "rotary_pct", "rotary_emb_fraction"),
)
"""Names of one thing."""
_FLAGS = (
    "attention_bias",
    "mlp_bias",
    "norm_topk_prob",
    "output_router_logits",
    "rope_interleave",
    "tie_word_embeddings",
    "use_cache",
    "use_qk_norm",
    "use_sliding_window",
)
_RATES = {"rms_norm_eps": 1.0, "routed_scaling_factor": 1e4}
"""Floating-point numbers above 0 → the largest."""
_OPTIONAL_RATES = {"attention_dropout": 1.0, "router_aux_loss_coef": 1e4, "initializer_range": 1.0}
"""Those that may be 0."""
_ENGINES_ALONE = {
    "attn_output_gate": True,
    "bias": False,
    "compression_config": None,
    "dual_chunk_attention_config": None,
    "index_topk": None,
    "is_causal": True,
    "layer_scale": False,
    "llama_4_scaling": None,
    "logit_scale": 1.0,
    "output_gate_type": ("silu", "swish"),
    "qk_norm": False,
    "rswa_window": None,
}
"""Keys that vLLM reads and transformers does not → the values that change nothing; None: only to leave it out."""
_ROPE_NUMBERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Type of rotary embeddings → the numbers that it needs beside the base."""
_ROPE_OPTIONAL = (_ORIGINAL, "beta_fast", "beta_slow", "attention_factor")
_ROPE_ENGINES_ALONE = ("xdrope_section", "use_fope", "rope_dim")
_MOST = 1e15


def check_described(hf_config: Mapping[str, Any]) -> None:
    """Raises ConfigError, which names the key, where config.json contradicts itself or has a number or flag that
    cannot be computed with."""
    for names in _SAME:
        _agreed({name: hf_config.get(name) for name in names})
    for key in _FLAGS:
        if type(hf_config.get(key, False)) is not bool:
            raise ConfigError(f"model.path: config.json needs true or false for {key}, has {shown(hf_config[key])}")
    for key, most in (_RATES | _OPTIONAL_RATES).items():
        value = hf_config.get(key, most)
        is_number = type(value) is float or (key == "attention_dropout" and type(value) in (int, float))
        if not is_number or not 0 <= value <= most or (value == 0 and key in _RATES):
            least = "above" if key in _RATES else "from"
            raise ConfigError(
                f"model.path: config.json needs a number with a decimal point {least} 0 to {most:g} as {key}, has "
                f"{shown(value)}"
            )
    limit = hf_config.get(_LENGTH, 1)
    if type(limit) is not int or not 0 < limit < _MOST:
        raise ConfigError(f"model.path: config.json needs a positive integer {_LENGTH}, has {shown(limit)}")
    for key, only in _ENGINES_ALONE.items():
        allowed = only if isinstance(only, tuple) else (only,)
        if (value := hf_config.get(key)) is not None and value not in allowed:
            remedy = "leave it out" if only is None else f"only {shown(allowed[0])} is supported"
            raise ConfigError(
                f"model.path: config.json has {key}={shown(value)}, which engines compute and trainers do not; {remedy}"
            )
    if type(vocabulary := hf_config.get("vocab_size")) is int:
        check_token_ids(hf_config, vocabulary, "config.json")
    rope(hf_config)


def rope(hf_config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the type and the parameters of the rotary embeddings, from wherever config.json has them.

    Raises ConfigError where two places contradict each other, or a parameter is no number that can be computed with.
    """
    outer = {key: hf_config[key] for key in (_THETA, _PART, _ORIGINAL) if hf_config.get(key) is not None}
    found: dict[str, dict[str, Any]] = {}
    for name in ("rope_scaling", "rope_parameters"):
        if (section := hf_config.get(name)) is None:
            continue
        if not isinstance(section, dict):
            raise ConfigError(
                f"model.path: the rotary embeddings of config.json must be an object, are {shown(section)}"
            )
        if section:
            found[name] = _section(name, section, outer)
    if len(found) > 1:
        _check_equal(found)
    chosen = next(iter(found.values()), {"rope_type": "default"} | outer)
    kind = chosen["rope_type"]
    _check_numbers(kind if isinstance(kind, str) else "", chosen)
    return kind, chosen


def _section(name: str, section: Mapping[str, Any], outer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of one section, completed by the keys that may be outside of it."""
    given = {key: value for key, value in section.items() if value is not None}
    if inner := next((key for key, value in given.items() if isinstance(value, dict)), None):
        raise ConfigError(
            f"model.path: config.json has rotary embeddings of their own for {shown(inner)} in {name}; only one kind "
            "for all layers is supported"
        )
    _agreed({f"{name}.rope_type": given.get("rope_type"), f"{name}.type": given.get("type")})
    for key, value in outer.items():
        _agreed({key: value, f"{name}.{key}": given.get(key)})
    kind = given.pop("type", "default")
    return {"rope_type": kind} | dict(outer) | given


def _check_equal(found: Mapping[str, Mapping[str, Any]]) -> None:
    (one, first), (other, second) = found.items()
    for key in dict.fromkeys([*first, *second]):
        if not _equal(first.get(key), second.get(key)):
            said = (
                f"{name}.{key}={shown(section[key])}" if key in section else f"no {name}.{key}"
                for name, section in ((one, first), (other, second))
            )
            raise ConfigError(f"model.path: config.json has {' and '.join(said)}; leave one of {one} and {other} out")


def _check_numbers(kind: str, parameters: Mapping[str, Any]) -> None:
    if wrong := next((key for key in _ROPE_ENGINES_ALONE if parameters.get(key)), None):
        raise ConfigError(f"model.path: config.json has rotary embeddings with {wrong}, which trainers do not have")
    needed = _ROPE_NUMBERS.get(kind, ())
    for key in (*needed, *(key for key in (_THETA, _PART, *_ROPE_OPTIONAL) if key in parameters)):
        positive_number(parameters, key)
    for key in ("mscale", "mscale_all_dim"):
        if parameters.get(key):
            positive_number(parameters, key)
    if parameters.get(_THETA, 10_000) <= 1:
        raise ConfigError(f"model.path: config.json needs a {_THETA} above 1, has {shown(parameters[_THETA])}")
    if parameters.get(_PART, 1) > 1:
        raise ConfigError(f"model.path: config.json needs a {_PART} of 1 at most, has {shown(parameters[_PART])}")
    if kind == "llama3" and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
        raise ConfigError(
            f"model.path: config.json needs a high_freq_factor above low_freq_factor={parameters['low_freq_factor']}, "
            f"has {shown(parameters['high_freq_factor'])}"
        )


def positive_number(described: Mapping[str, Any], key: str) -> float:
    """Returns a number of config.json. Raises ConfigError for what is none, is not above 0, or is not finite."""
    value = described.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < _MOST:
        raise ConfigError(f"model.path: config.json needs a positive number {key}, has {shown(value)}")
    return value


def check_token_ids(described: Mapping[str, Any], vocabulary: int, file: str) -> None:
    """Raises ConfigError if a file that describes a model names a token that a vocabulary of this size does not
    have."""
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        named = described.get(key)
        for token in named if isinstance(named, list) and key == "eos_token_id" else [named]:
            if token is None or (key == "pad_token_id" and token == -1 and type(token) is int):
                continue
            if type(token) is not int or not 0 <= token < vocabulary:
                raise ConfigError(
                    f"model.path: {file} has {key}={shown(named)}; tokens of the model are 0 to {vocabulary - 1}"
                )


def _agreed(named: Mapping[str, Any]) -> None:
    """Raises ConfigError unless all names that have a value have the same."""
    given = {name: value for name, value in named.items() if value is not None}
    for name, value in given.items():
        (first, expected), *_ = given.items()
        if not _equal(expected, value):
            raise ConfigError(
                f"model.path: config.json has {first}={shown(expected)} and {name}={shown(value)}, two names of the "
                "same; leave one out"
            )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, str) and isinstance(other, str):
        return one.removeprefix("torch.") == other.removeprefix("torch.")
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def shown(value: Any) -> str:
    """Returns what config.json says, as a part of a message of one line."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return printable(
        repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a number of many digits", 60
    )
