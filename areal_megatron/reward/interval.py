"""Intervals in all their forms: [1, 2), 1 ≤ x < 2, {x | 1 ≤ x < 2}, unions, differences and conditions that hold
together."""

from __future__ import annotations

import functools
import itertools
from fractions import Fraction

from areal_megatron.reward.formula import Formula, negated
from areal_megatron.reward.value import NoValue, Values, is_constant, names_of

_INEQUALITIES = {"<": "<", "≤": "<", ">": ">", "≥": ">"}
TURNED = {"<": ">", "≤": "≥", ">": "<", "≥": "≤", "=": "=", "≠": "≠"}
"""Relations with their sides exchanged."""
_INFINITY = Formula("name", value="∞")
_MINUS_INFINITY = Formula("negative", (_INFINITY,))
_REALS = {"mathbb R": _MINUS_INFINITY, "mathbb R+": Formula("number", value=Fraction(0))}
"""Sets of real numbers and where they begin."""
_MOST_CONDITIONS = 6


def intervals_of(node: Formula) -> tuple[str, list[Formula]] | None:
    """Returns the symbol ("" if there is none) and the intervals and sets that it is in; None for anything else."""
    if node.kind == "builder":
        found = intervals_of(node.parts[1])
        return found if found and node.parts[0] == Formula("name", value=found[0]) else None
    if node.kind == "bracket" and node.value == "{}" and [part.kind for part in node.parts] == ["relation"]:
        return _of_relation(node.parts[0])
    if node.kind == "bracket":
        return ("", [node]) if node.value == "{}" or len(node.parts) == 2 else None
    if node.kind == "name" and node.value in _REALS:
        return "", [_interval("(", _REALS[node.value], _INFINITY, ")")]
    if node.kind == "relation":
        return _of_relation(node)
    if node.kind == "sets" and node.value == "∖" and len(node.parts) == 2 and intervals_of(node.parts[0]):
        whole, left = node.parts
        if whole.kind == "name" and left.kind == "bracket" and left.value == "{}" and all(map(is_constant, left.parts)):
            return "", _around(*left.parts)
        return None
    if (node.kind == "sets" and node.value == "∪") or node.kind == "list":
        found = [some for part in node.parts if (some := intervals_of(part))]
        if len(found) < len(node.parts) or len({name for name, _ in found}) > 1:
            return None
        if node.kind == "list" and not all(part.kind == "relation" for part in node.parts):
            return None
        met = _intersection([some for _, some in found]) if node.kind == "list" and node.value != "or" else []
        if met or node.value == "and":
            return (found[0][0], met) if met else None
        return found[0][0], [piece for _, some in found for piece in some]
    return None


def _interval(opened: str, low: Formula, high: Formula, closed: str) -> Formula:
    return Formula("bracket", (low, high), opened + closed)


def _of_either_sign(interval: Formula) -> list[Formula]:
    """Returns where a number is of which the absolute value is in an interval."""
    (low, high), (opened, closed), turned = interval.parts, interval.value, {"(": ")", "[": "]", ")": "(", "]": "["}
    if low == _MINUS_INFINITY:
        return [_interval(turned[closed], negated(high), high, closed)]
    return [_interval(turned[closed], negated(high), negated(low), turned[opened]), interval]


def _around(*points: Formula) -> list[Formula]:
    """Returns the intervals between numbers, in any order."""
    ends = [_MINUS_INFINITY, *sorted(points, key=functools.cmp_to_key(_order)), _INFINITY]
    return [_interval("(", low, high, ")") for low, high in itertools.pairwise(ends)]


def _of_relation(node: Formula) -> tuple[str, list[Formula]] | None:
    sides, relations = node.parts, node.value
    if size := next((side for side in sides if side.kind == "call" and side.value == "abs"), None):
        name = size.parts[0]
        found = _of_relation(Formula("relation", tuple(name if side is size else side for side in sides), relations))
        if not found or found[0] != name.value or name.value in ("z", "w") or "{}" in (one.value for one in found[1]):
            return None
        return found[0], [piece for one in found[1] for piece in _of_either_sign(one)]
    if relations == ("∈",) and sides[0].kind == "name":
        found = intervals_of(sides[1])
        return (str(sides[0].value), found[1]) if found and found[0] in ("", sides[0].value) else None
    if relations == ("≠",) and sides[0].kind == "name":
        points = [sides[1].parts[0], negated(sides[1].parts[0])] if sides[1].kind == "either" else [sides[1]]
        return (str(sides[0].value), _around(*points)) if all(map(is_constant, points)) else None
    if not set(relations) <= set(_INEQUALITIES) or len({_INEQUALITIES[one] for one in relations}) > 1:
        return None
    if _INEQUALITIES[relations[0]] == ">":
        sides, relations = sides[::-1], tuple(TURNED[one] for one in reversed(relations))
    opened, closed = "(" if relations[0] == "<" else "[", ")" if relations[-1] == "<" else "]"
    if len(sides) == 3 and sides[1].kind == "name":
        return str(sides[1].value), [_interval(opened, sides[0], sides[2], closed)]
    if len(sides) == 2 and sides[0].kind == "name" and sides[0] != _INFINITY and not _holds(sides[1], sides[0]):
        return str(sides[0].value), [_interval("(", _MINUS_INFINITY, sides[1], closed)]
    if len(sides) == 2 and sides[1].kind == "name" and sides[1] != _INFINITY and not _holds(sides[0], sides[1]):
        return str(sides[1].value), [_interval(opened, sides[0], _INFINITY, ")")]
    return None


def _holds(node: Formula, name: Formula) -> bool:
    return str(name.value) in names_of(node)


def _order(one: Formula, other: Formula) -> int:
    """Returns -1, 0 or 1; 0 also where nobody knows."""
    for low, high, found in ((one, other, -1), (other, one, 1)):
        if one != other and (low == _MINUS_INFINITY or high == _INFINITY):
            return found
    try:
        values = Values(one, other)
        known = is_constant(one) and is_constant(other)
        return values.less(other, one) - values.less(one, other) if known else 0
    except NoValue:
        return 0


def _intersection(unions: list[list[Formula]]) -> list[Formula]:
    """Returns the intervals that unions of intervals have in common; [] also for too many unions."""
    found, *rest = unions if len(unions) <= _MOST_CONDITIONS else [[]]
    for union in rest:
        found = [met for one, other in itertools.product(found, union) if (met := _met(one, other))]
    return found


def _met(one: Formula, other: Formula) -> Formula | None:
    """Returns what two intervals have in common; None if that is nothing, a point, or unknown."""
    if "{}" in (one.value, other.value):
        return None
    lows, highs = (one.parts[0], other.parts[0]), (one.parts[1], other.parts[1])
    low, high = _order(*lows), _order(*highs)
    opened = one.value[0] if low > 0 else other.value[0] if low < 0 else min(one.value[0], other.value[0])
    closed = one.value[1] if high < 0 else other.value[1] if high > 0 else min(one.value[1], other.value[1])
    start, end = lows[low < 0], highs[high > 0]
    constant = all(is_constant(part) or part in (_INFINITY, _MINUS_INFINITY) for part in (start, end))
    return _interval(opened, start, end, closed) if not constant or _order(start, end) < 0 else None
