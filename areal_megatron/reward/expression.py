"""Compares mathematical expressions, if they are answers and not computations.

Both are read whole into trees (formula.py) and compared by values where they have some, part by part where they have
none, and as texts where one of them cannot be read. An answer may leave those steps to be worked out that the known
answer leaves too, and no others; and it may not repeat an expression of the question.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd

from areal_megatron.reward.form import combines, content, is_choice, is_expanded, key_of, leaves, shape, steps
from areal_megatron.reward.formula import Formula, chosen, negated, read
from areal_megatron.reward.interval import TURNED, intervals_of
from areal_megatron.reward.no_score import AnswerRefused
from areal_megatron.reward.notation import restates
from areal_megatron.reward.numeral import LONGEST_BARE, bare, in_base, is_unit, numeral
from areal_megatron.reward.question import asked_for, has_name, is_written, repeats, rewrites
from areal_megatron.reward.residue import residues_of
from areal_megatron.reward.tokens import NotRead, prepared, tokens_of
from areal_megatron.reward.value import NoValue, Values, is_constant, names_of
from areal_megatron.reward.wording import as_formula, letters_of, without_constant, without_integer

_LETTER_UNIT = re.compile(
    r"(.*[0-9})\]iπ]) ?((?:[A-Za-z]{1,3})(?:\^?\{?[23]\}?)?(?:/[a-z]{1,3}(?:\^?\{?[23]\}?)?)?)", re.DOTALL
)
_LONGEST_NUMBER = 60
_LONG_NUMBER = re.compile(rf"[0-9]{{{_LONGEST_NUMBER + 1}}}")
_LARGEST_EXPONENT = 20
_WORDS_OF_TEXT = re.compile(
    r"(?<![A-Za-z\\])(?:sum|prod|int|integral|lim|limit|det|binom|binomial|gcd|lcm|mod|log|ln|exp|(?:arc|a)?(?:sin|cos|tan)h?"
    r"|sec|csc|cot|max|min|abs|floor|ceil|factorial|diff|integrate|choose|root|cbrt|totient|trace|rank|tr)(?![A-Za-z])"
)
_ORDER = re.compile(r"\border\b(?! to\b)|\barrange|\brank", re.IGNORECASE)
_AND = re.compile(r",? and |,")
_WRAPPER = re.compile(r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mathit|mbox) ?\{([^{}]*)\}")
_UNIT_VECTOR = re.compile(r"\\(?:mathbf|boldsymbol|hat|vec) ?\{? ?(?:\\(?:mathbf|boldsymbol) ?\{?)? ?[ijk](?![A-Za-z])")
_EXPONENT = re.compile(r"(?:\^|\*\*) ?(?:\{([^{}]*)\}|\(([^()]*)\)|([-+]?[0-9]+))")
_SAME = [
    (r"\\(?:left|right|displaystyle|limits|[,;:!])(?![A-Za-z])", ""),
    (r"\\(?:text|textrm|textbf|mathrm|mbox) ?\{([^{}]*)\}", r" \1 "),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\(?:cdots|dots|dotsc|dotsb)(?![A-Za-z])|\.\.\.|…", r"\\ldots"),
    (r"\\leq(?:slant)?(?![A-Za-z])|≤", r"\\le"),
    (r"\\geq(?:slant)?(?![A-Za-z])|≥", r"\\ge"),
    (r"\\neq(?![A-Za-z])|≠", r"\\ne"),
    (r"(\\[A-Za-z]+) ?\{([A-Za-z])\}", r"\1 \2"),
    (r"\{([A-Za-z0-9])\}", r"\1"),
]
"""Ways to write one thing, for texts that cannot be read."""
_SCALAR = ("number", "name", "sum", "product", "quotient", "negative", "power", "root", "call")
_EMPTY = Formula("name", value="emptyset")


def same_expression(found: str, answer: str, prompt: str = "") -> bool:
    """Whether two expressions are equal.

    Raises AnswerRefused if `found` leaves more to be worked out than `answer`, or repeats an expression of `prompt`.
    """
    found, answer = bare(found[: LONGEST_BARE + 1]), bare(answer)
    if _compact(found) == _compact(answer):
        return True
    if len(found) > LONGEST_BARE:
        raise AnswerRefused(f"The final answer must be shorter than {LONGEST_BARE} characters.")
    if based := in_base(answer):
        return based == (in_base(found) or (found, based[1]))
    if len(letters := letters_of(answer)) > 1:
        given = letters_of(found)
        ordered = list(letters) != sorted(letters) or _ORDER.search(prompt)  # else the choices that are right
        return given == letters if ordered else sorted(given) == sorted(letters)
    found, answer = as_formula(found), as_formula(answer)
    if _is_text(answer):
        ours, theirs = (list(map(_letters, _AND.split(_WRAPPER.sub(r"\1", text)))) for text in (found, answer))
        same = ours == theirs if _ORDER.search(prompt) else sorted(ours) == sorted(theirs)
        return same or _same_phrase(_read(found), _read(answer))
    if problem := _problem(found, answer):
        raise _refused(problem)
    (given, ours), (known, theirs) = map(without_integer, (found, answer))
    rests = [residues_of(_read(text), index) for text, index in ((given, ours), (known, theirs))]
    if rests[0] and rests[1] and (rests[0].certain or rests[1].certain):
        if _compact(given) != _compact(known) and is_written(prompt, given):
            raise _refused("an expression of the question")
        return rests[0].same(rests[1])
    ours, theirs = ours or (theirs and _index(found, prompt)), theirs or (ours and _index(answer, prompt))
    if ours and theirs:  # all solutions, one for each integer
        found, answer = given, known
    (general, our_constant), (of_theirs, their_constant) = map(without_constant, (found, answer))
    if our_constant and their_constant:
        found, answer = general, of_theirs
    else:
        our_constant = their_constant = ""
    known = _read(answer)
    given = _read(found) if known is None or names_of(known) else _read(_without_unit(found, prompt))
    if known is None or given is None:
        return _normalised(found) == _normalised(answer)
    for our, their in ((ours, theirs), (our_constant, their_constant)):
        if our and their:
            given = _renamed(given, Formula("name", value=our), Formula("name", value=their))
    given, known = _in_components(found, given, known), _in_components(answer, known, given)
    return _Comparison(found, given, known, prompt).is_right()


def name_differently(name: str, other: str) -> bool:
    """Whether two texts name two things of one kind, x and y, f(2) and f(3), xy and x + y, two symbols where the other
    names one, or only one of them an absolute value."""
    one, two = _read(name), _read(other)
    if one is None or two is None or key_of(one) == key_of(two) or "word" in (one.kind, two.kind):
        return False
    more = one.kind == "relation" and all(part.kind == "name" for part in one.parts)
    return more or "abs" in (one.value, two.value) or _are_of_a_kind(one, two)


def _are_of_a_kind(one: Formula, other: Formula) -> bool:
    compound = {one.kind, other.kind} <= {"product", "sum", "quotient"}
    return compound or one.kind == other.kind or one in other.all() or other in one.all()


def _same_phrase(given: Formula | None, known: Formula | None) -> bool:
    """Whether two answers say the same of a symbol: n is odd, odd n."""
    return given is not None and known is not None and given.kind == "phrase" and key_of(given) == key_of(known)


def _index(text: str, prompt: str) -> str:
    """Returns the k of x = π/4 + kπ or n = k^2, which is understood to be any integer where the other answer says so;
    "" if there is none, or if it is a symbol of the question."""
    value = text.partition("=")[2]
    found = re.search(r"(?<![A-Za-z\\])[kmn](?![A-Za-z])", value)
    if found and re.search(r"\\pi|π|\\circ|°", text):
        return found[0]
    node = _read(value) if found else None
    return found[0] if found and node and names_of(node) == {found[0]} and not has_name(prompt, found[0]) else ""


def _in_components(text: str, node: Formula, other: Formula) -> Formula:
    """Returns (3, -4) for 3\\mathbf{i} - 4\\mathbf{j} where the other side is such a tuple or a column, else the
    formula as it is."""
    size = len(other.parts)
    if other.kind not in ("bracket", "matrix") or size not in (2, 3) or not _UNIT_VECTOR.search(text):
        return node
    components = dict.fromkeys("ijk"[:size], Formula("number", value=Fraction(0)))
    for term in node.parts if node.kind == "sum" else (node,):
        unsigned = term.parts[0] if term.kind == "negative" else term
        factors = unsigned.parts if unsigned.kind == "product" else (unsigned,)
        names = [str(part.value).removeprefix("vec ") if part.kind == "name" else "" for part in factors]
        units = [name for name in names if name in components]
        if len(units) != 1 or components[units[0]].value != 0:
            return node
        rest = [part for part, name in zip(factors, names, strict=True) if name != units[0]] or [
            Formula("number", value=Fraction(1))
        ]
        value = rest[0] if len(rest) == 1 else Formula("product", tuple(rest))
        components[units[0]] = value if unsigned is term else negated(value)
    return Formula("bracket", tuple(components.values()), "()")


def _without_unit(text: str, prompt: str) -> str:
    """Returns a text without a unit of one or a few letters behind a number, unless it is a symbol of the question."""
    found = _LETTER_UNIT.fullmatch(text)
    if not found or not is_unit(found[2]) or any(has_name(prompt, name) for name in found[2] if name.isalpha()):
        return text
    value = _read(found[1])
    return found[1] if value is not None and is_constant(value) else text


def _refused(left: str) -> AnswerRefused:
    return AnswerRefused(f"The final answer must be worked out: {left}.")


def _compact(text: str) -> str:
    return "".join(text.split())


def _normalised(text: str) -> str:
    """Returns a text with one way to write it for each of several; spaces between words and digits remain."""
    for pattern, one in _SAME:
        text = re.sub(pattern, one, text)
    return re.sub(r" *(?<![A-Za-z0-9]) | (?![A-Za-z0-9])|[$]|\.$", "", " ".join(text.split()))


def _is_text(text: str) -> bool:
    """Whether a text is no formula but words, such as \\text{even} or Tuesday."""
    plain, letters = _WRAPPER.sub(r"\1", text), _letters(text)
    return (
        letters.isalpha()
        and "\\" not in plain
        and (plain != text or len(letters) > 3 or re.fullmatch("[A-Z][a-z]{2}", text) is not None)
        and not _WORDS_OF_TEXT.search(plain)
    )


def _letters(text: str) -> str:
    text = re.sub(
        r"(?i:^all )(?=.*s\.?$)|\b(?:an?|the) (?!and |or )(?=[a-z]{3})", "", _WRAPPER.sub(r"\1", text).strip()
    )
    return re.sub(r"[\s().,:'\"*-]", "", text).casefold()


def _problem(found: str, answer: str) -> str:
    """Returns what of an answer's text is too large to be worked out here; "" if nothing is."""
    if _LONG_NUMBER.search(found) and not _LONG_NUMBER.search(answer):
        return f"a number of more than {_LONGEST_NUMBER} digits is left"
    largest = max([_LARGEST_EXPONENT, *_exponents(answer)])
    return f"an exponent above {largest} is left" if any(e > largest for e in _exponents(found)) else ""


