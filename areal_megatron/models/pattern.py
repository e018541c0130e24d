"""Patterns of names: all tensors whose names differ in numbers alone, as `model.layers.{}.mlp.experts.{}.w1.weight`.

A `{}` counts from 0, a `{3}` from 3: `model.layers.{3}.mlp.gate.weight` at index 0 is layer 3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from operator import add

_NUMBER = re.compile(r"\{(\d*)\}")


def numbers(pattern: str) -> int:
    """Returns how many numbers the names of a pattern have."""
    return pattern.count("{")


def name_at(pattern: str, indices: Iterable[int]) -> str:
    """Returns the name that a pattern has at these indices, one for each of its numbers."""
    plain, first = _plain(pattern)
    return plain.format(*map(add, first, indices))


def first_numbers(pattern: str) -> tuple[int, ...]:
    """Returns what each number of a pattern begins with."""
    return _plain(pattern)[1]


def counted_from(pattern: str, first: int) -> str:
    """Returns the pattern whose first number, which begins with 0, begins with `first`."""
    return pattern.replace("{}", f"{{{first}}}", 1) if first else pattern


@cache
def _plain(pattern: str) -> tuple[str, tuple[int, ...]]:
    return _NUMBER.sub("{}", pattern), tuple(int(number or 0) for number in _NUMBER.findall(pattern))
