"""Answers that are said in words, as formulas: sets of numbers, what k may be, letters of choices, times of the day."""

from __future__ import annotations

import re
from math import gcd

_WRAPPER = re.compile(r"\\(?:text|textbf|textrm|textit|mathrm|mbox) ?\{([^{}]*)\}")
_SET = re.compile(
    r"(?:[a-z] (?:is|can be|may be) )?(?P<all>(?:(?:all|any|every|each|an?|the set of|the) )*)"
    r"(?:(?P<sign>(?:non-?)?(?:positive|negative)|non-?zero) )?(?P<kind>real|integer|rational|complex|natural)"
    r"(?P<plural>s?(?: numbers?| values?(?: of)?)?)(?P<name> [a-z])?",
    re.IGNORECASE,
)
_SYMBOLS = {"real": "R", "integer": "Z", "rational": "Q", "complex": "C", "natural": "N"}
_RAYS = {
    "nonpositive": r"(-\infty,0]",
    "positive": r"(0,\infty)",
    "negative": r"(-\infty,0)",
    "nonnegative": r"[0,\infty)",
}
_SIGN_OF = {"": "", "positive": "> 0", "negative": "< 0", "nonnegative": r"\ge 0", "nonpositive": r"\le 0"}
_SIGNED = {"positive": "^+", "negative": "^-", "nonnegative": "_{\\ge 0}", "nonpositive": "_{\\le 0}"}
_SIGNED["nonzero"] = r"\setminus\{0\}"
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
_FOR_ALL = re.compile(
    r"([a-zA-Z] ?\( ?([a-z]) ?\) ?=.*?),? (?:for|where) (?:all|every|any|each) "
    r"(?:(?:real|real numbers?) )?\2(?: ?\\in ?\\math(?:bb|bf) ?\{?R\}?)?\.?"
)
_ALL_OF = re.compile(r"(?:for )?(?:all|any|every|each) [a-z] ?\\in ?(\\math(?:bb|bf).*)")
_LETTERS = re.compile(r"\(?[A-J]\)?(?:(?:,? and |[,; ]+)?\(?[A-J]\)?)+")
_TIME = re.compile(r"([0-9]{1,2})(:[0-9]{2})? ?\(?[ap]\.? ?m\.?\)?", re.IGNORECASE)
_RATIO = re.compile(r"([1-9][0-9]*) ?(?:\{?:\}?|to) ?([1-9][0-9]*)")
_LONGEST_SAID = 200
_DIVISIBLE = re.compile(
    r"(?:([a-z]) (?:is |are |must be )?(?:an? |(not ))?|(?:all |the )?)"
    r"(?:(?:integers? )?divisible by|multiples? of) ([0-9]+)"
    r"|([0-9]+) ?(?:\\mid(?![a-z])|\||∣|divides) ?([a-z])",
    re.IGNORECASE,
)
_PARITY = re.compile(
    r"([a-z]) (?:is |must be )?(?:an? )?(even|odd)(?: integer| number)?|(even|odd) ([a-z])", re.IGNORECASE
)
_POWER = re.compile(
    r"([a-z]) (?:is |must be )?(?:a |an )?(?:perfect (square|cube)|(square) of an integer)", re.IGNORECASE
)
_BOUNDS = {
    r"\ge": "greater than or equal to|at least|no less than|not less than",
    r"\le": "less than or equal to|at most|no more than|no greater than|not more than|not greater than",
    ">": "greater than|more than|larger than|bigger than|above",
    "<": "less than|smaller than|fewer than|below",
}
_RELATIONS = {said: relation for relation, several in _BOUNDS.items() for said in several.split("|")}
_VALUE = r"((?:[^A-Za-z\\,(]|\((?![a-z])|\\[A-Za-z]++)++)"
_BOUND = re.compile(rf"(?:strictly )?({'|'.join(_BOUNDS.values())}) {_VALUE}", re.IGNORECASE)
_BETWEEN = re.compile(
    rf"(?:(?P<strictly>strictly )?between {_VALUE}and {_VALUE}|from {_VALUE}to {_VALUE}),? ?"
    r"\(?(?P<how>(?:in|ex)clusive)?\)?",
    re.IGNORECASE,
)
_BOUNDED = re.compile(
    r"(?:(?:all|any|every|each|the|set of|an?(?= [a-z]{4})) )*+(?:(?P<sign>(?:non-?)?(?:positive|negative)) )?+"
    r"(?P<kind>(?:real )?(?:numbers?|values?)|reals?|(?P<whole>integers?|whole numbers?))?+(?: of)?+"
    r" ?(?P<name>[a-z](?![a-z]))?+,? ?(?:(?:that|which) )?+(?:(?:is|are|must be|lies?) )?+"
    r"(?P<bounds>(?:strictly|between|from|greater|more|larger|bigger|above|less|smaller|fewer|below|at|no|not) .*)",
    re.IGNORECASE,
)
_HALF_OF_DAY = re.compile(r"(?<![A-Za-z])([ap])\.? ?m(?![A-Za-z])", re.IGNORECASE)


