"""Compares mathematical expressions by math-verify, if they are answers and not computations.

What an expression leaves to be worked out are its steps: a sum of two numbers, a power of a number, an integral, a
logarithm. An answer may leave those that the known answer leaves too, and no others.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import math_verify
from sympy import Add, Basic, MatrixBase, Mul, Pow, Rational, Symbol
from sympy.core.function import AppliedUndef

from areal_megatron.reward.no_score import AnswerRefused
from areal_megatron.reward.numeral import LONGEST_BARE, bare, is_name, numeral, words

_DEEPEST = 12
"""Brackets within brackets."""
_LONGEST_NUMBER = 60
_LARGEST_EXPONENT = 20

_COMMANDS = words(
    "frac sqrt pi cdot times div infty in cup le ge leq geq leqslant geqslant lt gt ne neq pm mp text textbf textrm "
    "textit mathrm mathbf mathit mathbb mathcal mbox begin end circ degree emptyset varnothing mid lor land langle "
    "rangle overline vec hat bar alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda "
    "mu nu xi rho sigma tau upsilon phi varphi chi psi omega Delta Theta Lambda Xi Sigma Phi Psi Omega"
)
"""The commands of LaTeX that any answer may hold; others only if the known answer holds them."""
_COMMAND = re.compile(r"\\([A-Za-z]+)(?: ?\{((?:[bpvBV]|small)?matrix|cases|array|aligned)\})?")
_FUNCTION = re.compile(
    r"(?<![A-Za-z\\])(?:sum|prod|int|integral|lim|limit|det|binom|binomial|gcd|lcm|mod|log|ln|exp|(?:arc|a)?(?:sin|cos|tan)h?"
    r"|sec|csc|cot|max|min|abs|floor|ceil|factorial|diff|integrate|choose|root|cbrt|totient|trace|rank|tr)(?![A-Za-z])"
)
_WRAPPER = re.compile(r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mathit|mbox) ?\{([^{}]*)\}")
_SEPARATOR = re.compile(r"[,;&]|\\\\|\b(?:and|or)\b")
_RELATION = re.compile(r"=|[<>]|\\(?:le|ge|leq|geq|leqslant|geqslant|ne|neq|lt|gt|in)(?![A-Za-z])")
_EXPONENT = re.compile(r"(?:\^|\*\*) ?(?:\{([^{}]*)\}|\(([^()]*)\)|([-+]?[0-9]+))")
_NESTED_EXPONENT = re.compile(r"(?:\^|\*\*) ?[{(][^{}()]*(?:\^|\*\*|[{(])")
_FACTORIAL = re.compile(r"[0-9]+ ?!|[^0-9 ] ?!")

_KINDS = words(
    "Integer Rational Half Zero One NegativeOne Float Symbol Dummy Pi Exp1 ImaginaryUnit Infinity NegativeInfinity "
    "Interval FiniteSet Union EmptySet Tuple Equality Unequality LessThan GreaterThan StrictLessThan StrictGreaterThan "
    "And Or BooleanTrue BooleanFalse Reals Integers Naturals Naturals0 Rationals Complexes UniversalSet Str"
)
"""sympy's classes of what is worked out."""


def same_expression(found: str, answer: str) -> bool:
    """Whether two expressions are equal. Raises AnswerRefused if `found` leaves more to be worked out than `answer`."""
    found, answer = (bare(text).replace("\\varnothing", "\\emptyset") for text in (found[: LONGEST_BARE + 1], answer))
    if _compact(found) == _compact(answer):
        return True
    if len(found) > LONGEST_BARE:
        raise AnswerRefused(f"The final answer must be shorter than {LONGEST_BARE} characters.")
    if _is_text(answer):
        return _letters(found) == _letters(answer)
    names, _, value = found.rpartition("=")
    if is_name(names) and not _RELATION.search(answer):
        found = value
    if problem := _problem(found, answer):
        raise AnswerRefused(f"The final answer must be worked out: {problem}.")
    known, given = _parsed(answer), math_verify.parse(f"\\boxed{{{found}}}", parsing_timeout=None)
    if left := _all_steps(given) - _all_steps(known):
        raise AnswerRefused(f"The final answer must be worked out: {min(left)} is left.")
    return bool(math_verify.verify(known, given, timeout_seconds=None))


def _compact(text: str) -> str:
    return "".join(text.split())


def _is_text(text: str) -> bool:
    """Whether a text is no formula but words, such as \\text{even} or Tuesday."""
    plain, letters = _WRAPPER.sub(r"\1", text), _letters(text)
    return (
        letters.isalpha() and "\\" not in plain and (plain != text or len(letters) > 3) and not _FUNCTION.search(plain)
    )


def _letters(text: str) -> str:
    return re.sub(r"[\s().,:'\"*-]", "", _WRAPPER.sub(r"\1", text)).casefold()


