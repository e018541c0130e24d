"""What a program gives to areal.Policy, checked before anything is done with it. All functions raise ConfigError."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import numpy as np

from areal_megatron.config import ConfigError, RolloutConfig
from areal_megatron.config.fields import PPOConfig
from areal_megatron.config.rules import check_field
from areal_megatron.data.formats import Chat, check_messages
from areal_megatron.protocol import GivePrompt

LOSS_SETTINGS = ("objective", "clip_low", "clip_high", "dual_clip")
"""Keys of the section ppo that a call may give another value."""
SEED_BITS = 62
_MOST_LIKELY = 20
"""What vLLM tells of a token's place unless it is told otherwise."""
MOST_ANSWERS = 16384
"""To one prompt at once: what vLLM takes unless VLLM_MAX_N_SEQUENCES says otherwise."""


def answer_settings(
    n: Any, max_tokens: Any, temperature: Any, top_p: Any, top_k: Any, stop_tokens: Any, seed: Any
) -> GivePrompt:
    """Returns how answers are asked for, without a prompt yet, within the bounds that vLLM has: one at temperature 0,
    where all would be equal."""
    temperature = number(temperature, "temperature", 0, 2)
    n = whole(n, "n", 1, MOST_ANSWERS)
    return GivePrompt(
        tokens=[],
        n=n if temperature else 1,
        max_tokens=whole(max_tokens, "max_tokens", 1),
        temperature=temperature,
        top_p=number(top_p, "top_p", math.ulp(0.0), 1),
        top_k=whole(top_k, "top_k", 0),
        stop_tokens=tokens(stop_tokens, "stop_tokens").tolist(),
        seed=whole(seed, "seed", 0, 2**63 - 1) % 2**SEED_BITS,
    )


def whole(value: Any, name: str, low: int, high: int = 2**31 - 1) -> int:
    """Returns a whole number, from `low` to `high`, of any type that says it is one."""
    try:
        found = operator.index(value) if not isinstance(value, bool | np.bool_) else None
    except TypeError:
        found = None
    if found is None or not low <= found <= high:
        raise ConfigError(f"{name}: must be a whole number from {low} to {high}, is {value!r}")
    return found


def top_k(value: Any, rollout: RolloutConfig) -> int:
    """Returns how many of the likeliest tokens engines are to tell in the place of each."""
    most, found = rollout.vllm.get("max_logprobs", _MOST_LIKELY), whole(value, "top_k", 0)
    if 0 <= most < found:
        raise ConfigError(f"top_k: {found}, and engines tell 0 to {most}; rollout.vllm.max_logprobs is the most")
    return found


def path(value: Any, name: str) -> Path:
    """Returns a path that a file may have."""
    if not isinstance(value, str | os.PathLike) or "\0" in str(value):
        raise ConfigError(f"{name}: must be a path, is {value!r}")
    return Path(value)


def check_text(value: str, where: str) -> None:
    """Checks that a text has bytes."""
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise ConfigError(f"{where}: \\u{ord(value[e.start]):04x} is half of a character") from None


def prompt(value: Any, where: str) -> str | Chat | np.ndarray:
    """Returns a text, messages, or token ids, int32 [n]."""
    if isinstance(value, Mapping):
        raise ConfigError(f"{where}: is one message: a conversation is a list of them")
    if isinstance(value, str):
        check_text(value, where)
        return value
    if not (isinstance(value, list | tuple) and value and isinstance(value[0], Mapping)):
        return tokens(value, where)
    messages = [dict(message) if isinstance(message, Mapping) else message for message in value]
    check_messages(messages, "messages", where)
    for message in messages:
        check_text(message["role"] + message["content"], where)
    return messages


def number(value: Any, name: str, low: float, high: float = math.inf) -> float:
    """Returns a finite number, from `low` to `high`, of any type that is one."""
    try:
        found = math.nan if isinstance(value, str | bytes | bool | np.bool_) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not (math.isfinite(found) and low <= found <= high):
        bounds = f"from {low:g} to {high:g}" if high < math.inf else f"of {low:g} or more"
        raise ConfigError(f"{name}: must be a finite number {bounds}, is {value!r}")
    return found


def tokens(value: Any, where: str) -> np.ndarray:
    """Returns token ids, int32 [n], which may be none. They are whole numbers already: nothing is rounded."""
    try:
        found = np.asarray(value)
    except (ValueError, OverflowError):  # rows of several lengths; beyond any type
        found = np.zeros((0, 0))
    if found.ndim == 1 and not found.size:
        return np.zeros(0, np.int32)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ConfigError(f"{where}: must be token ids, a sequence of whole numbers")
    if found.min() < 0 or found.max() >= 2**31:
        raise ConfigError(f"{where}: has {found[(found < 0) | (found >= 2**31)][0]}, which is no token id")
    return found.astype(np.int32)


def of_tokens(value: Any, length: int, where: str, kinds: str = "fiu", dtype: type = np.float32) -> np.ndarray:
    """Returns a value for each token, [length], from one for each or one for all. `kinds`: the kinds of NumPy's types
    that it may have."""
    try:
        found = np.asarray(value)
    except ValueError:
        found = np.asarray("")
    if kinds == "b" and found.dtype.kind in "iu" and np.isin(found, (0, 1)).all():
        found = found.astype(np.bool_)
    if found.dtype.kind not in kinds:
        what = {"fiu": "a number", "iu": "a whole number", "b": "True or False"}[kinds]
        raise ConfigError(f"{where}: must be {what}, or one for each token")
    if found.ndim == 0:
        found = np.full(length, found)
    if found.shape != (length,):
        raise ConfigError(f"{where}: has the shape {list(found.shape)}, and there are {length} tokens")
    with np.errstate(over="ignore"):
        found = found.astype(dtype)
    if not np.isfinite(found).all():
        raise ConfigError(f"{where}: must be finite")
    return found


def routes(value: Any, where: str) -> np.ndarray:
    """Returns the experts of tokens, as an answer has them: anything else would be no message to the controller."""
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype not in (np.uint8, np.uint16):
        raise ConfigError(f"{where}: must be those of an answer, an array of uint8 or uint16, or left out")
    return value


def loss_settings(given: Mapping[str, Any]) -> dict[str, float | str]:
    """Returns values for LOSS_SETTINGS, each within the bounds of its key."""
    by_name = {f.name: f for f in fields(PPOConfig) if f.name in LOSS_SETTINGS}
    found: dict[str, float | str] = {}
    for name, value in given.items():
        if name not in by_name:
            raise ConfigError(f"{name}: is no setting of a loss; these are {', '.join(LOSS_SETTINGS)}")
        f = by_name[name]
        found[name] = number(value, name, -math.inf) if isinstance(f.default, float) else value
        check_field(name, f, found[name])
    return found


def several(value: Any, what: str, of: type) -> Sequence:
    """Returns a sequence of `of`, where somebody may have given a single one."""
    if isinstance(value, str | bytes | Mapping | of) or not isinstance(value, Sequence | np.ndarray):
        raise ConfigError(f"{what}: must be a list of them, is {type(value).__name__}")
    return cast(Sequence, value)
