"""Loads the reward function that a config names, and checks what it returns."""

from __future__ import annotations

import difflib
import functools
import inspect
import reprlib
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, TypeGuard, cast

from areal_megatron.config import ConfigError, RewardConfig
from areal_megatron.config.user_function import check_path, import_function

RewardFunction = Callable[..., float | tuple[float, str]]
"""f(prompt, response, answer) → score, or (score, feedback); one with a parameter `row` gets the row of the data set
as well, a dict of its columns.

A score is a number from −LARGEST_SCORE to LARGEST_SCORE: 1 is correct, 0 is wrong, and others, between or beyond, count
in proportion: reward = (1 − score) · incorrect + score · correct. Feedback is a text for a model that may try again.
"""

BUILT_IN = {name: f"areal_megatron.reward.{name}:score" for name in ("math", "choice", "code")}
OF_SERVED = ("model", "judge")
"""Functions that ask a model that the run serves beside the policy."""
PURE = ("math", "choice")
"""Built-in functions whose verdict depends on nothing but the answer: what they cannot finish, twice, is its doing."""
LARGEST_SCORE = 1e6
"""A larger one is a fault of the function: of one enormous reward, all other advantages of the batch would be 0."""
_LONGEST_FEEDBACK = 10_000
"""Characters."""
OWN_SHARE = 0.8
"""The share of reward.timeout_s that rewards with a time limit of their own get, so that no worker is killed."""


def load_function(name: str, timeout_s: float = RewardConfig.timeout_s, run: str = "") -> RewardFunction:
    """Returns the function that `reward.function` names; its module may be in the current folder. `run`: the run's
    folder, if there is a run.

    Raises ConfigError if there is no such function, if it cannot be called with these arguments, and for `code` if this
    machine cannot isolate programs.
    """
    limit_s = OWN_SHARE * timeout_s
    if name.startswith(("http://", "https://")):
        from areal_megatron.reward import remote  # aiohttp takes a while to import

        return remote.function(name, limit_s)
    if name == "model":
        from areal_megatron.reward import model

        return model.function(run, limit_s)
    if name == "judge":
        from areal_megatron.reward import judge

        return judge.function(run, limit_s)
    function = _import(name)
    _check_signature(name, function)
    if name == "code":
        from areal_megatron.reward.sandbox import check_isolation

        check_isolation()
        return functools.partial(function, limit_s=limit_s)
    return function


def _import(name: str) -> Callable:
    check_name(name)
    return import_function(BUILT_IN.get(name, name), "reward.function")


def check_name(name: str, key: str = "reward.function") -> None:
    """Raises ConfigError for what is no reward and no import path; imports nothing. `key`: where it is named."""
    check_path(name, key)
    if name not in (*BUILT_IN, *OF_SERVED) and not all(name.partition(":")):
        near = difflib.get_close_matches(name, (*BUILT_IN, *OF_SERVED), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        expected = f"{', '.join((*BUILT_IN, *OF_SERVED))}, an http:// or https:// address, or package.module:function"
        raise ConfigError(f"{key}: {name!r} is no reward, expected {expected}{hint}")


def _check_signature(name: str, function: Callable) -> None:
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"reward.function: {name} is `async def`; a reward is a plain function: write `def`")
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function that is not written in Python does not say what it takes
        return
    try:
        signature.bind("prompt", "response", "answer", **({"row": {}} if takes_row(function) else {}))
    except TypeError:
        takes = ", ".join(str(one.replace(annotation=one.empty)) for one in signature.parameters.values())
        raise ConfigError(
            f"reward.function: {name} must take (prompt, response, answer) and perhaps row, a dict of the row's "
            f"columns; it takes ({takes})"
        ) from None


def takes_row(function: Callable) -> bool:
    """Whether a reward function has a parameter `row`."""
    try:
        parameter = inspect.signature(function).parameters.get("row")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def scored(
    function: RewardFunction, prompt: str, response: str, answer: str, row: Mapping[str, Any] | None
) -> tuple[float, str]:
    """Returns the score and the feedback that a reward function gives, as `checked` does. `row`: None if it takes none.

    Raises WrongResult, and whatever the function does.
    """
    return checked(function(prompt, response, answer, **({} if row is None else {"row": row})))


class WrongResult(ValueError):
    """A reward function or a group function returned something else than it may."""


def is_score(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number that may become a reward."""
    return isinstance(value, Real) and bool(abs(cast(float, value)) <= LARGEST_SCORE)


def checked(result: object, of: str = "the reward function") -> tuple[float, str]:
    """Returns the score and the feedback ("" if there is none, the first characters of a long one) from what a reward
    function, or what `of` names, returned.

    Raises WrongResult for a score that is no number, or beyond LARGEST_SCORE.
    """
    score, feedback = result if isinstance(result, tuple) and len(result) == 2 else (result, "")
    if not is_score(score):
        raise WrongResult(
            f"{of} returned {reprlib.repr(score)}, expected a finite number of at most {LARGEST_SCORE:,.0f}"
        )
    return float(score), feedback[:_LONGEST_FEEDBACK] if isinstance(feedback, str) else ""
