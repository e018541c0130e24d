"""Quantities with units, so that 24 cents are not $24, and 75 cents are $0.75.

Only the units of the table are known. What has another one, or none, is compared by its number alone.
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass
from fractions import Fraction

from areal_megatron.reward.no_score import AnswerRefused
from areal_megatron.reward.notation import LONGEST_PROMPT, numbers_in
from areal_megatron.reward.numeral import LONGEST, Numeral, bare, numeral

Unit = tuple[str, int, Fraction]
"""A dimension, its power, and the size of the unit."""
_UNITS = {
    name: (dimension, int(power), Fraction(size))
    for dimension, power, size, *names in map(
        str.split,
        """
length 1 1 m meter metre
length 1 0.01 cm centimeter centimetre
length 1 0.001 mm millimeter millimetre
length 1 1000 km kilometer kilometre
length 1 0.0254 in inch inche
length 1 0.3048 ft foot feet
length 1 0.9144 yd yard
length 1 1609.344 mi mile
length 3 0.001 L liter litre
length 3 0.000001 mL ml milliliter millilitre
length 3 0.003785411784 gal gallon
length 3 0.000946352946 qt quart
length 3 0.000473176473 pt pint
time 1 1 s sec second
time 1 60 min minute
time 1 3600 h hr hour
time 1 86400 day
time 1 604800 week
calendar 1 1 month
calendar 1 12 year
mass 1 1 g gram
mass 1 1000 kg kilogram
mass 1 0.001 mg milligram
mass 1 453.59237 lb pound
mass 1 28.349523125 oz ounce
money 1 1 dollar usd
money 1 0.01 cent ¢ penny pennie
angle 1 1 degree °
angle 1 57.29577951308232087679815481410517 rad radian
""".strip().splitlines(),
    )
    for name in names
}
"""The size of radians is rounded: no number of them is a number of degrees."""
_NAMES = "|".join(
    f"(?i:{name}s?)" if len(name) > 2 else f"{name}s?" if len(name) > 1 else name
    for name in sorted(_UNITS, key=len, reverse=True)
)
_NAMED = re.compile(
    r"(?<![A-Za-z\\])(?=[A-Za-z¢])(?:"
    + "|".join(f"(?i:{name}s?)" if len(name) > 2 else f"{name}s" for name in _UNITS if len(name) > 1)
    + "|¢)(?![A-Za-z])"
)
"""A unit that is written in letters, and not by a sign of one or two."""
_POWERS = {"²": 2, "squared": 2, "square": 2, "sq": 2, "³": 3, "cubed": 3, "cubic": 3}
_TERM = re.compile(
    rf"(?:(square|cubic|sq)\.? )?(?<![A-Za-z\\])({_NAMES})(?![A-Za-z])"
    r"(?: ?(?:\^ ?\{?(-?[1-4])\}?|(²|³|squared|cubed)))?"
)
_JOINED = re.compile(r" ?(?:(/)|(per) |·|\\cdot(?![A-Za-z])) ?")
_BETWEEN = re.compile(r"(?:,|,? ?and(?![a-z]))? ?")
_WRAPPED = re.compile(r"\\(?:text|textrm|textbf|mathrm|mbox|operatorname) ?\{([^{}]*(?:\^ ?\{-?[1-4]\}[^{}]*)*)\}")
_SIGNS = [
    (re.compile(r"\^ ?\{? ?\\circ(?![A-Za-z]) ?\}?|\\degree(?![A-Za-z])"), "°"),
    (re.compile(r"(?:\\?\$|\\textdollar(?![A-Za-z])) ?([0-9][0-9.,]*(?<![.,]))(?! ?(?:USD|dollar))"), r"\1 dollars"),
    (re.compile(r"(?<![A-Za-z])(?:mph|mi/hr)(?![A-Za-z])"), "mi/h"),
    (re.compile(r"(?<![A-Za-z])kmh|kph(?![A-Za-z])"), "km/h"),
]
"""Signs and abbreviations → names of the table."""


@dataclass(frozen=True)
class Quantity:
    """A number with a unit, or several together: 2 hours 30 minutes."""

    numbers: tuple[Numeral | None, ...]
    """None for one that numeral() does not read."""
    sizes: tuple[Fraction, ...]
    """What each of their units is in units of size 1."""
    dimension: tuple[tuple[str, int], ...]
    units: frozenset[Unit]

    @property
    def value(self) -> Fraction | None:
        """In units of size 1; None if a number is not known."""
        numbers = self._known
        if len(numbers) < len(self.numbers):
            return None
        return sum((number.value * size for number, size in zip(numbers, self.sizes, strict=True)), Fraction(0))

    @property
    def simple(self) -> bool:
        """Whether nothing is left to work out: no 90 minutes behind hours. All numbers must be known."""
        behind = list(zip(self._known, self.sizes, strict=True))[1:]
        carried = any(number.value * size >= one for (number, size), one in zip(behind, self.sizes, strict=False))
        return not carried and all(number.simple for number in self._known)

    @property
    def _known(self) -> list[Numeral]:
        return [number for number in self.numbers if number is not None]


def same_quantity(found: str, answer: str, prompt: str) -> bool | None:
    """Whether two quantities are equal of which one is in another unit, or in several; None for answers in one and the
    same unit, or in none.

    Raises AnswerRefused for one that is not worked out, or only restates the numbers of the question.
    """
    ours, theirs = quantity(found), quantity(answer)
    if not (ours and theirs):
        return None
    if ours.dimension != theirs.dimension:
        return False
    same_units = ours.sizes == theirs.sizes
    if None in (ours.value, theirs.value) or (same_units and len(ours.sizes) == 1):
        return None if same_units else False
    if ours.value != theirs.value:
        return False
    held = {number.amount for number in numbers_in(prompt)}
    restated = held.issuperset(number.amount for number in ours.numbers if number)
    asked = not theirs.units.isdisjoint(units_in(prompt[-LONGEST_PROMPT:])) and not theirs.units <= ours.units
    if not ours.simple or (not same_units and (restated or asked)):
        raise AnswerRefused("The final answer must be worked out, in the units that the question asks for.")
    return True


def quantity(text: str) -> Quantity | None:
    """Returns the quantity that a text is; None for one without a unit, or with one that is not in the table."""
    if len(text) > LONGEST:
        return None
    text = _WRAPPED.sub(r" \1 ", bare(text))
    for sign, name in _SIGNS:
        text = sign.sub(name, text)
    text = " ".join(text.split())
    at, pieces, units = 0, [], set()
    while at < len(text):
        if not (unit := _unit(text, at)):
            return None
        begin, end, dimension, size, own = unit
        number = text[at:begin].strip()
        if not number:
            return None
        pieces.append((numeral(number), size, dimension))
        units |= own
        between = _BETWEEN.match(text, end)
        at = between.end() if between else end
    if not pieces:
        return None
    numbers, sizes, dimensions = zip(*pieces, strict=True)
    falling = all(one > other for one, other in itertools.pairwise(sizes))  # else a list: 30°, 60°
    same = len(set(dimensions)) == 1
    return Quantity(numbers, sizes, dimensions[0], frozenset(units)) if same and falling else None


@functools.lru_cache(maxsize=16)
def units_in(prompt: str) -> frozenset[Unit]:
    """Returns the units that a question names, in words or by $."""
    named = {_unit_called(name) for name in set(_NAMED.findall(prompt))}
    return frozenset(named | ({_UNITS["dollar"]} if re.search(r"\$ ?[0-9]", prompt) else set()))


def _unit_called(name: str) -> Unit:
    small = name.lower()
    return next(_UNITS[one] for one in (name, name.removesuffix("s"), small, small[:-1]) if one in _UNITS)


def _unit(text: str, at: int) -> tuple[int, int, tuple[tuple[str, int], ...], Fraction, set[Unit]] | None:
    """Returns where the next unit begins and ends, its dimension, its size and what it is made of."""
    found = _TERM.search(text, at)
    begin = end = found.start() if found else 0
    sign, size, powers, units = 1, Fraction(1), {}, set()
    while found:
        end = found.end()
        before, name, digits, word = found.groups()
        dimension, power, one = _unit_called(name)
        units.add((dimension, power, one))
        times = sign * (int(digits) if digits else _POWERS.get(before or word, 1))
        powers[dimension] = powers.get(dimension, 0) + power * times
        size *= one**times
        joined = _JOINED.match(text, end)
        sign = -1 if joined and (joined[1] or joined[2]) else 1
        found = _TERM.match(text, joined.end()) if joined else None
    return (begin, end, tuple(sorted(powers.items())), size, units) if begin else None