def _problem(found: str, answer: str) -> str:
    """Returns what of an answer's text leaves more to be worked out than that of the known answer; "" if nothing does.

    This also keeps from math-verify what it evaluates at once, and what it takes long for.
    """
    depth = 0
    for bracket in re.finditer(r"[{(\[]|[})\]]", found):
        depth += 1 if bracket[0] in "{([" else -1
        if depth > _DEEPEST:
            return "too many brackets within brackets"
    if re.search(rf"[0-9]{{{_LONGEST_NUMBER + 1}}}", found):
        return f"a number of more than {_LONGEST_NUMBER} digits"
    if _NESTED_EXPONENT.search(found) and not _NESTED_EXPONENT.search(answer):
        return "a power in an exponent"
    largest = max([_LARGEST_EXPONENT, *_exponents(answer)])
    if any(exponent > largest for exponent in _exponents(found)):
        return f"an exponent above {largest}"
    if new := _names(found) - _names(answer) - _COMMANDS:
        return f"{min(new)} is left"
    if not set(_FACTORIAL.findall(found)) <= set(_FACTORIAL.findall(answer)):
        return "a factorial is left"
    if found.count("\\begin") > answer.count("\\begin") or (
        "\\cup" in found and not re.search(r"\\cup|[<>]|\\[lg]e", answer)
    ):
        return "an operation is left"
    known = {_compact(piece) for piece in _pieces(answer)}
    for piece in _pieces(found):
        number = numeral(piece)
        if number and not number.simple and _compact(piece) not in known:
            return "a fraction that is not in lowest terms"
    return "" if _is_solved(found, answer) else "an equation is left"


def _names(text: str) -> set[str]:
    """Returns the names of commands, environments and functions in a text."""
    commands = {name for found in _COMMAND.finditer(text) for name in found.groups() if name}
    matrices = {"pmatrix", "bmatrix", "matrix", "smallmatrix"}
    return (commands | set(_FUNCTION.findall(_WRAPPER.sub(r" \1 ", text)))) - (
        matrices if commands & matrices else set()
    )


def _exponents(text: str) -> Iterator[int]:
    for found in _EXPONENT.finditer(text):
        for number in re.findall(r"[0-9]+", found[0]):
            yield int(number[:9])


def _pieces(text: str) -> Iterator[str]:
    """Yields the elements of a tuple, set, list, interval or matrix, without what stands before `=`."""
    for piece in _SEPARATOR.split(text):
        piece = re.sub(r"\\begin ?\{[a-z]*\}|\\end ?\{[a-z]*\}", "", _RELATION.split(piece)[-1]).strip()
        yield re.sub(r"^(?:[(\[]|\\\{|\s)+|(?:[)\]]|\\\}|\s)+$", "", piece)


def _is_solved(found: str, answer: str) -> bool:
    """Whether all relations of `found` say what a symbol is, unless those of `answer` do not either; and whether one
    of several equal expressions alone is more than a symbol."""
    relations, known = (
        [[side.strip(" ()") for side in _RELATION.split(piece)] for piece in _SEPARATOR.split(text)]
        for text in (_WRAPPER.sub(r" \1 ", found), _WRAPPER.sub(r" \1 ", answer))
    )
    solved = all(any(map(is_name, sides)) for sides in known if len(sides) > 1)
    for sides in relations:
        if len(sides) > 1 and solved and not any(map(is_name, sides)):
            return False
        if len(sides) > 2 and "=" in found and not all(map(is_name, sides[:-1])):
            return False
    return True


@functools.lru_cache(maxsize=64)
def _parsed(answer: str) -> list[Basic | MatrixBase | str]:
    return math_verify.parse(f"${answer}$", parsing_timeout=None)


def _all_steps(parsed: Iterator[Basic | MatrixBase | str]) -> set[str]:
    return {step for expression in parsed if not isinstance(expression, str) for step in _steps(expression)}


def _steps(expression: Basic | MatrixBase) -> Iterator[str]:
    """Yields what is left to be worked out."""
    parts = [expression]
    while parts:
        part = parts.pop()
        parts += part.flat() if isinstance(part, MatrixBase) else part.args
        if isinstance(part, Add):
            if sum(isinstance(term, Rational) for term in part.args) > 1:
                yield "a sum of numbers"
        elif isinstance(part, Mul):
            factors = list(_factors(part))
            if sum(isinstance(factor, Rational) and abs(factor) != 1 for factor in factors) > 1:
                yield "a product of numbers"
            if sum(isinstance(factor, Add) and _is_number(factor) for factor in factors) > 1:
                yield "a product of sums"
        elif isinstance(part, Pow):
            base, exponent = part.args
            if isinstance(exponent, Rational) and not exponent.is_integer:
                yield "a root"
            elif _is_number(base) and exponent != -1 and not (base.is_Atom and not isinstance(base, Rational | Symbol)):
                yield "a power of a number"
            elif isinstance(base, Add) and _is_number(base):
                yield "a fraction of a sum"
        elif not isinstance(part, MatrixBase | AppliedUndef) and type(part).__name__ not in _KINDS:
            yield type(part).__name__


def _factors(product: Mul) -> Iterator[Basic]:
    for factor in product.args:
        yield from _factors(factor) if isinstance(factor, Mul) else [factor]


def _is_number(expression: Basic) -> bool:
    return all(symbol.name == "i" for symbol in expression.free_symbols)
