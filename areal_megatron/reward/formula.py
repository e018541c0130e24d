"""Reads formulas in LaTeX or plain text into trees, whole or not at all.

Lists, sets, intervals, tuples, matrices, cases, relations, congruences and words between formulas are read as well as
sums and products. Whatever a text holds is in its tree: `1, 2, \\ldots, n` has four elements, the third an ellipsis. A
text with anything that has no place in this grammar raises NotRead.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from areal_megatron.reward.numeral import numeral, words
from areal_megatron.reward.tokens import NotRead, Token, prepared, tokens_of

DEEPEST = 12
"""Brackets within brackets."""
_MOST_DEPTH = 60
"""Parts within parts."""


@dataclass(frozen=True)
class Formula:
    """A formula or a part of one."""

    kind: str
    """number, name, sum, product, quotient, power, root, negative, call, list, bracket, relation, matrix, word, …"""
    parts: tuple[Formula, ...] = ()
    value: Any = ""
    """The number (a Fraction), the name or the brackets (a text), the relations between the parts or the shape of a
    matrix (a tuple), as the kind says."""

    def all(self) -> Iterator[Formula]:
        """Yields this part and all within it."""
        rest: list[Formula] = [self]
        while rest:
            node = rest.pop()
            yield node
            rest += node.parts


def read(text: str) -> Formula:
    """Returns the tree of a formula. Raises NotRead if a part of the text has no place in it."""
    text, depth = prepared(text), 0
    for bracket in re.finditer(r"[{(\[]|[})\]]", text):
        depth += 1 if bracket[0] in "{([" else -1
        if depth > DEEPEST:
            raise NotRead("too many brackets within brackets")
    reader = _Reader(tokens_of(text))
    try:
        found = reader.list()
    except RecursionError:
        raise NotRead("too many parts within parts") from None
    reader.expect("end of text")
    if _depth(found) > _MOST_DEPTH:
        raise NotRead("too many parts within parts")
    return found


def _depth(node: Formula) -> int:
    deepest, rest = 0, [(node, 1)]
    while rest:
        part, depth = rest.pop()
        deepest = max(deepest, depth)
        rest += [(inner, depth + 1) for inner in part.parts]
    return deepest


class _Reader:
    """Reads tokens from left to right; each method reads what binds as tightly as its name says."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.at, self.bars = tokens, 0, 0

    @property
    def next(self) -> Token:
        return self.tokens[self.at]

    def take(self, *kinds: str) -> Token | None:
        """Returns the next token and passes it, if it is of one of these kinds; else None."""
        token = self.next
        if token.kind not in kinds:
            return None
        self.at += 1
        return token

    def expect(self, *kinds: str) -> Token:
        token = self.take(*kinds)
        if not token:
            raise NotRead(f"{self.next.text or self.next.kind!r} where {kinds[0]!r} was expected")
        return token

    def list(self) -> Formula:
        parts, between = [self.phrase()], []
        while token := self.take("separator"):
            between.append(token.text)
            if token.text == "," and self.next.kind == "separator" and self.next.text != ",":  # "a, b, and c"
                between[-1] = self.expect("separator").text
            if self.next.kind in ("&", "row", "end") and token.text == ",":
                between.pop()
                break
            parts.append(self.phrase())
        return _listed(parts, between) if between else parts[0]

    def phrase(self) -> Formula:
        """Reads a formula, or words with formulas between them."""
        parts: list[Formula] = []
        while self.next.kind not in _ENDS:
            if self.bars and self.next.kind == "|":
                break
            if self.next.kind == "command" and self.next.text == "rangle":
                break
            if token := self.take("word"):
                parts.append(Formula("word", value=token.text))
            elif parts and parts[-1].kind != "word":
                break
            else:
                parts.append(self.relation())
        if not parts:
            raise NotRead("nothing where a formula was expected")
        return parts[0] if len(parts) == 1 else _phrase(parts)

    def relation(self) -> Formula:
        sides, relations = [], []
        if self.next.kind == "relation":
            sides.append(Formula("nothing"))
        else:
            sides.append(self.union())
        modulus = self._modulus()
        while token := self.take("relation"):
            relations.append(token.text)
            if self.next.kind in ("word", "separator"):  # "P(x) = \text{even}": the words are the side
                sides.append(self._words())
            else:
                sides.append(self.union())
        modulus = modulus or self._modulus()
        if modulus:
            if len(sides) == 2 and sides[1].value == "{}":  # n ≡ 0, 1
                residues = (Formula("congruence", (sides[0], part, modulus), ("≡",)) for part in sides[1].parts)
                return Formula("list", tuple(residues), ",")
            relations = ["≡" if one == "=" else one for one in relations]
            return Formula("congruence", (*sides, modulus), tuple(relations))
        return Formula("relation", tuple(sides), tuple(relations)) if relations else sides[0]

    def _words(self) -> Formula:
        found = []
        while token := self.take("word"):
            found.append(token.text)
        if not found:
            raise NotRead("nothing behind a relation")
        return Formula("word", value=" ".join(found))

    def _modulus(self) -> Formula | None:
        if self.next.kind not in ("command", "word") or self.next.text not in ("pmod", "bmod", "mod"):
            return None
        self.at += 1
        return self.sum()

    def union(self) -> Formula:
        return self._joined(self.sum, {"∪": "∪", "∩": "∩", "∖": "∖"})

    def _joined(self, part: Callable[[], Formula], operations: dict[str, str]) -> Formula:
        found = part()
        while token := self.take(*operations):
            other = part()
            flat = found.parts if found.kind == "sets" and found.value == token.kind != "∖" else (found,)
            found = Formula("sets", (*flat, other), token.kind)
        return found

    def sum(self) -> Formula:
        terms = [self.product()]
        while token := self.take("+", "-", "±", "∓"):
            if token.kind == "-" and self.next.kind == "\\{":  # the set R - {1}
                self.at -= 1
                self.tokens[self.at] = Token("∖", at=token.at)
                break
            term = self.product()
            terms.append(term if token.kind == "+" else negated(term) if token.kind == "-" else _either(term, token))
        return terms[0] if len(terms) == 1 else Formula("sum", tuple(terms))

    def product(self) -> Formula:
        """Reads factors and divisors; those that stand side by side are multiplied."""
        signs = []
        while token := self.take("+", "-", "±", "∓"):
            signs.append(token)
        found, divided = [self.power()], False
        while True:
            if self.take("*"):
                found.append(self._signed_power())
                divided = False
            elif self.take("/"):
                top, bottom = _product(found), self._signed_power()
                divided = not (_plain(top) and _plain(bottom))
                found = [Formula("quotient", (top, bottom))]
            elif self._begins_factor():
                if divided:
                    raise NotRead("whether the last factor is divided by or multiplied with")
                before, behind = self.tokens[self.at - 1].kind, self.tokens[self.at + 1].kind
                if self.next.kind == "number" and not (before in (")", "name") and behind == "^"):  # n2^n
                    raise NotRead("a number behind a value")
                found.append(self.power())
            else:
                break
        result = _product(found)
        for token in reversed(signs):
            result = result if token.kind == "+" else negated(result) if token.kind == "-" else _either(result, token)
        return result

    def _signed_power(self) -> Formula:
        negative = False
        while token := self.take("-", "+"):
            negative ^= token.kind == "-"
        return negated(self.power()) if negative else self.power()

    def _begins_factor(self) -> bool:
        kind = self.next.kind
        if kind == "|":
            return not self.bars
        if kind == "command":
            return self.next.text not in ("rangle", "rfloor", "rceil", "pmod", "bmod", "mod")
        return kind in ("number", "name", "function", "(", "[", "{", "\\{", "begin", "dots", "\\|")

    def power(self) -> Formula:
        base = self.atom()
        while True:
            if self.take("^"):
                if mark := self.take("'", "*", "+", "-"):
                    if mark.kind == "-" and self.next.kind in ("number", "name"):
                        base = Formula("power", (base, negated(self._argument())))
                        continue
                    base = _marked(base, mark.kind)
                    continue
                base = self._derivative(base) or Formula("power", (base, self._argument()))
            elif self.take("*") if self.next.kind == "*" and self.tokens[self.at + 1].kind == "*" else None:
                self.expect("*")
                base = Formula("power", (base, self._signed_power()))
            elif self.take("!"):
                if self.next.kind == "!":
                    raise NotRead("a double factorial")
                base = Formula("call", (base,), "factorial")
            elif self.take("%"):
                base = Formula("call", (base,), "percent")
            elif self.take("degree"):
                base = Formula("call", (base,), "degree")
            elif base.kind == "name" and self.take("'"):
                base = _marked(base, "'")
            elif self.next.kind == "(" and (_is_function(base) or self._is_defined(base)):
                base = Formula("applied", (base, self.atom()))
            elif base.kind in ("name", "command") and self.take("_"):
                base = Formula(base.kind, base.parts, f"{base.value}_{_text_of(self._argument())}")
            else:
                return base

    def _derivative(self, base: Formula) -> Formula | None:
        """Reads the (n) of f^{(n)}, which is no power: a derivative or the number of one of several."""
        kinds = [token.kind for token in self.tokens[self.at : self.at + 5]]
        if base.kind != "name" or base.value in ("e", "i") or kinds[:2] + kinds[3:] != ["{", "(", ")", "}"]:
            return None
        token = self.tokens[self.at + 2]
        self.at += 5
        mark = "'" * int(token.text) if token.text in ("1", "2", "3") else f"({token.text})"
        return _marked(base, mark)

    def _is_defined(self, base: Formula) -> bool:
        """Whether P(x) = follows, where P is any symbol at the beginning of a formula."""
        kinds = [token.kind for token in self.tokens[self.at : self.at + 4]]
        begins = self.at == 1 or self.tokens[self.at - 2].kind == "separator"
        return base.kind == "name" and begins and kinds == ["(", "name", ")", "relation"]

    def _argument(self) -> Formula:
        """Reads a group in braces, or the one atom that a command, ^ or _ takes."""
        if token := self.take("number"):
            return _number(token.text)
        if self.take("-"):
            return negated(self._argument())
        return self.atom()

    def _digit(self) -> Formula:
        """Reads an argument of which a single digit is enough, as in \\frac12."""
        token = self.next
        if token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
            self.tokens[self.at] = Token("number", token.text[1:], token.at + 1)
            return _number(token.text[0])
        return self._argument()

    def atom(self) -> Formula:
        token = self.next
        self.at += 1
        kind = token.kind
        if kind == "number":
            return self._mixed(_number(token.text))
        if kind == "name":
            return Formula("name", value=token.text)
        if kind == "function":
            return self.function(token.text)
        if kind == "dots":
            return Formula("dots")
        if kind == "command":
            return self.command(token.text)
        if kind == "begin":
            return self.environment(token.text)
        if kind == "|" or kind == "\\|":
            self.bars += kind == "|"
            inner = self.list()
            self.bars -= kind == "|"
            self.expect(kind)
            return Formula("call", (inner,), "abs" if kind == "|" else "norm")
        if kind in ("(", "[", "{", "\\{"):
            return self.bracket(kind)
        raise NotRead(f"{token.text or kind!r} where a value was expected")

    def _mixed(self, whole: Formula) -> Formula:
        """Returns 3 1/2 for 3\\frac{1}{2}, and the number itself where no such fraction follows."""
        if not (self.next.kind == "command" and self.next.text == "frac" and whole.value.denominator == 1):
            return whole
        before = self.at, list(self.tokens)
        fraction = self.atom()
        if fraction.kind == "quotient" and all(part.kind == "number" for part in fraction.parts):
            top, bottom = (part.value for part in fraction.parts)
            if 0 < top < bottom:
                return Formula("number", value=whole.value + top / bottom)
        self.at, self.tokens = before
        return whole

    def bracket(self, opened: str) -> Formula:
        bars, self.bars = self.bars, 0
        if opened == "{" and self.take("}"):
            raise NotRead("{} without content")
        if opened == "\\{" and self.take("\\}"):
            self.bars = bars
            return Formula("name", value="emptyset")
        inner = self._builder() if opened == "\\{" else self.list()
        closed = self.expect(*({"{": ("}",), "\\{": ("\\}",)}.get(opened, (")", "]")))).kind
        self.bars = bars
        grouped = inner.kind != "list" or inner.value in ("and", "or")
        if opened == "{" or inner.kind in ("matrix", "builder") or (opened + closed == "()" and grouped):
            return inner
        return Formula("bracket", _parts_of_list(inner), "{}" if opened == "\\{" else opened + closed)

    def _builder(self) -> Formula:
        """Reads what is between { and }: a list, or {x | x > 0}."""
        depth, bars = 0, []
        for at in range(self.at, len(self.tokens)):
            kind, text = self.tokens[at].kind, self.tokens[at].text
            depth += kind in ("(", "[", "{", "\\{")
            depth -= kind in (")", "]", "}", "\\}")
            if depth < 0:
                break
            if not depth and (kind == "|" or (kind == "relation" and text in (":", "|"))):
                bars.append((kind == "|", text != ":", at))  # a colon is one before a bar
        if not bars or (min(bars)[0] and len(bars) > 1) or self.next.kind == "number":
            return self.list()
        _, _, bar = min(bars)
        self.tokens[bar] = Token("such that", at=self.tokens[bar].at)
        of = self.list()
        self.expect("such that")
        if of.kind == "relation" and of.value == ("∈",) and of.parts[1].value == "mathbb R":
            of = of.parts[0]
        return Formula("builder", (of, self.list()))

    def function(self, name: str) -> Formula:
        if name == "log" and self.take("_"):
            base = self._digit() if self.next.kind == "number" else self._argument()
            name, bases = "log", (base,)
        else:
            bases = ()
            if self.take("_"):
                return Formula("command", (self._argument(),), name)
        exponent = self._argument() if self.take("^") else None
        if exponent == Formula("number", value=Fraction(-1)):
            name, exponent = (f"arc{name}", None) if name in ("sin", "cos", "tan") else (name, exponent)
        argument = self._function_argument()
        if name in ("max", "min", "gcd", "lcm") and argument.kind == "bracket":
            argument = Formula("list", argument.parts, ",")
        found = Formula("call", (argument, *bases), name)
        return Formula("power", (found, exponent)) if exponent else found

    def _function_argument(self) -> Formula:
        if self.next.kind in ("(", "{", "["):
            return self.power()
        negative = bool(self.take("-"))
        factors = [self.power()]
        while self.next.kind in ("number", "name", "dots") or (
            self.next.kind == "command" and (self.next.text in ("frac", "sqrt") or self.next.text in _GREEK)
        ):
            if self.next.kind == "number":
                raise NotRead("a number behind a value")
            factors.append(self.power())
        while self.take("/"):
            factors = [Formula("quotient", (_product(factors), self.power()))]
        return negated(_product(factors)) if negative else _product(factors)

    def command(self, name: str) -> Formula:
        if name == "frac":
            return _derivative_or_quotient(self._digit(), self._digit())
        if name == "binom":
            return Formula("call", (self._digit(), self._digit()), "binom")
        if name in ("sqrt", "cbrt"):
            degree = Formula("number", value=Fraction(3 if name == "cbrt" else 2))
            if name == "sqrt" and self.take("["):
                degree = self.list()
                self.expect("]")
            return Formula("root", (self._argument(), degree))
        if name in ("langle", "lfloor", "lceil"):
            inner = self.list()
            if self.next.kind != "command" or self.next.text != name.replace("l", "r", 1):
                raise NotRead(f"\\{name} without its end")
            self.at += 1
            if name == "langle":
                return Formula("bracket", _parts_of_list(inner), "()")
            return Formula("call", (inner,), {"lfloor": "floor", "lceil": "ceil"}[name])
        if name in ("rangle", "rfloor", "rceil", "pmod", "bmod", "mod", "choose", "over", "right", "left"):
            raise NotRead(f"\\{name} in an unknown place")
        if name == "hat" and self.next.kind == "{" and self.tokens[self.at + 1].text in ("i", "j", "k"):
            return self._argument()
        if name in _STYLES:
            return Formula("name", value=f"{name} {_text_of(self._argument())}")
        if name in ("angle", "triangle"):
            letters = []
            while token := self.take("name"):
                letters.append(token.text)
            return Formula("name", value=f"{name} {''.join(letters)}")
        if name == "emptyset" or name.lower() in _GREEK:
            return Formula("name", value=name)
        if name in _OPERATORS:
            raise NotRead(f"the operation \\{name}")
        return Formula("command", value=name)

    def environment(self, name: str) -> Formula:
        if name not in _ENVIRONMENTS:
            raise NotRead(f"an unknown environment {name}")
        bars, self.bars = self.bars, 0
        rows = [[]]
        while True:
            self.take("separator") if name == "cases" and self.next.kind == "separator" else None
            if self.next.kind not in ("&", "row", "end"):
                cell = self.list()
                rows[-1].append(cell)
            elif self.take("row"):
                rows.append([])
            elif not self.take("&"):
                break
        if self.expect("end").text != name:
            raise NotRead(f"{name} without its end")
        self.bars = bars
        rows = [row for row in rows if row]
        if not rows:
            raise NotRead("an empty matrix")
        if name in ("cases", "aligned"):
            return Formula("cases", tuple(row[0] if len(row) == 1 else _case(row) for row in rows))
        if len({len(row) for row in rows}) > 1:
            raise NotRead("a matrix with rows of different lengths")
        matrix = Formula("matrix", tuple(cell for row in rows for cell in row), (len(rows), len(rows[0])))
        return Formula("call", (matrix,), "det") if name == "vmatrix" else matrix


