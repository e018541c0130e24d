"""Rewards that depend on the other answers to the same prompt: named terms, which a function of the user's adds."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Mapping, Sequence

import msgspec

from areal_megatron.config import ConfigError
from areal_megatron.config.user_function import check_path, import_function
from areal_megatron.reward.function import LARGEST_SCORE, WrongResult, is_score

KEY = "reward.group_function"
_MOST_TERMS = 32


class GroupAnswer(msgspec.Struct, kw_only=True):
    """One of the answers to a prompt, as a group function gets it."""

    response: str = ""
    """The text after the prompt; in an episode of several answers, with the environment's messages."""
    tokens: int
    """The number of tokens that the model sampled."""
    truncated: bool
    versions: list[int] = []
    """The policy versions that sampled its tokens, in ascending order."""
    score: float
    """What the reward function returned, or the workflow."""
    correct: bool
    reward: float
    """The reward without the terms, between reward.wrong and reward.right for a score between 0 and 1."""


GroupFunction = Callable[[str, str, Sequence[GroupAnswer]], Mapping[str, Sequence[float]]]
"""f(prompt, answer, answers) → the terms by name, each with a number for each of `answers`, in their order.

`answer` is the right one. What all terms have for an answer is added to its reward.
"""


def load_group_function(path: str) -> GroupFunction:
    """Returns the function that reward.group_function names; its module may be in the current folder.

    Raises ConfigError if there is no such function, or if it cannot be called with three arguments.
    """
    check_path(path, KEY)
    if not all(path.partition(":")):
        raise ConfigError(f"{KEY}: {path!r} is no import path, expected package.module:function")
    function = import_function(path, KEY)
    try:
        inspect.signature(function).bind("prompt", "answer", [])
    except TypeError as e:
        raise ConfigError(f"{KEY}: {path} cannot be called with (prompt, answer, answers): {e}") from None
    except ValueError:  # a function that is not written in Python does not say what it takes
        pass
    return function


def checked_terms(result: object, answers: int) -> dict[str, list[float]]:
    """Returns the terms that a group function returned. Raises WrongResult that says what is wrong with them."""
    if not isinstance(result, Mapping) or len(result) > _MOST_TERMS:
        raise WrongResult(
            f"{KEY} returned {reprlib.repr(result)}, expected up to {_MOST_TERMS} terms: {{name: [a number for each "
            "answer]}"
        )
    terms = {}
    for name, values in result.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise WrongResult(f"{KEY} returned a term {reprlib.repr(name)}, expected a name of letters, digits and _")
        values = list(values)
        if len(values) != answers:
            raise WrongResult(f"{KEY} returned {len(values)} values of {name} for {answers} answers")
        if bad := [value for value in values if not is_score(value)]:
            raise WrongResult(
                f"{KEY} returned {reprlib.repr(bad[0])} as a value of {name}, expected a finite number of at most "
                f"{LARGEST_SCORE:,.0f}"
            )
        terms[name] = [float(value) for value in values]
    return terms
