"""Patterns of names: all tensors whose names differ in numbers alone, as `model.layers.{}.mlp.experts.{}.w1.weight`.

A `{}` counts from 0, a `{3}` from 3: `model.layers.{3}.mlp.gate.weight` at index 0 is layer 3. A `{3,7,11}` takes these
numbers one after another.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from operator import getitem

NUMBER = re.compile(r"\{([\d,]*)\}")
"""One number of a pattern."""


def numbers(pattern: str) -> int:
    """Returns how many numbers the names of a pattern have."""
    return pattern.count("{")


def name_at(pattern: str, indices: Iterable[int]) -> str:
    """Returns the name that a pattern has at these indices, one for each of its numbers."""
    plain, taken = _plain(pattern)
    return plain.format(*map(getitem, taken, indices))


def taken_numbers(pattern: str) -> tuple[Sequence[int], ...]:
    """Returns for each number of a pattern what it is at index 0, 1, …; what counts has no end."""
    return _plain(pattern)[1]


def numbered(pattern: str, own: Sequence[int]) -> str:
    """Returns the pattern whose first number, which counts from 0, takes the numbers `own` instead."""
    counts = own[-1] - own[0] + 1 == len(own)
    given = ("" if own[0] == 0 else str(own[0])) if counts else ",".join(map(str, own))
    return pattern.replace("{}", f"{{{given}}}", 1)


@cache
def _plain(pattern: str) -> tuple[str, tuple[Sequence[int], ...]]:
    return NUMBER.sub("{}", pattern), tuple(map(_taken, NUMBER.findall(pattern)))


def _taken(given: str) -> Sequence[int]:
    first, *others = map(int, given.split(",")) if given else (0,)
    return (first, *others) if others else range(first, sys.maxsize)