_ENDS = ("separator", "end of text", ")", "]", "}", "\\}", "row", "&", "end", "such that")
_STYLES = words("mathbb mathcal mathfrak mathscr vec hat bar overline overrightarrow widehat tilde dot underline")
_OPERATORS = words(
    "circ otimes oplus ominus odot star bullet diamond bigcirc bowtie boxtimes ltimes rtimes wr uplus amalg sqcap sqcup"
)
_ENVIRONMENTS = words("pmatrix bmatrix matrix smallmatrix vmatrix Bmatrix cases aligned array")
_GREEK = words(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi chi psi omega ell hbar"
)


def _case(row: list[Formula]) -> Formula:
    """Returns the value and the condition of a row, without the "if" before a condition."""
    *values, condition = row
    if condition.kind == "phrase" and condition.parts[0] in _IF:
        rest = condition.parts[1:]
        condition = rest[0] if len(rest) == 1 else Formula("phrase", rest)
    return Formula("case", (*values, condition))


_IF = [Formula("word", value=word) for word in ("if", "when", "for", "where")]


def _phrase(parts: list[Formula]) -> Formula:
    """Returns words and formulas in the one order for "n is odd" and "odd n", without articles and "is"."""
    words = {part.value for part in parts if part.kind == "word"}
    least = {"integer", "number"} if words & {"odd", "even", "prime", "composite"} else set()
    least |= {"is", "are", "an", "the"}
    parts = [part for part in parts if part.kind != "word" or part.value not in least] or parts
    if parts[-1].kind == "name" and all(part.kind == "word" and part.value != "all" for part in parts[:-1]):
        parts = [parts[-1], *parts[:-1]]
    return parts[0] if len(parts) == 1 else Formula("phrase", tuple(parts))