def _exponents(text: str) -> Iterator[int]:
    for found in _EXPONENT.finditer(text):
        for number in re.findall(r"(?<![0-9.])[0-9]+", found[0]):
            yield int(number[:9])


@functools.lru_cache(maxsize=64)
def _read(text: str) -> Formula | None:
    """Returns the tree of a text, without a unit behind a number; None if it cannot be read whole."""
    try:
        text = prepared(text)
        for token in tokens_of(text):
            if token.kind == "word" and token.at and is_unit(text[token.at :]):
                with_unit = read(text[: token.at])
                value = with_unit.parts[-1] if with_unit.kind == "relation" else with_unit
                if is_constant(value):
                    return _multiplied(with_unit)
        return _multiplied(read(text))
    except NotRead:
        return None


def _multiplied(node: Formula) -> Formula:
    """Returns a formula with the numbers before a matrix multiplied in, and with a column for a row's transpose."""
    parts = tuple(map(_multiplied, node.parts))
    node = Formula(node.kind, parts, node.value)
    if node.kind == "power" and parts[1].value in ("T", "top") and parts[0].kind in ("bracket", "matrix"):
        rows = parts[0].value[0] if parts[0].kind == "matrix" else 1
        return Formula("matrix", parts[0].parts, (len(parts[0].parts), 1)) if rows == 1 else node
    if node.kind == "product" and len(parts) == 2 and (cells := _shared_fraction(*parts)):
        return Formula(parts[1].kind, cells, parts[1].value)
    if node.kind not in ("product", "negative", "quotient") or [part.kind for part in parts].count("matrix") != 1:
        return node
    (matrix,) = (part for part in parts if part.kind == "matrix")
    if node.kind == "quotient" and parts[1] is matrix:
        return node
    cells = (Formula(node.kind, tuple(cell if part is matrix else part for part in parts)) for cell in matrix.parts)
    return Formula("matrix", tuple(cells), matrix.value)


