"""Reads plain numbers as people and models write them, and nothing that would have to be worked out.

A number is an integer, with or without separators of thousands, a decimal, also a repeating one, a fraction, a mixed
number or one in scientific notation. A currency, a unit, a degree sign, a percent sign or a base may stand beside it,
and `x =` before it. Sums, products, powers, roots and functions are no numbers, whatever their value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction

LONGEST = 400
"""Characters of the longest text that is read as a number."""
LONGEST_BARE = 1000
_LARGEST_EXPONENT = 400

_FORMATTING = re.compile(
    r"\\(?:left|right) ?\.|\\(?:mathopen|mathclose|mathord|phantom|hspace\*?|vspace|color|textcolor) ?\{[^{}]*\}"
    r"|\\(?:left|right|(?:display|text|script)style|!|[Bb]igg?[lr]?|large|Large|LARGE|huge|small|normalsize|bf|rm|sf|tt|it|em"
    r"|bfseries|hfill|par|therefore|limits|ensuremath)(?![A-Za-z])"
)
_UNICODE = str.maketrans(
    {"−": "-", "–": "-", "⁄": "/", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}"}
    | {"¾": r"\frac{3}{4}"}
)
_OVER = re.compile(r"\{([^{}]*?)\\(over|choose)(?![A-Za-z]) ?([^{}]*)\}")
_STACKED = {"over": "frac", "choose": "binom"}
_FRACTION = re.compile(r"\\(?:[dtc]|nice|s)frac(?![A-Za-z])")
_NESTED = re.compile(r"(?<!\\)\{ ?\{([^{}\\]*)\} ?\}")
_BRACED = re.compile(r"(?<![A-Za-z0-9}^_\]\\])\{([0-9.]+)\}(?![0-9.{])")
"""Braces that change nothing around a number, as in {1}/{2}."""
_SPACE = re.compile(r"(?:(?<!\\)\\(?:[,;: ]|q?quad(?![A-Za-z])|thinspace(?![A-Za-z]))|[~\s])+")
_WRAPPED = re.compile(
    r"\\(?:text(?:bf|rm|it|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|emph|underline|boldsymbol|bm|operatorname)"
    r"\s*\{([^{}]*)\}"
    r"|\*\*([^*]*)\*\*|\$([^$]*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\{([^{}]*)\}",
    re.DOTALL,
)

_EMPTY = re.compile(r"(?:^|(?<=[0-9)}]))\^?\{ ?\}")
_SIGN = re.compile(r"(?<![\^_A-Za-z])\{ ?([:=<>]) ?\}")
"""A sign in braces, which only change the space around it, as in 3{:}30."""
_EVIDENT = re.compile(
    r"(?<![0-9.])([0-9]*\.[0-9]{0,12}?)(?:([0-9])\2{2,40}|([0-9]{2,6})\3{1,12}) ?"
    r"(?:\\(?:ldots|dots|cdots)(?![A-Za-z])|\.\.\.|…)(?! ?[0-9A-Za-z\\{(^])"
)
"""A decimal that goes on and shows what repeats: one digit three times, or several twice, as in 0.1666… and 0.2727…"""
_BRACKETED = re.compile(
    r"([-+]?) ?\( ?((?:[^(), ]|(?<![0-9]) | (?![0-9]))++)\)((?: ?(?:\\(?!frac)|[^0-9 .\\(eE])[^()]*)?)", re.DOTALL
)
"""A number in brackets and its unit; without commas or digits in groups, since (1,234) and (1 234) are pairs."""
_PERIOD = re.compile(
    r"(?<=[0-9.])(?:\\dot ?(?:\{ ?([0-9]) ?\}|([0-9]))(?:([0-9]*)\\dot ?(?:\{ ?([0-9]) ?\}|([0-9])))?"
    r"|\\(?:bar|overline) ?(?:\{ ?([0-9]+) ?\}|([0-9]))|(?<=[.0-9])\(([0-9]+)\))$"
)
r"""What repeats in 0.\dot{3}, 0.\dot{1}4\dot{2}, 0.\bar{3}, 0.\overline3 and 0.(3)."""

_INTEGER = r"(?:[0-9]{1,3}(?:[ ,][0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+)"
_PART = rf"[-+]? ?{_DECIMAL}"
_CURRENCY = r"(?:\\?\$|[€£¥₹]|\\(?:pounds|euro|textdollar)(?![A-Za-z])|USD|EUR)? ?"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?) ?{_CURRENCY}(?P<sign2>[-+]?)(?:"
    rf"(?P<whole>[0-9]*)\.(?P<fixed>[0-9]*)\\overline ?\{{ ?(?P<period>[0-9]+) ?\}}"
    rf"|(?:(?P<mixed>[0-9]+) ?)?\\frac ?(?:\{{ ?(?P<top>{_PART}) ?\}}|(?P<top1>[0-9])) ?"
    rf"(?:\{{ ?(?P<bottom>{_PART}) ?\}}|(?P<bottom1>[0-9]))"
    rf"|(?:(?P<mixed2>[0-9]+) )?(?P<top2>{_DECIMAL}) ?/ ?(?P<bottom2>{_DECIMAL})"
    rf"|(?P<mantissa>{_DECIMAL})(?: ?(?:\\times|\\cdot|\*|×|·) ?10 ?(?:\^|\*\*) ?"
    rf"(?P<brace>[{{(])? ?(?P<power>[-+]?[0-9]+)(?(brace) ?[}})])|[eE](?P<power2>[-+]?[0-9]+))?"
    r")(?: ?_ ?\{? ?(?P<base>[0-9]+) ?\}?)?"
)

_TENS = re.compile(r"^([-+]?) ?10 ?(?=(?:\^|\*\*) ?[{(]? ?[-+]?[0-9])")
"""10^3, which is 1 · 10^3."""
_ZEROS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE_WORD = re.compile(rf"({'|'.join(_ZEROS)})(?![A-Za-z])", re.IGNORECASE)
_SCALE = re.compile(rf"(?<=[0-9]) ?((?:\\(?:text|textrm|mathrm|mbox) ?\{{)?) ?{_SCALE_WORD.pattern}", re.IGNORECASE)
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_SPELLED = {word: number for number, word in enumerate(_ONES.split())}
_SPELLED |= {"thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90}
_BASE = re.compile(
    r"(?:\\(?:text|mathrm) ?\{)?\(?([0-9]+|[0-9A-F]+)\)?\}? ?"
    r"(?:_ ?\{? ?(?:\\(?:text|textrm|mathrm) ?\{)?|(?:\\(?:text|textrm|mathrm) ?\{)?(?=[ (]*(?:in )?base))"
    r"[ (]*(?:(?:in )?base[ -]*\}? ?)?([0-9]{1,2}|[a-z]+)[)} ]*"
)

_UNIT = re.compile(
    r" ?(?:(?P<percent>\\?%)|(?P<degree>\^ ?\{? ?\\circ ?\}?|°|\\degree(?![A-Za-z]))"
    r"|\\(?:text|textrm|textbf|mathrm|mathbf|mbox|rm|operatorname) ?\{(?P<text>[^{}]*(?:\^ ?\{-?[1-4]\}[^{}]*)*)\}"
    r"|\^ ?\{? ?(?:\\(?:text|textrm|mathrm) ?\{ ?)?(?P<ordinal>st|nd|rd|th)(?: ?\})*"
    r"|(?P<word>[A-Za-zµ]+|¢)|(?P<power>\^ ?\{? ?-?[1-4] ?\}?|[²³])|(?P<sign>[/·]|\\cdot(?![A-Za-z])))"
)
_WORD = re.compile(r"[A-Za-zµ]+")
_UNIT_TEXT = re.compile(r"(?:[A-Za-zµ .,'’/°²³%¢()-]|\\%|\\cdot|\^ ?\{?-?[1-4]\}?)*")


def words(text: str) -> frozenset[str]:
    """Returns the words of a text."""
    return frozenset(text.split())


_SHORT_UNITS = words(
    "m g s h L C F K V W A N J Hz Pa cm mm km nm kg mg ml mL dm in ft yd mi lb oz hr am pm st nd rd th of gm sq "
    "cu cc ¢ mA kV kW kJ ms kN"
)
_NO_UNITS = words(
    "or and to not is are was nor maybe perhaps possibly either but then if else than about approximately approx "
    "around least most more less between from through till until plus minus times divided over by mod modulo "
    "squared cubed factorial choose hundred thousand million billion trillion dozen score half third quarter "
    "twice double triple root log ln exp sin cos tan sec csc cot max gcd lcm pi zero one two three four five six "
    "seven eight nine ten eleven twelve wrong incorrect otherwise undefined none no any all other also "
    "when whenever where unless only while until because since given provided providing with without such even odd "
    "for every both whose which that tenth tenths hundredth hundredths thousandth thousandths millionth millionths "
    "billionth billionths"
)


_SAY_NOTHING = words(
    "a an the of in unit units text textbf textrm mathrm mbox percent percentage pct circ degree degrees"
)


@dataclass(frozen=True)
class Numeral:
    """A number as it was written."""

    value: Fraction
    simple: bool
    """Whether nothing is left to work out: a fraction is in lowest terms, scientific notation has one digit before the
    point."""
    percent: bool = False
    base: int | None = None
    """The base that is written behind it; its value is taken from its digits in base ten all the same."""
    notation: str = "decimal"
    """decimal (also a whole number), fraction, mixed, scientific, scaled (5 million) or percent."""
    counted: frozenset[str] = field(default=frozenset(), compare=False)
    """The words of its unit, or of what it is a number of, in small letters."""

    @property
    def amount(self) -> Fraction:
        """What it stands for: of 7% it is 7/100."""
        return self.value / 100 if self.percent else self.value

    def answers(self, known: Numeral) -> bool:
        """Whether it is the number `known`, whose unit it may leave out; 7% is 0.07, but for 70% also 70 is right."""
        if self.base is not None and self.base != (known.base or 10):
            return False
        if self.percent and not known.percent:
            return self.value == 100 * known.value
        return self.value == known.value or (known.percent and not self.percent and 100 * self.value == known.value)


def bare(text: str) -> str:
    """Returns LaTeX without what only formats it: wrappers of the whole text, spaces, sizes of brackets.

    A text of more than LONGEST_BARE characters is returned as it is.
    """
    if len(text) > LONGEST_BARE:
        return text
    text = _FORMATTING.sub("", text.replace("{,}", ",").translate(_UNICODE))
    text = _OVER.sub(
        lambda found: f"\\{_STACKED[found[2]]}{{{found[1]}}}{{{found[3]}}}", _SPACE.sub(" ", _EMPTY.sub("", text))
    )
    text = _SIGN.sub(r"\1", _EVIDENT.sub(r"\1\\overline{\2\3}", _FRACTION.sub(r"\\frac", text))).strip()
    text = _BRACED.sub(r"\1", _NESTED.sub(r"{\1}", text)).removeprefix("=").removesuffix("\\\\").strip()
    while True:
        inner = text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text
        if wrapped := _WRAPPED.fullmatch(inner):
            inner = next(group for group in wrapped.groups() if group is not None).strip()
        if inner == text:
            return text
        text = inner


def numeral(text: str) -> Numeral | None:
    """Returns the number that a text is, else None; also for one of more than LONGEST characters."""
    if len(text) > LONGEST:
        return None
    money = {"dollar"} if "\\$" in text else set()
    text = bare(text)
    if "=" in text:
        names, _, text = text.rpartition("=")
        if "=" not in names and is_name(text):
            names, text = text, names
        if not is_name(names):
            return None
        text = bare(text)
    digits = in_digits(text) if _SCALE_WORD.search(text) else text
    in_words, text = digits != text, digits
    bracketed = _BRACKETED.fullmatch(text)
    if bracketed and not (bracketed[1] and bracketed[2][0] in "+-"):
        text = "".join(bracketed.groups())
    if "." in text and (period := _PERIOD.search(text)):
        text = f"{text[: period.start()]}\\overline{{{''.join(filter(None, period.groups()))}}}"
    if based := in_base(text):
        text = "{}_{{{}}}".format(*based)
    text, scaled = _SCALE.subn(lambda found: f" \\times 10^{{{_ZEROS[found[2].lower()]}}} {found[1]}", text, 1)
    found = _NUMBER.match(_TENS.sub(r"\1 1 \\times 10", text))
    unit = found and _unit(found.string[found.end() :])
    if not found or unit is None or not (number := _value(found)):
        return None
    value, simple = number
    base = int(found["base"]) if found["base"] else None
    notation = "percent" if unit == "%" else "scaled" if scaled or in_words else _notation(found)
    counted = frozenset(_WORD.findall(found.string[found.end() :].lower())) - _SAY_NOTHING | money
    return Numeral(value, simple or bool(scaled), "%" in unit, base, notation, counted)


def in_digits(text: str) -> str:
    """Returns 21000 for "twenty-one thousand", and any other text as it is, or if it is longer than LONGEST."""
    text, total, part = bare(text), 0, 0
    if len(text) > LONGEST:
        return text
    for word in re.split("[ -]+", text.lower()) if text[:1].isalpha() else ():
        value = _SPELLED.get(word)
        if value is not None and part % 10 ** len(str(value)) == 0:
            part += value
        elif word == "hundred" and 0 < part < 10:
            part *= 100
        elif word in _ZEROS and 0 < part < 1000:
            total, part = total + part * 10 ** _ZEROS[word], 0
        elif word != "and" or not total + part:
            return text
    return str(total + part) if total + part or text.lower() == "zero" else text


def _notation(found: re.Match[str]) -> str:
    kinds = {"mixed": "mixed", "mixed2": "mixed", "top": "fraction", "top1": "fraction", "top2": "fraction"}
    kinds |= {"power": "scientific", "power2": "scientific"}
    return next((kind for group, kind in kinds.items() if found[group] is not None), "decimal")


def in_base(text: str) -> tuple[str, int] | None:
    """Returns the digits and the base of a text such as 101_{\\text{two}}, (2B)_{16} or 101 (base 2); else None."""
    found = _BASE.fullmatch(text)
    if not found:
        return None
    base = int(found[2]) if found[2].isdigit() else _SPELLED.get(found[2], 0)
    digits = found[1] if 1 < base <= 36 else ""
    is_number = digits.isdigit() or (re.search("[0-9]", digits) and all(int(digit, 36) < base for digit in digits))
    return (digits, base) if is_number else None  # A_2 is a point


_NAME = (
    r"(?:\\(?:text|textbf|textrm|mathrm|mathbf|mathit|operatorname|overline|vec|hat|bar) ?\{[A-Za-z .'-]*+\}"
    r"|\\?[A-Za-zα-ωΑ-Ω]++)"
)
_ARGUMENTS = r"(?: ?_ ?(?:\{[A-Za-z0-9, ]*+\}|[A-Za-z0-9]))?+'*+(?: ?\([A-Za-z0-9, ]*+\))?+"
_NAMES = re.compile(rf"[ |]*+(?:{_NAME}{_ARGUMENTS}[ |+=-]*+)++")


def is_name(text: str) -> bool:
    """Whether a text names what a value is given to: a symbol, x_1, f(2), AB, m + n, but no number and no expression of
    numbers."""
    if len(text) > LONGEST or not _NAMES.fullmatch(bare(text)):
        return False
    worded = (word.lower() for inner in re.findall(r"\{([^{}]*)\}", text) for word in _WORD.findall(inner))
    return _NO_UNITS.isdisjoint(worded)  # \text{when } n names nothing


def _value(found: re.Match[str]) -> tuple[Fraction, bool] | None:
    """Returns the value of a match of _NUMBER, and whether it is simple; None if it has none."""
    sign = -1 if (found["sign"] == "-") != (found["sign2"] == "-") else 1
    if found["sign"] and found["sign2"]:
        return None
    if found["period"]:
        fixed, period = found["fixed"], found["period"]
        repeating = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
        return sign * (Fraction(f"{found['whole'] or 0}.{fixed or 0}") + repeating), True
    if found["mantissa"]:
        mantissa, power = _decimal(found["mantissa"]), found["power"] or found["power2"]
        if power is None:
            return sign * mantissa, True
        if len(power) > 5 or abs(int(power)) > _LARGEST_EXPONENT:
            return None
        return sign * mantissa * Fraction(10) ** int(power), 1 <= mantissa < 10
    top, bottom = (_decimal(found[name] or found[name + "1"] or found[name + "2"]) for name in ("top", "bottom"))
    if bottom == 0:
        return None
    whole, value = found["mixed"] or found["mixed2"], top / bottom
    lowest = value.denominator == abs(bottom) != 1
    if whole is not None:
        return (sign * (int(whole) + value), lowest) if 0 < value < 1 else None
    return sign * value, lowest


def _decimal(text: str) -> Fraction:
    text = re.sub(r"[ ,]", "", text)
    return Fraction(text.removesuffix(".") if text.endswith(".") else text)


def counts_otherwise(one: Numeral, other: Numeral) -> bool:
    """Whether two numbers are of different things, 5 apples and 5 pears, or of changes in different directions. Where
    one of them says less, it is of the same: 5 red apples, and 5 apples or 5."""
    less, more = sorted((one.counted, other.counted), key=len)
    return not all(any(_same_word(word, known) for known in more) for word in less)


def _same_word(one: str, other: str) -> bool:
    """Whether two words are the same, one of them in the plural or short, as yr for year."""
    short, long = sorted((one.removesuffix("s"), other.removesuffix("s")), key=len)
    if short == long or f"{short}e" == long:
        return True
    letters = iter(long)
    return len(short) < 4 and short[:1] == long[:1] and all(letter in letters for letter in short)


def is_unit(text: str) -> bool:
    """Whether a text behind a number says no more than in what it is measured."""
    return len(text) <= LONGEST and _unit(text) is not None


def _unit(text: str) -> str | None:
    """Returns "%" for percent, "" for another unit or none at all; None if the text is no unit."""
    text, at, percent, named = text.strip(" $"), 0, False, False
    while at < len(text):
        if not (found := _UNIT.match(text, at)):
            return None
        words = _WORD.findall(found["text"] or found["word"] or "")
        if found["percent"] or [word.lower() for word in words] in (["percent"], ["percentage"], ["pct"]):
            percent = True
        elif found["power"] or found["sign"]:
            if not named:
                return None
        elif found["text"] is not None:
            if not _UNIT_TEXT.fullmatch(found["text"]) or len(words) > 6:
                return None
            percent |= found["text"].strip() in ("%", "\\%")
        elif found["word"] and len(found["word"]) < 3 and found["word"] not in _SHORT_UNITS:
            return None
        if not _NO_UNITS.isdisjoint(word.lower() for word in words):
            return None
        named, at = named or found["text"] is None or bool(words), found.end()
    return "%" if percent else ""
