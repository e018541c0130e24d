"""Values of formulas, exact where they are rational and else with more digits than the numbers in the formulas have.

Two formulas with symbols are equal if their values are, at points that are drawn by rule. Rational values are Fractions
and compared as such. Others are compared up to rounding, relative to the largest number that was rounded.
"""

from __future__ import annotations

import functools
import hashlib
import math
from fractions import Fraction
from typing import Any

import mpmath
from mpmath.libmp import NoConvergence

from areal_megatron.reward.formula import Formula
from areal_megatron.reward.numeral import words

_MOST_BITS = 40_000
"""The most of numerator or denominator of a rational value."""
_MOST_POINTS = 9
_WHOLE = range(_MOST_POINTS, _MOST_POINTS + 10)
"""More points for formulas with values for whole numbers only: enough to make (-1)^n differ from 1 at some of them."""
_SIGNED = range(_WHOLE.stop, _WHOLE.stop + 10)
"""More points of either sign for absolute values and roots, so that xy is negative at one of them."""
_ENOUGH_POINTS = 2
_LEAST_PRECISION = 500
_MOST_PRECISION = 16_000
"""Bits."""
_MOST_FACTORIAL = 2000
_MOST_EVALUATED = 250
"""Functions and irrational powers, at all points together."""

Value = Any
"""A Fraction, or a number of mpmath, which has no types."""


class NoValue(Exception):
    """A formula that has no value as far as this module knows, such as an ellipsis or a number too large to write."""


class _Undefined(Exception):
    """A formula that has no value at this point."""


