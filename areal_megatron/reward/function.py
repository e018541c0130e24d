"""Which function scores answers, and what it may return."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from numbers import Real
from pathlib import Path

from areal_megatron.config import ConfigError

RewardFunction = Callable[[str, str, str], float]
"""f(prompt, response, answer) → score: 1 is correct, 0 is wrong, anything finite between and beyond counts
in proportion: reward = (1 − score) · incorrect + score · correct."""

BUILT_IN = {"math": "areal_megatron.reward.math:score", "choice": "areal_megatron.reward.choice:score"}


def load_function(name: str) -> RewardFunction:
    """The function that `reward.function` names; the current folder may hold it. Raises ConfigError."""
    module_name, colon, function_name = BUILT_IN.get(name, name).partition(":")
    if not (module_name and colon and function_name):
        expected = f"{', '.join(BUILT_IN)} or package.module:function"
        raise ConfigError(f"reward.function: {name!r} is no reward, expected {expected}")
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