def _listed(parts: list[Formula], between: list[str]) -> Formula:
    """Returns the list of parts with these separators between them: a list of congruences if the last one has the
    modulus of all, a list of tuples for x = 1, y = 2 or x = 2, y = 1."""
    if parts[0].value == ("≠",) and not any(part.kind == "relation" for part in parts[1:]):  # x ≠ 1, 2
        others = (Formula("relation", (parts[0].parts[0], part), ("≠",)) for part in parts[1:])
        return Formula("list", (parts[0], *others), ",")
    symbols = set(between) & {"∨", "∧"}
    if symbols and not all(part.kind in ("relation", "number") for part in parts):
        if symbols != set(between):
            raise NotRead("∨ or ∧ in a list")
        found = _parted(parts, between, "∨") or _parted(parts, between, "∧")
        assert found is not None  # as it has no other separator
        return found
    between = [{"∨": "or", "∧": "and"}.get(one, one) for one in between]
    looser = [loose for loose in ("or", ";", "and") if loose in between and (loose != "and" or "or" not in between)]
    groups = {loose: group.parts for loose in looser if (group := _parted(parts, between, loose))}
    for each in (parts, *groups.values()):
        points = [point for part in each if (point := _point(part))]
        if len(points) == len(each) and len({point.parts[0] for point in points}) == 1:
            return Formula("list", tuple(points), ",")
    if ";" in groups and "," in between:
        return Formula("list", tuple(Formula("bracket", _parts_of_list(part), "()") for part in groups[";"]), ",")
    if parts[-1].kind == "congruence" and (residues := _residues(parts)):
        return Formula("list", residues, ",")
    explicit = set(between) - {",", ";"}
    conditions = [part.parts[0] for part in parts if part.kind == "relation" and part.value != ("=",)]
    if explicit == {"and"} and len(set(conditions)) == len(parts):  # of several symbols
        explicit = set()
    return Formula("list", tuple(parts), explicit.pop() if len(explicit) == 1 else "mixed" if explicit else ",")