def _shared_fraction(factor: Formula, matrix: Formula) -> tuple[Formula, ...]:
    """Returns the cells of a matrix or tuple of whole numbers behind a fraction in lowest terms that they have in
    common; () for any other product."""
    if matrix.kind not in ("matrix", "bracket") or matrix.value in ("{}", "[]"):
        return ()
    number, *cells = map(key_of, (factor, *matrix.parts))
    if steps(factor) or any(key[0] != "number" for key in (number, *cells)):
        return ()
    below = number[1].denominator
    if (
        below == 1
        or any(cell[1].denominator != 1 for cell in cells)
        or gcd(below, *(int(cell[1]) for cell in cells)) != 1
    ):
        return ()
    return tuple(Formula("number", value=number[1] * cell[1]) for cell in cells)


def _is_name(node: Formula) -> bool:
    """Whether a formula names what a value is given to: x, x_1, f(2), AB, m + n, \\text{Area}, (x, y)."""
    if node.kind in ("name", "word", "derivative", "applied"):
        return node.value not in ("∞", "π", "e", "i", "emptyset")
    if node.kind == "call":
        return node.value in ("abs", "degree", "norm", "max", "min", "gcd", "lcm", "det") and all(
            map(_is_name, node.parts)
        )
    compound = node.kind in ("product", "sum", "phrase", "quotient") or (node.kind == "bracket" and node.value == "()")
    return compound and all(_is_name(part) or part.kind == "command" for part in node.parts)


