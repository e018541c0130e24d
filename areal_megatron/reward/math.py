"""Scores mathematical answers: compares the last \\boxed{…} of a response, or its last number, with the answer."""

from __future__ import annotations

import re
from fractions import Fraction

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?")


def score(prompt: str, response: str, answer: str) -> float:
    """Returns 1.0 if the final answer of the response equals `answer`, else 0.0.

    Plain numbers are compared exactly, as fractions; everything else is parsed and compared by math-verify.
    """
    boxed = last_boxed(response)
    known = as_number(answer)
    if known is not None:
        numbers = [boxed.strip()] if boxed is not None else _NUMBER.findall(response)
        if not numbers:
            return 0.0
        found = as_number(numbers[-1])
        if found is not None:
            return float(found == known)
    return float(_equal_expressions(answer, response if boxed is None else f"\\boxed{{{boxed}}}"))


def last_boxed(text: str) -> str | None:
    """Returns the content of the last complete \\boxed{…}, with balanced braces; None if there is none."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        begin, depth = start + len("\\boxed{"), 1
        for end in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[begin:end]
        start = text.rfind("\\boxed{", 0, start)
    return None


def as_number(text: str) -> Fraction | None:
    """Returns the value of an integer, a decimal or a fraction, also with commas between thousands; else None."""
    text = text.strip().strip("$")
    if not _NUMBER.fullmatch(text):
        return None
    numerator, _, denominator = text.replace(",", "").partition("/")
    if denominator and int(denominator) == 0:
        return None
    return Fraction(numerator) / int(denominator or 1)


def _equal_expressions(answer: str, response: str) -> bool:
    import math_verify  # imports sympy, which takes a while and plain numbers do not need

    known = math_verify.parse(answer if "$" in answer else f"${answer}$", parsing_timeout=None)
    return bool(math_verify.verify(known, math_verify.parse(response, parsing_timeout=None), timeout_seconds=None))