def _parted(parts: list[Formula], between: list[str], loose: str) -> Formula | None:
    """Returns what is between the loosest separators."""
    places = [0, *(at + 1 for at, one in enumerate(between) if one == loose), len(parts)]
    if len(places) == 2:
        return Formula("logic", tuple(parts), between[0]) if len(set(between)) == 1 else None
    groups = [
        parts[low] if high - low == 1 else Formula("logic", tuple(parts[low:high]), between[low])
        for low, high in itertools.pairwise(places)
    ]
    return Formula("logic", tuple(groups), loose)


def _point(group: Formula) -> Formula | None:
    """Returns (x, y) = (1, 2) for x = 1, y = 2, also from x = y = 1; None for what is no such group."""
    pairs = []
    for part in group.parts if group.kind in ("logic", "bracket", "cases") else (group,):
        if part.kind != "relation" or set(part.value) != {"="} or any(side.kind != "name" for side in part.parts[:-1]):
            return None
        pairs += [(name, part.parts[-1]) for name in part.parts[:-1]]
    if len(pairs) == 1:
        return None
    names, values = zip(*sorted(pairs, key=lambda pair: str(pair[0].value)), strict=True)
    return Formula("relation", (Formula("bracket", names, "()"), Formula("bracket", values, "()")), ("=",))