def _relations(node: Formula) -> Iterator[Formula]:
    for part in node.parts if node.kind in ("list", "cases", "bracket", "phrase") else (node,):
        if part.kind == "relation":
            yield part


def _is_solved(given: Formula, known: Formula) -> bool:
    """Whether all relations say what a symbol is, unless the known answer's do not either; and whether one of several
    equal expressions alone is more than a symbol."""
    solved = all(any(map(_is_name, relation.parts)) for relation in _relations(known))
    chained = any("=" in relation.value and len(relation.parts) > 2 for relation in _relations(known))
    for relation in _relations(given):
        if solved and not any(map(_is_name, relation.parts)):
            return False
        if (
            not chained
            and "=" in relation.value
            and len(relation.parts) > 2
            and not all(map(_is_name, relation.parts[:-1]))
        ):
            return False
    return True


@dataclass(frozen=True)
class _Item:
    """One of the values that an answer lists."""

    name: Formula | None
    value: Formula


class _Comparison:
    """Compares an answer with the known one, and refuses it where its form is not an answer's."""

    def __init__(self, text: str, given: Formula, known: Formula, prompt: str) -> None:
        self.text, self.given, self.known, self.prompt = text, given, known, prompt

    def is_right(self) -> bool:
        if not _is_solved(self.given, self.known):
            raise _refused("an equation is left")
        left = steps(_without_names(self.given)) - self._allowed()
        if any(step.startswith("a binom") for step in steps(self.known)):
            left = {step for step in left if not step.startswith("a factorial of a symbol")}
        if left:
            raise _refused(f"{min(left)} is left")
        if key_of(self.given) == key_of(self.known):
            if rewrites(self.prompt, self.text):
                raise _refused("an expression of the question")
            return True
        right = self._same_answers(self.given, self.known)
        same_form = key_of(_value_of(self.given)) == key_of(_value_of(self.known))
        if right and not same_form and (repeats(self.prompt, self.text, self.given) or self._restates()):
            raise _refused("an expression of the question")
        return right

    def _restates(self) -> bool:
        number, known = numeral(self.text), _value_of(self.known)
        return number is not None and is_constant(known) and restates(self.prompt, number, None)

    def _allowed(self) -> set[str]:
        allowed = steps(self.known)
        if intervals_of(self.known) and intervals_of(self.given):
            allowed |= {"a union", "an operation"}
        if any("=" in part.value and not any(map(_is_name, part.parts)) for part in _relations(self.known)):
            allowed.add("a power of a number")
        held = [part.value for part in self.known.all()]
        if "cis" in held or ("e" in held and "i" in held):  # a complex number by its angle
            allowed |= {"a root", "a trigonometric function"}
        if "a trigonometric function" in allowed:
            allowed.add("a root")
        if "a logarithm" in allowed:
            allowed |= {"a root", "abs"}
        return allowed

    def _same_answers(self, given: Formula, known: Formula) -> bool:
        """Compares whole answers: intervals in all their forms, lists of values with or without names, relations."""
        if _is_set_of_one(known) and known.parts[0] != _EMPTY and not names_of(known):  # {x}: the fractional part of x?
            known, given = known.parts[0], given.parts[0] if _is_set_of_one(given) else given
        ours, theirs = intervals_of(given), intervals_of(known)
        if ours and theirs and (given.kind, known.kind) != ("bracket", "bracket"):
            names = [name for name, _ in (ours, theirs) if name]
            return len(set(names)) < 2 and self._matched(ours[1], theirs[1])
        if (given.kind == known.kind == "list" and _conflict(given, known)) or is_choice(given) != is_choice(known):
            return False
        ours, theirs = _items(given), _items(known)
        if ours is None or theirs is None or {given.kind, known.kind} == {"matrix", "bracket"}:
            return self._same(given, known)
        return self._same_items(*ours, *theirs)

    def _same_items(self, given: list[_Item], around: str, known: list[_Item], expected: str) -> bool:
        if len(given) != len(known):
            return False
        values, wanted = [item.value for item in given], [item.value for item in known]
        names, theirs = ([key_of(item.name) for item in items if item.name] for items in (given, known))
        if len(names) == len(theirs) == len(known):
            if len(known) == 1:
                return self._same_named(given[0], known[0])
            pairs = [Formula("named", (item.name, item.value)) for item in given if item.name]
            return self._matched(pairs, [Formula("named", (item.name, item.value)) for item in known if item.name])
        if any(len(some) not in (0, len(known)) for some in (names, theirs)):
            return self._same(self.given, self.known)
        letters = {str(item.name.value).partition("_")[0] for item in given if item.name}
        is_set = expected == "{}" and not theirs and len(letters) == 1  # x_1 = 2, x_2 = 3
        distinct = len(set(names or theirs)) > 1 and not is_set
        if names and len(set(names)) == 1 and expected == "()":
            return False
        if len(known) == 1 and not (names or theirs):
            return around == expected and self._same(values[0], wanted[0])
        if distinct:
            values, wanted = _by_letter(given), _by_letter(known)
            return "{}" not in (around, expected) and self._in_order(values, wanted)
        if {around, expected} <= {"", "{}"}:
            return self._matched(values, wanted)
        if (
            around == expected
            or {around, expected} == {"", "()"}
            or ("{}" not in (around, expected) and len(known) > 2)
        ):
            return self._in_order(values, wanted)
        return False

    def _same_named(self, given: _Item, known: _Item) -> bool:
        """Compares x = 1 with x = 1, but also f(t) = t with f(x) = x, and y = x with f(x) = x."""
        name, other, value = given.name, known.name, given.value
        assert name is not None and other is not None
        if name.kind == other.kind == "applied" and name.parts[0] == other.parts[0]:
            variables = name.parts[1], other.parts[1]
            if all(variable.kind == "name" for variable in variables):
                return self._same(_renamed(value, *variables), known.value)
        return (not _are_of_a_kind(name, other) or key_of(name) == key_of(other)) and self._same(value, known.value)

    def _in_order(self, given: Sequence[Formula], known: Sequence[Formula]) -> bool:
        return len(given) == len(known) and all(map(self._same, given, known))

    def _matched(self, given: Sequence[Formula], known: Sequence[Formula]) -> bool:
        """Whether there is one for each, in any order."""
        left = list(known)
        if len(given) != len(left):
            return False
        for one in given:
            match = next((at for at, other in enumerate(left) if self._same(one, other)), None)
            if match is None:
                return False
            del left[match]
        return True

    def _same(self, given: Formula, known: Formula) -> bool:
        """Whether two parts are equal: by value where they have one, else part by part."""
        if key_of(given) == key_of(known):
            return True
        if {given.kind, known.kind} <= set(_SCALAR):
            try:
                equal = Values(given, known).same(given, known)
            except NoValue:
                equal = None
            if equal:
                self._check_form(given, known)
            if equal is not None:
                return equal
        if {given.kind, known.kind} == {"matrix", "bracket"}:
            matrix, bracket = (given, known) if given.kind == "matrix" else (known, given)
            one_line = 1 in matrix.value and bracket.value == "()"
            return one_line and self._in_order(given.parts, known.parts)
        if given.kind == known.kind == "relation":
            return self._same_relation(given, known)
        if given.kind == known.kind == "congruence":
            return self._same_congruence(given, known)
        if given.kind != known.kind or given.value != known.value or not given.parts:
            return False
        unordered = given.kind in ("list", "cases", "logic") or given.value in ("{}", "∪", "∩")
        return (self._matched if unordered else self._in_order)(given.parts, known.parts)

    def _same_relation(self, given: Formula, known: Formula) -> bool:
        if len(given.parts) == len(known.parts) == 2 and given.value[0] in TURNED and known.value[0] in TURNED:
            sides = [Formula("sum", (node.parts[0], Formula("negative", (node.parts[1],)))) for node in (given, known)]
            try:
                sign = Values(*sides).proportional(*sides)
            except NoValue:
                sign = None
            if sign is not None:
                relation = given.value[0] if sign > 0 or not sign else TURNED[given.value[0]]
                equal = bool(sign) and relation == known.value[0]
                if equal:
                    self._check_length(given, known)
                return equal
        if given.value == known.value:
            return (self._matched if set(known.value) == {"="} else self._in_order)(given.parts, known.parts)
        turned = tuple(TURNED.get(one, "") for one in reversed(given.value))
        return turned == known.value and self._in_order(given.parts[::-1], known.parts)

    def _same_congruence(self, given: Formula, known: Formula) -> bool:
        *ours, modulus = given.parts
        *theirs, expected = known.parts
        if not self._same(modulus, expected):
            return False
        if ours and theirs and len(theirs) == 2 and len(ours) == 1:
            ours = [theirs[0], *ours]
        if len(ours) != len(theirs) or not self._in_order(ours[:-1], theirs[:-1]):
            return False
        residues = ours[-1], theirs[-1]
        if (
            all(node.kind == "number" and node.value.denominator == 1 for node in (*residues, modulus))
            and modulus.value
        ):
            small = abs(residues[0].value) < abs(modulus.value) or residues[0] == residues[1]
            return small and (residues[0].value - residues[1].value) % modulus.value == 0
        return self._same(*residues)

    def _check_form(self, given: Formula, known: Formula) -> None:
        """Refuses an equal formula that is the question's, or has not the form that the question asks for."""
        if given is not self.given and repeats(self.prompt, "", given):
            raise _refused("an expression of the question")
        asked = asked_for(self.prompt)
        if "no root below" in asked and _has_root_below(given) and not _has_root_below(known):
            raise _refused("a root is left below")
        if "nothing to combine" in asked and combines(given) and not combines(known):
            raise _refused("something to combine is left")
        shapes = asked & {"product", "sum", "quotient"}
        if shapes and shape(given) != shape(known) and not (len(shapes) == 1 and shape(given) in shapes):
            raise _refused("the form that is asked for")
        if "product" in shapes and (
            _factor_count(given) < _factor_count(known) or _has_common_factor(given) > _has_common_factor(known)
        ):
            raise _refused("a factor is left")
        if "sum" in shapes and is_expanded(known) and not is_expanded(given):
            raise _refused("a sum is left")
        self._check_length(given, known)

    @staticmethod
    def _check_length(given: Formula, known: Formula) -> None:
        counted = any(part.kind == "call" and part.value == "binom" for part in known.all())
        if not counted and not is_expanded(given) and leaves(given) > 1.5 * leaves(known) + 1:
            raise _refused("an expression that can be simplified is left")