class Values:
    """Compares formulas by their values at points."""

    def __init__(self, *formulas: Formula) -> None:
        """`formulas`: those whose values will be compared."""
        self.context = mpmath.MPContext()
        self.context.prec = _LEAST_PRECISION
        names = sorted({name for formula in formulas for name in names_of(formula)})
        kinds = {_kind(part) for formula in formulas for part in formula.all()}
        points = [*range(_MOST_POINTS), *(_WHOLE if kinds & {"factorial", "binom"} else ())] if names else [0]
        points += _SIGNED if names and kinds & {"abs", "root"} else ()
        self.points = [{name: _coordinate(name, at) for name in names} for at in points]
        self._bits = self._evaluated = 0
        self._largest = self.context.mpf(0)

    def same(self, one: Formula, other: Formula) -> bool:
        """Whether two formulas are equal wherever both are real, or if that is nowhere, wherever they have values. If
        only one has an absolute value, they must also be real at the same points: ln |x| is not ln x.

        Raises NoValue.
        """
        real, complex_ = [], []
        absolute = _has_absolute(one) != _has_absolute(other)
        for point in self.points:
            if pair := self._pair(one, other, point):
                equal, are_real = self._equal(*pair), all(map(_is_real, pair))
                if (are_real and not equal) or (absolute and not are_real and any(map(_is_real, pair))):
                    return False
                (real if are_real else complex_).append(equal)
        found = real or complex_
        if len(found) < min(len(self.points), _ENOUGH_POINTS):
            raise NoValue("no values at enough points")
        return all(found)

    def less(self, one: Formula, other: Formula) -> bool:
        """Whether a real number is less than another one. Raises NoValue."""
        pair = self._pair(one, other, self.points[0])
        if not pair or not all(map(_is_real, pair)):
            raise NoValue("no real numbers")
        return bool(self._inexact(pair[0]) < self._inexact(pair[1]))

    def proportional(self, one: Formula, other: Formula) -> int:
        """Returns the sign of c ≠ 0 if one = c · other at all points, and 0 if there is no such real number.

        Raises NoValue.
        """
        first, sign, found = None, 0, 0
        absolute = _has_absolute(one) != _has_absolute(other)
        for point in self.points:
            pair = self._pair(one, other, point)
            if pair and absolute and len(set(map(_is_real, pair))) > 1:
                return 0
            if not pair or not all(map(_is_real, pair)):
                continue
            a, b = pair
            if self._zero(a) or self._zero(b):
                if self._zero(a) != self._zero(b):
                    return 0
                continue
            found += 1
            if first is None:
                first, sign = (a, b), 1 if (a > 0) == (b > 0) else -1
            elif not self._equal(self._times(first[0], b), self._times(a, first[1])):
                return 0
        return sign if found >= min(len(self.points), _ENOUGH_POINTS) else 0

    def _pair(self, one: Formula, other: Formula, point: dict[str, Fraction]) -> tuple[Value, Value] | None:
        """Returns the values at a point; None where one has none. Where they are not rational, they are computed with
        more digits than all rational numbers on the way."""
        while True:
            self._bits, self._largest = 0, self.context.mpf(0)
            try:
                pair = self._checked(self._at(one, point)), self._checked(self._at(other, point))
            except (_Undefined, ZeroDivisionError):
                return None
            except (ValueError, OverflowError, TypeError, NoConvergence) as e:
                raise NoValue(str(e)) from None
            needed = _LEAST_PRECISION + 4 * self._bits
            if self.context.prec >= needed or all(isinstance(value, Fraction) for value in pair):
                return pair
            if needed > _MOST_PRECISION:
                raise NoValue("a number too long to compare")
            self.context.prec = needed

    def _equal(self, a: Value, b: Value) -> bool:
        """Whether two values are equal: exactly if both are rational, else but for what rounding explains."""
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            return a == b
        a, b = self._inexact(a), self._inexact(b)
        allowed = max(self.context.ldexp(max(abs(a), abs(b)), -self.context.prec // 2), self._rounding())
        return bool(abs(a - b) <= allowed)

    def _zero(self, a: Value) -> bool:
        return a == 0 if isinstance(a, Fraction) else bool(abs(a) <= self._rounding())

    def _rounding(self) -> Value:
        return self.context.ldexp(self._largest, 100 - self.context.prec)

    def _inexact(self, a: Value) -> Value:
        return self.context.mpf(a.numerator) / a.denominator if isinstance(a, Fraction) else a

    def _at(self, node: Formula, point: dict[str, Fraction], degrees: bool = False) -> Value:
        """Returns the value at a point. Raises NoValue, and _Undefined where there is none at this point."""
        kind, parts = node.kind, node.parts
        if kind == "number":
            return self._bounded(node.value)
        if kind == "name":
            return self._named(str(node.value), point)
        if kind == "power" and parts[1] == Formula("name", value="T"):
            raise NoValue("a transpose")
        if kind == "root":
            return self._root(self._at(parts[0], point), self._at(parts[1], point))
        if kind == "call":
            return self._call(node, point, degrees)
        if kind not in ("sum", "product", "quotient", "negative", "power"):
            raise NoValue(kind)
        values = [self._at(part, point, degrees) for part in parts]
        if kind == "negative":
            return -values[0]
        if kind == "quotient":
            if self._zero(values[1]):
                raise _Undefined
            return self._times(values[0], self._power(values[1], Fraction(-1)))
        if kind == "power":
            return self._power(*values)
        return functools.reduce(self._plus if kind == "sum" else self._times, values)

    def _bounded(self, value: Fraction) -> Fraction:
        self._bits = max(self._bits, _bits(value))
        if self._bits > _MOST_BITS:
            raise NoValue("a number too large to write")
        return value

    def _named(self, name: str, point: dict[str, Fraction]) -> Value:
        if name in point:
            return point[name]
        constants = {"π": self.context.pi, "e": self.context.e, "i": self.context.mpc(0, 1)}
        if name not in constants:
            raise NoValue(name)
        return +constants[name]

    def _plus(self, a: Value, b: Value) -> Value:
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            return self._bounded(a + b)
        a, b = self._inexact(a), self._inexact(b)
        self._largest = max(self._largest, abs(a), abs(b))
        return a + b

    def _times(self, a: Value, b: Value) -> Value:
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            return self._bounded(a * b)
        return self._inexact(a) * self._inexact(b)

    def _power(self, base: Value, exponent: Value) -> Value:
        if isinstance(exponent, Fraction) and isinstance(base, Fraction):
            if exponent.denominator == 1:
                if base == 0 and exponent <= 0:
                    raise _Undefined
                if abs(exponent) * _bits(base) > _MOST_BITS:
                    raise NoValue("a power too large to write")
                return self._bounded(base ** int(exponent))
            if exponent.denominator < 100 and abs(exponent) < 1000:
                root = self._root(base, Fraction(exponent.denominator))
                return self._power(root, Fraction(exponent.numerator))
        if isinstance(exponent, Fraction) and exponent.denominator == 1:
            self._check(exponent, 40)
            if self._zero(base) and exponent <= 0:
                raise _Undefined
            return self._inexact(base) ** int(exponent)
        base, exponent = self._inexact(base), self._inexact(exponent)
        if self._zero(base):
            raise _Undefined
        self._check(exponent, 40)
        self._check(base, 4000)
        return self._checked(base**exponent)

    def _root(self, value: Value, degree: Value) -> Value:
        if not (isinstance(degree, Fraction) and degree.denominator == 1 and 0 < degree < 1000):
            if self._zero(degree):
                raise _Undefined
            return self._power(value, self._times(Fraction(1), self._power(degree, Fraction(-1))))
        n = int(degree)
        if isinstance(value, Fraction) and (exact := _exact_root(abs(value), n)) is not None and (value >= 0 or n % 2):
            return exact if value >= 0 else -exact
        value = self._inexact(value)
        if n % 2 and _is_real(value) and value < 0:
            return -self.context.root(-value, n)
        return self.context.root(value, n) if value else self.context.mpf(0)

    def _call(self, node: Formula, point: dict[str, Fraction], degrees: bool) -> Value:
        name = str(node.value)
        if name == "degree":
            value = self._at(node.parts[0], point, degrees)
            if not degrees and not isinstance(value, Fraction) and any(p.value == "π" for p in node.all()):
                raise NoValue("an angle in radians and degrees")
            return self._times(value, self.context.pi / 180) if degrees else value
        trigonometric = name in _TRIGONOMETRIC
        values = [self._at(part, point, trigonometric) for part in node.parts]
        exact = all(isinstance(value, Fraction) for value in values)
        if name == "percent":
            return self._times(values[0], Fraction(1, 100))
        if name == "abs":
            return abs(values[0])
        if name == "factorial":
            if not exact or values[0] > _MOST_FACTORIAL:
                raise NoValue("a factorial")
            if values[0].denominator != 1 or values[0] < 0:
                raise _Undefined
            return self._bounded(Fraction(math.factorial(int(values[0]))))
        if name == "binom":
            return self._binomial(*values)
        if name in ("floor", "ceil") and exact:
            return Fraction(values[0].__floor__() if name == "floor" else values[0].__ceil__())
        if name not in _NUMERIC:
            raise NoValue(name)
        for value in values:
            self._check(value, 60)
        self._largest = max(self._largest, self.context.mpf(1))
        return self._checked(self._function(name, list(map(self._inexact, values))))

    def _function(self, name: str, values: list[Value]) -> Value:
        context = self.context
        if name in ("ln", "log", "lg"):
            if any(map(self._zero, values)):
                raise _Undefined
            base = values[1] if len(values) > 1 else None if name == "ln" else context.mpf(10)
            if base is not None and self._equal(base, Fraction(1)):
                raise _Undefined
            return context.ln(values[0]) / context.ln(base) if base is not None else context.ln(values[0])
        return getattr(context, _NUMERIC[name])(values[0])

    def _binomial(self, n: Fraction, k: Fraction) -> Fraction:
        if not (isinstance(n, Fraction) and isinstance(k, Fraction)) or k > 400 or _bits(n) > 64:
            raise NoValue("a binomial")
        if k.denominator != 1 or k < 0:
            raise _Undefined
        result = Fraction(1)
        for place in range(int(k)):
            result = self._bounded(result * (n - place) / (place + 1))
        return result

    def _check(self, value: Value, most_bits: int) -> None:
        """Raises NoValue for what would take a function long, or give what no memory holds."""
        size = abs(self._inexact(value)) if not isinstance(value, Fraction) else abs(value)
        if size > 1 << most_bits:
            raise NoValue("a number too large to write")

    def _checked(self, value: Value) -> Value:
        """Returns a number without the imaginary part that rounding left."""
        if isinstance(value, Fraction):
            return value
        self._evaluated += 1
        if self._evaluated > _MOST_EVALUATED:
            raise NoValue("too many functions")
        if not self.context.isfinite(value):
            raise _Undefined
        if not _is_real(value) and abs(value.imag) <= self.context.ldexp(abs(value.real), -self.context.prec // 2):
            return value.real
        return value


_TRIGONOMETRIC = words("sin cos tan sec csc cot cis")
_NUMERIC = {name: name for name in words("ln log lg exp sin cos tan sec csc cot sinh cosh tanh")}
_NUMERIC |= {"cis": "expj", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}
_CONSTANTS = frozenset(("π", "e", "i"))
_VALUELESS = frozenset(("∞", "emptyset"))


def names_of(node: Formula) -> set[str]:
    """Returns the symbols in a formula that stand for any number."""
    return {str(part.value) for part in node.all() if part.kind == "name"} - _CONSTANTS - _VALUELESS


def _kind(node: Formula) -> str:
    """Returns the name of a function, root for a power with a fraction, and else what kind of formula this is."""
    exponent = node.parts[1] if node.kind == "power" else None
    if exponent and (exponent.kind == "quotient" or (exponent.kind == "number" and exponent.value.denominator != 1)):
        return "root"
    return str(node.value) if node.kind == "call" else node.kind


def _has_absolute(node: Formula) -> bool:
    return any(part.kind == "call" and part.value == "abs" for part in node.all())


def is_constant(node: Formula) -> bool:
    """Whether a formula is a number: without symbols, relations, lists or words."""
    kinds = ("number", "name", "sum", "product", "quotient", "negative", "power", "root", "call")
    return all(part.kind in kinds for part in node.all()) and not names_of(node)


def _coordinate(name: str, at: int) -> Fraction:
    """Returns the value of a symbol at one of the points: fractions of either sign, and whole numbers."""
    drawn = int.from_bytes(hashlib.blake2b(f"{at} {name}".encode(), digest_size=8).digest())
    if at in (2, 3) or at in _WHOLE:
        return Fraction(2 + drawn % 17)
    fraction = Fraction(1 + drawn % 999_983, 1_000_003)
    if at in (0, 4):
        return fraction
    if at == 1:
        return 1 + 5 * fraction
    if at == 5:
        return 10 + 90 * fraction
    return (-fraction if drawn >> 40 & 1 else fraction) * (1 if at == 6 else 7)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _is_real(value: Value) -> bool:
    return isinstance(value, Fraction) or not hasattr(value, "_mpc_")


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    above, below = _integer_root(value.numerator, degree), _integer_root(value.denominator, degree)
    return None if above is None or below is None else Fraction(above, below)


def _integer_root(value: int, degree: int) -> int | None:
    """Returns the root of a whole number if it is one, by bisection."""
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high) // 2
        if middle**degree < value:
            low = middle + 1
        else:
            high = middle
    return low if low**degree == value else None
