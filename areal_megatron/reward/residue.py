"""Whole numbers with certain remainders, in all forms: n ≡ 1 (mod 4), n ≡ 1, 5 (mod 8), n = 4k + 1 for an integer k."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from areal_megatron.reward.form import steps
from areal_megatron.reward.formula import Formula, chosen
from areal_megatron.reward.value import names_of

_INDICES = frozenset("jklmnrst")
_LARGEST_MODULUS = 10_000


@dataclass(frozen=True)
class Residues:
    """The whole numbers with these remainders."""

    name: str
    """The symbol that they are values of; "" if there is none."""
    modulus: int
    remainders: frozenset[int]
    certain: bool
    """Whether the answer says that they are all such numbers; n = 4k + 1 may leave k to the question."""

    def same(self, other: Residues) -> bool:
        """Whether these are the same numbers, of the same symbol if both have one."""
        common = lcm(self.modulus, other.modulus)
        if common > _LARGEST_MODULUS or (self.name and other.name and self.name != other.name):
            return False
        ours, theirs = (
            {rest + step for rest in one.remainders for step in range(0, common, one.modulus)} for one in (self, other)
        )
        return ours == theirs


def residues_of(node: Formula | None, index: str) -> Residues | None:
    """Returns the whole numbers that an answer says; None for any other answer. `index`: the symbol that it declares
    to be any integer, or ""."""
    if node is None:
        return None
    if node.kind != "list" and any(part.kind == "either" for part in node.all()):
        node = Formula("list", (chosen(node, "±"), chosen(node, "∓")), "or")
    if node.kind == "list" and node.value in (",", "or"):
        each = [one for part in node.parts if (one := residues_of(part, index))]
        if len(each) < len(node.parts) or len({(one.name, one.modulus) for one in each}) > 1:
            return None  # x ≡ 1 (mod 3), x ≡ 2 (mod 5) holds both
        return Residues(
            each[0].name, each[0].modulus, frozenset().union(*(one.remainders for one in each)), each[0].certain
        )
    if node.kind == "congruence":
        *names, rest, modulus = node.parts
        left, size = _whole(rest), _whole(modulus)
        if left is None or size is None or size < 1 or any(name.kind != "name" for name in names) or len(names) > 1:
            return None
        if abs(left) >= size or steps(rest) or steps(modulus):  # not worked out
            return None
        return Residues(str(names[0].value) if names else "", size, frozenset((left % size,)), True)
    if node.kind != "relation" or node.value != ("=",) or node.parts[0].kind != "name":
        return None
    name, value = str(node.parts[0].value), node.parts[1]
    symbols = names_of(value)
    if len(symbols) != 1 or name in symbols or not symbols <= ({index} if index else _INDICES):
        return None
    line = _line(value, *symbols)
    if not line or steps(value) or any(number.denominator != 1 for number in line) or abs(line[0]) < 2:
        return None
    step, rest = abs(int(line[0])), int(line[1])
    return Residues(name, step, frozenset((rest % step,)), bool(index))


def _whole(node: Formula) -> int | None:
    line = _line(node, "")
    return int(line[1]) if line and line[1].denominator == 1 else None


def _line(node: Formula, name: str) -> tuple[Fraction, Fraction] | None:
    """Returns a and b for a formula a · name + b."""
    parts = [line for part in node.parts if (line := _line(part, name))]
    if node.kind == "number":
        return Fraction(0), node.value
    if node.kind == "name" and node.value == name:
        return Fraction(1), Fraction(0)
    if not parts or len(parts) < len(node.parts):
        return None
    if node.kind == "negative":
        return -parts[0][0], -parts[0][1]
    if node.kind == "sum":
        return sum((a for a, _ in parts), Fraction(0)), sum((b for _, b in parts), Fraction(0))
    if node.kind == "product" and sum(a != 0 for a, _ in parts) < 2:
        found = Fraction(0), Fraction(1)
        for a, b in parts:
            found = found[0] * b + found[1] * a, found[1] * b
        return found
    return None
