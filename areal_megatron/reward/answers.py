"""Checks of the right answers of data, before a run: whether a built-in reward can compare a response with them."""

from __future__ import annotations

import re
import string
from collections.abc import Callable

from areal_megatron.reward.code import parse_tests
from areal_megatron.reward.math import right_answers
from areal_megatron.reward.numeral import LONGEST_BARE, bare
from areal_megatron.run.json_input import parse_json


def problem_with_answers(function: str) -> Callable[[str], str]:
    """Returns a function of a row's answer that says what keeps `reward.function` from using it; "" if nothing does."""
    return {"choice": _not_a_letter, "code": _no_tests, "math": _no_formula}.get(function, _empty)


def _empty(answer: str) -> str:
    return "" if answer.strip() else "it is empty"


def _no_formula(answer: str) -> str:
    if not answer.strip():
        return "it is empty"
    if _holds_object(answer):
        return "it is an object, which no formula equals: name a function of yours (docs/rewards.md#your-own-function)"
    for one in right_answers(answer):
        text = bare(one)
        if len(text) > LONGEST_BARE:
            return f"it has {len(text):,} characters, and an answer of more than {LONGEST_BARE:,} is never right"
        if not re.search(r"\w|\\", text) and text not in ("∞", "∅"):
            return "it holds no number, symbol or word to compare with"
    return ""


def _holds_object(answer: str) -> bool:
    """Whether an answer is a JSON object, or a list with one."""
    if answer.lstrip()[:1] not in ("{", "["):
        return False
    try:
        value = parse_json(answer)
    except (ValueError, RecursionError):
        return False
    return any(isinstance(one, dict) for one in (value if isinstance(value, list) else [value]))


def _not_a_letter(answer: str) -> str:
    return "" if len(answer) == 1 and answer in string.ascii_uppercase else "expected the capital letter of a choice"


def _no_tests(answer: str) -> str:
    try:
        parse_tests(answer)
    except ValueError as e:
        return str(e)
    return ""