def _residues(parts: list[Formula]) -> tuple[Formula, ...] | None:
    """Returns a congruence for each of n ≡ 0, 1 (mod 4), also with n or the modulus at each; None for other lists."""
    modulus, found = parts[-1].parts[-1], list[Formula]()
    for part in parts:
        if part.kind == "congruence" and part.parts[-1] != modulus:
            return None
        sides = part.parts[:-1] if part.kind == "congruence" else part.parts if part.kind == "relation" else (part,)
        name = sides[0] if len(sides) == 2 else found[0].parts[0] if found and len(found[0].parts) == 3 else None
        if len(sides) not in (1, 2) or (part.kind == "relation" and part.value != ("≡",)):
            return None
        found.append(Formula("congruence", (*((name,) if name else ()), sides[-1], modulus), ("≡",) if name else ()))
    return tuple(found)


def _number(text: str) -> Formula:
    known = numeral(text)
    if known is None:
        raise NotRead(f"{text} is no number")
    return Formula("number", value=known.value)


def negated(node: Formula) -> Formula:
    """Returns a formula with the other sign."""
    if node.kind == "number":
        return Formula("number", value=-node.value)
    return node.parts[0] if node.kind == "negative" else Formula("negative", (node,))


def chosen(node: Formula, positive: str) -> Formula:
    """Returns a formula with one sign for each ± or ∓, + for the one that is `positive`."""
    parts = tuple(chosen(part, positive) for part in node.parts)
    if node.kind == "either":
        return parts[0] if node.value == positive else negated(parts[0])
    return Formula(node.kind, parts, node.value)