def plain(text: str) -> str:
    """Returns a text without what marks words and formulas in it."""
    return " ".join(re.sub(r"[$~]|\\[,;: ]|\\q?quad(?![A-Za-z])", " ", _WRAPPER.sub(r" \1 ", text)).split())


def as_formula(text: str) -> str:
    """Returns \\mathbb{Z}^+ for "all positive integers n", \\mathbb{R}\\setminus\\{0\\} for "all reals except 0",
    \\emptyset for "no solution", 3:30 for 3:30 pm, and any other text as it is, with one way to write \\mathbb{Z}^+."""
    words = plain(text)
    if everywhere := _FOR_ALL.fullmatch(words):
        return everywhere[1]
    if whole := _ALL_OF.fullmatch(words):
        return as_formula(whole[1])
    if said := _clock(words) or _divisible(words) or _bounded(words):
        return said
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


def _clock(words: str) -> str:
    found = _TIME.fullmatch(words)
    return f"{found[1]}{found[2] or ':00'}" if found else ""


def as_clock(text: str) -> str:
    """Returns 10:00 for 10 a.m. and for 10:00 a.m., and any other text as it is."""
    return _clock(plain(text)) or text


def ratio_as_fraction(text: str) -> str:
    """Returns \\frac{3}{2} for 3:2, a ratio in lowest terms that is no time of the day, and any other text as it is."""
    found = _RATIO.fullmatch(plain(text)) if len(text) < _LONGEST_SAID else None
    if not found or (len(found[2]) == 2 and int(found[1]) <= 24 and int(found[2]) < 60):
        return text
    return f"\\frac{{{found[1]}}}{{{found[2]}}}" if gcd(int(found[1]), int(found[2])) == 1 else text


def _divisible(words: str) -> str:
    """Returns n \\equiv 0 \\pmod{3} for "n is divisible by 3", n \\equiv 1 \\pmod{2} for "n is odd", n = k^2 for "n is
    a perfect square"; "" for any other text."""
    if len(words) > _LONGEST_SAID:
        return ""
    words = words.strip(".")
    if found := _DIVISIBLE.fullmatch(words):
        name, denied, modulus = found[1] or found[5] or "", found[2], found[3] or found[4]
        if denied:
            return rf"{modulus} \nmid {name}"
        return rf"{name} \equiv 0 \pmod{{{modulus}}}".removeprefix(r" \equiv")
    if found := _PARITY.fullmatch(words):
        return rf"{found[1] or found[4]} \equiv {int((found[2] or found[3]).lower() == 'odd')} \pmod{{2}}"
    if found := _POWER.fullmatch(words):
        index = "m" if found[1] == "k" else "k"
        return rf"{found[1]} = {index}^{3 if found[2] == 'cube' else 2}, {index} \in \mathbb{{Z}}"
    return ""


def _bounded(words: str) -> str:
    """Returns 2 \\le x \\le 5 for "x is between 2 and 5, inclusive", x > 3 for "all real numbers greater than 3", and
    \\{x \\in \\mathbb{Z} \\mid x > 3\\} for such integers; "" for any other text."""
    found = _BOUNDED.fullmatch(words.strip(".")) if len(words) <= _LONGEST_SAID else None
    if not found:
        return ""
    name, sign = found["name"] or "x", _SIGN_OF[(found["sign"] or "").lower().replace("-", "")]
    conditions = [f"{name} {sign}"] if sign else []
    said_bounds = re.split(r",? (?:and|but) (?=[a-z])", found["bounds"])
    bounds = [bound for said in said_bounds if (bound := _BOUND.fullmatch(said))]
    if between := _BETWEEN.fullmatch(found["bounds"]):
        _, a, b, c, d, how = between.groups()
        if not (how or between["strictly"]):
            return ""  # the ends may be meant or not
        less = r"\le" if how and how.lower() == "inclusive" else "<"
        conditions.append(f"{a or c} {less} {name} {less} {b or d}")
    elif len(bounds) == len(said_bounds) and (found["kind"] or found["name"]):
        conditions += [f"{name} {_RELATIONS[bound[1].lower()]} {bound[2]}" for bound in bounds]
    else:
        return ""
    said = r" \text{ and } ".join(conditions)
    return rf"\{{{name} \in \mathbb{{Z}} \mid {said}\}}" if found["whole"] else said


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
    """Returns the words before the ending matched by `said`, and the symbol in that ending."""
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
