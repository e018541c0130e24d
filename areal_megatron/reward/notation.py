"""Whether an answer only restates a number of the question, which asks to write it in another notation."""

from __future__ import annotations

import functools
import itertools
import re

from areal_megatron.reward.numeral import Numeral, numeral

LONGEST_PROMPT = 20_000
"""How many of the last characters of a prompt are searched."""
_MOST_NUMBERS = 400

FORMULA = re.compile(r"\$\$?([^$]{1,300})\$|\\\(([^\n]{1,300}?)\\\)|\\\[(.{1,300}?)\\\]", re.DOTALL)
_KINDS = "(fraction|decimal|percent|mixed|scientific|standard|power|digits|numeral|number|integer)"
_ASKED = re.compile(rf"\b(?:as|to|into|in)\s+(?:an?\s+|its\s+|the\s+)?(?:[a-z]+\s+){{0,2}}?{_KINDS}", re.IGNORECASE)
_NAMED = re.compile(r"\b(fraction|decimal|percent|mixed|scientific)", re.IGNORECASE)
_NOTATIONS = {
    "power": "scientific",
    "digits": "decimal",
    "numeral": "decimal",
    "number": "decimal",
    "integer": "decimal",
}
"""What is a decimal, too, in terms of Numeral.notation."""


def restates(prompt: str, number: Numeral, known: Numeral | None) -> bool:
    """Whether a question holds a number and asks to write it in another notation than this one. `known`: the right
    answer, None if it is no number."""
    if known and (number.notation == known.notation or number.amount != known.amount):
        return False
    held = {other.notation for other in numbers_in(prompt) if other.amount == number.amount}
    if not held or not known or (number.notation in held and number.notation in ("scientific", "scaled")):
        return bool(held)
    prompt = prompt[-LONGEST_PROMPT:]
    asked = {_NOTATIONS.get(one.lower(), one.lower()) for one in _ASKED.findall(prompt)}
    asked = asked or {one.lower() for one in _NAMED.findall(prompt)} - held
    return bool(asked) and number.notation not in asked


@functools.lru_cache(maxsize=16)
def numbers_in(prompt: str) -> tuple[Numeral, ...]:
    """Returns the first of the numbers that a question holds, as formulas, words or two words such as 5 million."""
    prompt = prompt[-LONGEST_PROMPT:]
    formulas = (found[1] or found[2] or found[3] for found in FORMULA.finditer(prompt))
    words = [word.lstrip("($").rstrip(",:;?!$)" if "..." in word else ".,:;?!$)") for word in prompt.split()]
    pairs = (f"{one} {other}" for one, other in itertools.pairwise(words))
    texts = filter(re.compile("[0-9]|hundred|thousand|illion").search, itertools.chain(formulas, words, pairs))
    found = map(numeral, itertools.islice(texts, _MOST_NUMBERS))
    return tuple(number for number in found if number)