def _factor_count(node: Formula) -> int:
    while node.kind == "negative":
        node = node.parts[0]
    if node.kind == "product":
        return sum(map(_factor_count, node.parts))
    if node.kind == "power" and node.parts[1].kind == "number" and node.parts[1].value.denominator == 1:
        return int(node.parts[1].value) * _factor_count(node.parts[0])
    return 0 if node.kind == "number" else 1


def _has_common_factor(node: Formula) -> bool:
    """Whether all terms of one of the factors are multiples of a number."""
    while node.kind == "negative":
        node = node.parts[0]
    if node.kind in ("product", "power"):
        return any(map(_has_common_factor, node.parts))
    return node.kind == "sum" and content(node) != 1


def _has_root_below(node: Formula) -> bool:
    return any(
        (part.kind == "quotient" and any(inner.kind == "root" for inner in part.parts[1].all()))
        or (part.kind == "root" and part.parts[0].kind == "quotient")
        or (
            part.kind == "power"
            and part.parts[1].kind == "number"
            and part.parts[1].value < 0
            and any(inner.kind == "root" for inner in part.parts[0].all())
        )
        for part in node.all()
    )


def _is_set_of_one(node: Formula) -> bool:
    return node.kind == "bracket" and node.value == "{}" and len(node.parts) == 1


