"""Answers that are said in words, as formulas: sets of numbers, what k may be, letters of choices, times of the day."""

from __future__ import annotations

import re

_WRAPPER = re.compile(r"\\(?:text|textbf|textrm|textit|mathrm|mbox) ?\{([^{}]*)\}")
_SET = re.compile(
    r"(?:[a-z] (?:is|can be|may be) )?(?P<all>(?:(?:all|any|every|each|an?|the set of|the) )*)"
    r"(?:(?P<sign>positive|negative|non-?negative|non-?zero) )?(?P<kind>real|integer|rational|complex|natural)"
    r"(?P<plural>s?(?: numbers?| values?(?: of)?)?)(?P<name> [a-z])?",
    re.IGNORECASE,
)
_SYMBOLS = {"real": "R", "integer": "Z", "rational": "Q", "complex": "C", "natural": "N"}
_RAYS = {"positive": r"(0,\infty)", "negative": r"(-\infty,0)", "nonnegative": r"[0,\infty)"}
_SIGNED = {"positive": "^+", "negative": "^-", "nonnegative": "_{\\ge 0}", "nonzero": r"\setminus\{0\}"}
_NOTHING = re.compile(
    "(?:there (?:is|are) )?no (?:real )?solutions?(?: exists?)?|(?:the )?empty set|none", re.IGNORECASE
)
_MANY = re.compile(
    "(?:there (?:is|are) )?(?:infinitely many(?: solutions)?|infinite solutions|(?:an )?infinite number of solutions)",
    re.IGNORECASE,
)
_EXCEPT = re.compile(
    r"(.+?),? (?:except(?: for)?|other than|excluding|but not) (?:[a-z] ?= ?)?"
    r"((?:[^A-Za-z\\]|\\[A-Za-z]++|\b(?:and|or)\b)++)",
    re.IGNORECASE,
)
_WHOLE = re.compile(
    r"[,;:( ]*(?:where|for|with|and)?[:( ]*"
    r"(?:(?:(?:any|all|every|some|each|an) )?integers? ([a-z])|([a-z]) (?:is |are |be )?(?:any |an |some )?integers?"
    r"|([a-z]) ?\\in ?\\mathbb ?\{?Z\}?)[). ]*"
)
_CONSTANT = re.compile(
    r"[,;:( ]*(?:where|for|with|and)?[:( ]*"
    r"(?:(?:any|all|every|some|each|an?) (?:(?:real|arbitrary) )*(?:constant|real number)s? ([a-zA-Z])"
    r"|([a-zA-Z]) (?:is |are |be )?(?:(?:any|an?|some) )?(?:(?:real|arbitrary) )*(?:constant|real number)"
    r"|([a-zA-Z]) ?\\in ?\\mathbb ?\{?R\}?)[). ]*"
)
_SUPERSCRIPT = re.compile(r"\\mathbb ?\{?([RZQN])\}? ?(?:\^ ?\{? ?\+ ?\}?|_ ?\{? ?(?:\+|> ?0) ?\}?)")
_ELEMENTS = re.compile(r"\\\{ ?(?:([a-z]) ?(?:\\mid|\||:) ?(?=\1 ?=))?(.*?) ?(?:\\mid|\||:|,) ?(\S ?\\in.*)\\\}")
"""{π/4 + kπ | k ∈ Z}, {x | x = π/4 + kπ, k ∈ Z}."""
_NUMBERS = re.compile(r"\\math(?:bf|rm) ?\{([RZQNC])\}|(?<=\\in) ?([RZQNC])(?![A-Za-z_^])")
_LETTERS = re.compile(r"\(?[A-J]\)?(?:(?:,? and |[,; ]+)?\(?[A-J]\)?)+")
_TIME = re.compile(r"([0-9]{1,2}:[0-9]{2}) ?\(?[ap]\.? ?m\.?\)?", re.IGNORECASE)
_HALF_OF_DAY = re.compile(r"(?<![A-Za-z])([ap])\.? ?m(?![A-Za-z])", re.IGNORECASE)


def plain(text: str) -> str:
    """Returns a text without what marks words and formulas in it."""
    return " ".join(re.sub(r"[$~]|\\[,;: ]|\\q?quad(?![A-Za-z])", " ", _WRAPPER.sub(r" \1 ", text)).split())


def as_formula(text: str) -> str:
    """Returns \\mathbb{Z}^+ for "all positive integers n", \\mathbb{R}\\setminus\\{0\\} for "all reals except 0",
    \\emptyset for "no solution", 3:30 for 3:30 pm, and any other text as it is, with one way to write \\mathbb{Z}^+."""
    words = plain(text)
    if found := _TIME.fullmatch(words):
        return found[1]
    if _NOTHING.fullmatch(words.strip(".")):
        return r"\emptyset"
    if _MANY.fullmatch(words.strip(".")):
        return r"\text{infinitely many}"
    if (without := _EXCEPT.fullmatch(words.strip("."))) and _SET.fullmatch(without[1]):
        points = re.sub(r",? ?\b(?:and|or)\b", ",", without[2])
        return rf"{as_formula(without[1])}\setminus\{{{points}\}}"
    found = _SET.fullmatch(words.strip("."))
    if found and (found["all"] or found["plural"] or found["name"]):
        sign, kind = (found["sign"] or "").lower().replace("-", ""), found["kind"].lower()
        if kind == "real" and sign in _RAYS:
            return _RAYS[sign]
        return rf"\mathbb{{{_SYMBOLS[kind]}}}{_SIGNED.get(sign, '')}"
    return _SUPERSCRIPT.sub(r"\\mathbb{\1}^+", _NUMBERS.sub(r"\\mathbb{\1\2}", text))


def without_integer(text: str) -> tuple[str, str]:
    """Returns a text without "k is any integer" at its end, and this k; "" if it does not say that."""
    words = plain(text)
    if elements := _ELEMENTS.fullmatch(words):
        words = f"{elements[2]}, {elements[3]}"
    return _without(_WHOLE, words) or (text, "")


def without_constant(text: str) -> tuple[str, str]:
    """Returns a text without "c is any constant" at its end, and this c; "" if it does not say that."""
    found = _without(_CONSTANT, plain(text))
    return found if found and found[1] in found[0] else (text, "")


def _without(said: re.Pattern[str], words: str) -> tuple[str, str] | None:
    """Returns what comes before the words at the end that `said` matches, and the symbol that they are about."""
    at = max(words.rfind(mark) for mark in (",", "(", " for ", " where ", " with "))
    found = said.fullmatch(words, at) if at > 0 else None
    return (words[:at].rstrip(" ,;:("), next(filter(None, found.groups()))) if found else None


def letters_of(text: str) -> str:
    """Returns the letters of the choices that a text lists; "" if it lists no choices."""
    words = plain(re.sub(r"\\[{}]|\\?&", " ", text))
    return "".join(re.findall("[A-J]", words)) if _LETTERS.fullmatch(words) else ""


def halves_of_day(text: str) -> set[str]:
    """Returns "a" for a.m. and "p" for p.m."""
    return {found[1].lower() for found in _HALF_OF_DAY.finditer(text)}
