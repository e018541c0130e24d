"""Which function scores answers, and what it may return."""

from __future__ import annotations

import difflib
import functools
import importlib
import math
import sys
from collections.abc import Callable
from numbers import Real
from pathlib import Path

from areal_megatron.config import ConfigError, Reward

RewardFunction = Callable[[str, str, str], float]
"""f(prompt, response, answer) → score: 1 is correct, 0 is wrong, anything finite between and beyond counts
in proportion: reward = (1 − score) · incorrect + score · correct."""

BUILT_IN = {name: f"areal_megatron.reward.{name}:score" for name in ("math", "choice", "code")}
_OWN_SHARE = 0.8
"""Of reward.timeout_s, for rewards with a time limit of their own: a worker need not be killed for them."""


def load_function(name: str, timeout_s: float = Reward.timeout_s) -> RewardFunction:
    """The function that `reward.function` names; the current folder may hold it. Raises ConfigError.

    `code` is refused where this machine cannot isolate programs.
    """
    limit_s = _OWN_SHARE * timeout_s
    if name.startswith(("http://", "https://")):
        from areal_megatron.reward import remote  # aiohttp takes a while to import

        return remote.function(name, limit_s)
    function = _import(name)
    if name == "code":
        from areal_megatron.reward.sandbox import check_isolation

        check_isolation()
        return functools.partial(function, limit_s=limit_s)
    return function


def _import(name: str) -> Callable:
    module_name, colon, function_name = BUILT_IN.get(name, name).partition(":")
    if not (module_name and colon and function_name):
        near = difflib.get_close_matches(name, BUILT_IN, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        expected = f"{', '.join(BUILT_IN)}, an http:// or https:// address, or package.module:function"
        raise ConfigError(f"reward.function: {name!r} is no reward, expected {expected}{hint}")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as e:  # the module is the user's: whatever its import raises is his to read
        raise ConfigError(f"reward.function: cannot import {module_name}: {type(e).__name__}: {e}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"reward.function: {module_name} has no function {function_name}")
    return function


def checked(score: object) -> float:
    """The score as a float. Raises ValueError for what is no finite number."""
    if not isinstance(score, Real) or not math.isfinite(score):
        raise ValueError(f"the reward function returned {score!r}, expected a finite number")
    return float(score)