def _without_names(node: Formula) -> Formula:
    """Returns an answer without what only says what its values are called."""
    if node.kind in ("list", "cases"):
        return Formula(node.kind, tuple(map(_without_names, node.parts)), node.value)
    if node.kind == "relation":
        return Formula("relation", tuple(part for part in node.parts if not _is_name(part)), node.value)
    return node


def _value_of(node: Formula) -> Formula:
    item = _item(node)
    return item.value if item else node


def _renamed(node: Formula, old: Formula, new: Formula) -> Formula:
    return (
        new if node == old else Formula(node.kind, tuple(_renamed(part, old, new) for part in node.parts), node.value)
    )


def _item(node: Formula) -> _Item | None:
    """Returns the name and the value that an equation gives it; None for other relations."""
    if node.kind != "relation":
        return _Item(None, node)
    if set(node.value) - {"=", "∈", "≡"}:
        return None
    *names, value = node.parts
    if len(names) == 1 and node.value == ("=",) and _is_name(value) and not _is_name(names[0]):
        names, value = [value], names[0]
    return _Item(names[0], value) if len(names) == 1 and _is_name(names[0]) else None


def _items(node: Formula) -> tuple[list[_Item], str] | None:
    """Returns the values that an answer lists, each with its name, and the brackets around them; None for relations."""
    around = ""
    if node.kind == "cases" and not any(part.kind == "case" for part in node.parts):
        parts: Sequence[Formula] = node.parts
    elif node.kind == "list":
        parts = node.parts
    elif node.kind == "bracket" and len(_alternatives(node)) > 1:
        parts = (node,)
    elif node.kind == "bracket":
        parts, around = node.parts, str(node.value)
    elif (only := _item(node)) and only.name and _is_set(only.value):
        return [_Item(only.name, value) for part in only.value.parts for value in _alternatives(part)], ""
    elif only and only.name and only.name.kind == "bracket" and only.value.kind == "bracket":
        if len(only.name.parts) != len(only.value.parts) or only.value.value != "()":
            return None
        return list(map(_Item, only.name.parts, only.value.parts)), ""
    else:
        parts = (node,)
    items = []
    for part in itertools.chain.from_iterable(map(_equations, parts)):
        item = _item(part)
        if item is None:
            return None
        items += [_Item(item.name, value) for value in _alternatives(item.value)]
    if len(items) > 1 and items[0].name and not any(item.name for item in items[1:]) and not around:
        items = [_Item(items[0].name, item.value) for item in items]  # x = 1, 2
    return items, around