def _either(node: Formula, token: Token) -> Formula:
    if node.value == "()" and not any(inner.kind == "bracket" for part in node.parts for inner in part.all()):
        return Formula("bracket", (node, Formula("bracket", tuple(map(negated, node.parts)), "()")), "{}")
    return Formula("either", (node,), token.kind)


def _product(factors: list[Formula]) -> Formula:
    return factors[0] if len(factors) == 1 else Formula("product", tuple(factors))


def _plain(node: Formula) -> bool:
    return node.kind == "number" or (node.kind == "negative" and _plain(node.parts[0]))


def _marked(node: Formula, mark: str) -> Formula:
    return (
        Formula("name", value=f"{node.value}{mark}")
        if node.kind == "name"
        else Formula("call", (node,), f"mark {mark}")
    )


def _is_function(node: Formula) -> bool:
    """Whether brackets behind f, f' or f^{-1} hold an argument."""
    node = node.parts[0] if node.kind == "power" else node
    return node.kind == "name" and str(node.value)[0] in "fghFGH" and "_" not in str(node.value)


def _text_of(node: Formula) -> str:
    """Returns a text that tells subscripts apart."""
    own = str(node.value) if node.value != "" else node.kind
    return own if not node.parts else f"{own}({','.join(map(_text_of, node.parts))})"


def _parts_of_list(node: Formula) -> tuple[Formula, ...]:
    return node.parts if node.kind in ("list", "logic") else (node,)


def _derivative_or_quotient(top: Formula, bottom: Formula) -> Formula:
    """Tells \\frac{dy}{dx} and \\frac{d}{dx} from fractions."""
    if all(_first_symbol(part) in ("d", "partial") for part in (top, bottom)) and bottom.kind == "product":
        return Formula("derivative", (top, bottom))
    return Formula("quotient", (top, bottom))


def _first_symbol(node: Formula) -> str:
    while node.kind in ("product", "power"):
        node = node.parts[0]
    return str(node.value) if node.kind in ("name", "command") else ""