def _is_set(node: Formula) -> bool:
    return node.kind in ("bracket", "list") and node.value == "{}" and (len(node.parts) > 1 or not names_of(node))


def _by_letter(items: list[_Item]) -> list[Formula]:
    """Returns values in the order of their names where these are neighbours in the alphabet, such as x, y and z."""
    names = [str(item.name.value) if item.name and item.name.kind == "name" else "" for item in items]
    if all(len(name) == 1 for name in names) and ord(max(names)) - ord(min(names)) < 4:
        items = [item for _, item in sorted(zip(names, items, strict=True), key=lambda pair: pair[0])]
    return [item.value for item in items]


def _equations(node: Formula) -> list[Formula]:
    """Returns a = 1 and b = 1 for a = b = 1, and any other formula as it is."""
    *names, value = node.parts or (node,)
    if node.kind != "relation" or set(node.value) != {"="} or _is_name(value) or not all(map(_is_name, names)):
        return [node]
    return [Formula("relation", (name, value), ("=",)) for name in names]


def _alternatives(node: Formula) -> list[Formula]:
    """Returns the two values of one with ±; the two points of one with ± in a coordinate."""
    found = sum(part.kind == "either" for part in node.all())
    point = node.kind == "bracket" and node.value == "()" and found == 1
    if not found or not (point or node.kind in (*_SCALAR, "either", "congruence")):
        return [node]
    return [chosen(node, "±"), chosen(node, "∓")]


def _conflict(given: Formula, known: Formula) -> bool:
    """Whether one list says "and" and the other "or", of what is not just values."""
    worded = any(
        part.kind in ("phrase", "word", "list", "congruence") or (part.kind == "relation" and part.value != ("=",))
        for part in given.parts + known.parts
    )
    return worded and given.value != known.value and "," not in (given.value, known.value)
