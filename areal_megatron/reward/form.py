"""The form of a formula, apart from its value: what it leaves to be worked out, and how long it is.

What a formula leaves to be worked out are its steps: a sum of two numbers, a power of a number, an integral, a
logarithm.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import gcd, prod

from areal_megatron.reward.formula import Formula
from areal_megatron.reward.numeral import words
from areal_megatron.reward.value import is_constant

Key = tuple
"""What two ways to write the same form have in common: order of terms and factors, \\frac or /, decimals, brackets."""

_FAMILIES: dict[str, str] = dict.fromkeys(("ln", "log", "lg"), "a logarithm")
_FAMILIES |= dict.fromkeys(words("sin cos tan sec csc cot cis"), "a trigonometric function")
_FAMILIES |= dict.fromkeys(words("arcsin arccos arctan"), "an inverse trigonometric function")
_FAMILIES |= dict.fromkeys(words("sinh cosh tanh"), "a hyperbolic function")
_NO_STEPS = words("percent degree mark")
_MOST_TERMS = 200
_LARGEST_BASE = 100
_COMPOUND = words("sum product quotient power root negative call relation sets congruence either")


def key_of(node: Formula) -> Key:
    """Returns a key shared by all formulas that differ only in notation."""
    kind, parts = node.kind, node.parts
    if kind == "number":
        return ("number", node.value)
    if kind in ("product", "quotient", "negative"):
        return _product_key(node)
    keys = [key_of(part) for part in parts]
    if kind == "sum":
        terms = [term for key in keys for term in (key[1] if key[0] == "sum" else (key,))]
        return ("sum", tuple(terms if ("dots",) in terms else sorted(terms, key=repr)))
    if kind == "power":
        return _power(*keys)
    if kind == "root":
        return _power(keys[0], ("number", 1 / keys[1][1]) if keys[1][0] == "number" and keys[1][1] else ("/", keys[1]))
    if kind == "list" and node.value in ("and", "or") and (any(map(_is_condition, parts)) or is_choice(node)):
        return ("list", node.value, *sorted(keys, key=repr))
    if kind == "list" or (kind == "bracket" and node.value == "{}"):
        return ("set", *(keys if ("dots",) in keys else sorted(keys, key=repr)))
    if kind == "relation" and len(parts) == 2:
        return _relation_key(str(node.value[0]), *keys)
    return (kind, node.value, *keys) if keys or node.value != "" else (kind,)


def is_choice(node: Formula) -> bool:
    """Whether a list says that one of several symbols has a value: x = 1 or y = 2."""
    names = {part.parts[0] for part in node.parts if part.kind == "relation" and part.value == ("=",)}
    return node.kind == "list" and node.value == "or" and len(names) > 1


def _is_condition(node: Formula) -> bool:
    """Whether it matters if one of several or all of them hold."""
    return node.kind in ("phrase", "word", "list", "congruence") or (node.kind == "relation" and node.value != ("=",))


def _relation_key(relation: str, left: Key, right: Key) -> Key:
    if relation in (">", "≥"):
        relation, left, right = {">": "<", "≥": "≤"}[relation], right, left
    return ("relation", relation, *(sorted((left, right), key=repr) if relation in ("=", "≠") else (left, right)))


def _product_key(node: Formula) -> Key:
    number, factors = Fraction(1), []
    rest = [(node, 1)]
    ordered = any(part.kind in ("dots", "bracket", "matrix") for part in node.parts)
    while rest:
        part, sign = rest.pop(0)
        if part.kind == "negative":
            number = -number
            rest.insert(0, (part.parts[0], sign))
        elif part.kind == "product":
            rest[:0] = [(inner, sign) for inner in part.parts]
        elif part.kind == "quotient":
            rest[:0] = [(part.parts[0], sign), (part.parts[1], -sign)]
        elif part.kind == "number" and (sign > 0 or part.value):
            number *= part.value if sign > 0 else 1 / part.value
        else:
            key = key_of(part)
            factors.append(key if sign > 0 else _power(key, ("number", Fraction(-1))))
    if not factors:
        return ("number", number)
    if number != 1:
        factors.append(("number", number))
    return factors[0] if len(factors) == 1 else ("product", tuple(factors if ordered else sorted(factors, key=repr)))


def _power(base: Key, exponent: Key) -> Key:
    if exponent == ("number", 1):
        return base
    if base[0] == "^" and exponent == ("number", -1) and base[2][0] == "number":
        return _power(base[1], ("number", -base[2][1]))
    return ("^", base, exponent)


def has_operation(node: Formula) -> bool:
    """Whether a formula is more than a number, a name or a list of them."""
    return any(part.kind in _COMPOUND and not _is_number(part) for part in node.all())


def leaves(node: Formula) -> int:
    """Returns how many numbers and names a formula is made of."""
    return sum(not part.parts for part in node.all())


def steps(node: Formula) -> set[str]:
    """Returns what is left to be worked out."""
    return {step for part in node.all() for step in _steps_of(part)}


def _steps_of(node: Formula) -> Iterator[str]:
    kind, parts = node.kind, node.parts
    if kind in ("sum", "product", "quotient", "power") and any(part.kind in ("matrix", "bracket") for part in parts):
        yield "an operation"
    if kind == "sum":
        terms = list(_terms(node))
        if sum(map(_is_number, terms)) > 1:
            yield "a sum of numbers"
        monomials = [_monomial(key_of(term)) for term in terms if not _is_number(term)]
        if len(set(monomials)) < len(monomials):
            yield "a sum of like terms"
    elif kind == "product":
        factors = list(_factors(node))
        if sum(_is_number(factor) and abs(_number(factor)) != 1 for factor in factors) > 1:
            yield "a product of numbers"
        elif _cancels(factors):
            yield "a fraction that is not in lowest terms"
        if any(_is_number(factor) and not _number(factor) for factor in factors):
            yield "a product with 0"
        bases = [_base(factor) for factor in factors if is_constant(factor) and not _is_number(factor)]
        if len(set(bases)) < len(bases):
            yield "a product of roots or powers"
        if sum(factor.kind == "sum" and is_constant(factor) for factor in factors) > 1:
            yield "a product of sums"
    elif kind == "quotient":
        yield from _steps_of_quotient(*parts)
    elif kind == "power":
        yield from _steps_of_power(*parts)
        if any(part.kind == "power" for part in parts[1].all()):
            yield "a power in an exponent"
    elif kind == "root":
        yield "a root"
        if parts[0].kind == "number" and _has_root(parts[0].value, parts[1]):
            yield "a root of a power"
    elif kind == "call":
        name = str(node.value)
        if name in ("factorial", "binom"):
            yield f"a {name} of {'a number' if is_constant(parts[0]) else 'a symbol'} {key_of(parts[0])}"
        elif name.split()[0] not in _NO_STEPS:
            yield _FAMILIES.get(name, name)
            if name in ("ln", "log", "lg") and _is_known_logarithm(name, *parts):
                yield "a logarithm of a power of its base"
    elif kind == "sets":
        yield "a union" if node.value == "∪" else "an operation"
    elif kind == "derivative":
        yield "Derivative"
    elif kind in ("command", "cases"):
        yield str(node.value or "a distinction of cases")


def _base(factor: Formula) -> Key:
    """Returns what two factors share that can be put together: the base of a power, the degree of a number's root."""
    if factor.kind == "root" and _is_number(factor.parts[0]):
        return key_of(factor.parts[1])
    key = key_of(factor)
    return key[1] if key[0] == "^" else key


def _cancels(factors: list[Formula]) -> bool:
    """Whether a number above and one below, in different factors, have a divisor in common: 90 · π/180."""
    above, below = [], []
    for factor in factors:
        top, bottom = factor.parts if factor.kind == "quotient" else (factor, Formula("number", value=Fraction(1)))
        value = _coefficient(top) / (_coefficient(bottom) or 1)
        above.append(value.numerator)
        below.append(value.denominator)
    return gcd(prod(above), prod(below)) != 1


def _symbols_of(term: Formula) -> set[Key]:
    """Returns the symbols of which a term holds a power with a positive exponent."""
    return {base for base, exponent in _monomial(key_of(term)) if base[0] == "name" and exponent > 0}


def _steps_of_quotient(top: Formula, bottom: Formula) -> Iterator[str]:
    terms = [term for part in (top, bottom) for term in (_terms(part) if part.kind == "sum" else (part,))]
    if set.intersection(*map(_symbols_of, terms)):
        yield "a fraction that is not in lowest terms"
    if is_constant(bottom) and any(part.kind == "sum" for part in bottom.all()):
        yield "a fraction of a sum"
    divisor = _coefficient(bottom)
    if _is_number(top) and _is_number(bottom):
        value = _number(top) / divisor if divisor else None
        if value is None or not value.denominator == abs(divisor) != 1:
            yield "a fraction that is not in lowest terms"
    elif divisor.denominator == _coefficient(top).denominator == 1 != gcd(content(top), int(divisor)):
        yield "a fraction that is not in lowest terms"


def _steps_of_power(base: Formula, exponent: Formula) -> Iterator[str]:
    exact = _number(exponent) if _is_number(exponent) else None
    if exact is not None and exact.denominator == 1 and any(map(_has_whole_exponent, _factors_of(base))):
        yield "a power of a power"
    if exact is not None and exact.denominator == 1 and abs(_coefficient(base)) != 1 and not _is_number(base):
        yield "a power of a product"
    if exact is not None and exact.denominator != 1:
        yield "a root"
        if _is_number(base) and _has_root(_number(base), Formula("number", value=Fraction(exact.denominator))):
            yield "a root of a power"
    elif (
        is_constant(base) and is_constant(exponent) and not (base.kind == "name" and base.value != "i") and exact != -1
    ):
        yield "a power of a number"
    elif exact == -1 and is_constant(base) and any(part.kind == "sum" for part in base.all()):
        yield "a fraction of a sum"


def _is_known_logarithm(name: str, argument: Formula, base: Formula | None = None) -> bool:
    """Whether a logarithm is a whole number, as \\log_2 8 or \\ln e."""
    base = base or (Formula("name", value="e") if name == "ln" else Formula("number", value=Fraction(10)))
    if argument == base or (argument.kind == "power" and argument.parts[0] == base):
        return True
    if not (argument.kind == base.kind == "number" and argument.value > 0 and base.value > 1):
        return False
    value, exponent = argument.value, 0
    while value != 1 and exponent < 400:
        value, exponent = (value / base.value if argument.value > 1 else value * base.value), exponent + 1
        if (value < 1) == (argument.value > 1) and value != 1:
            return False
    return value == 1


def content(node: Formula) -> int:
    """Returns the greatest whole number that divides all terms of a formula; 1 if one of them has a fraction."""
    numbers = [_coefficient(term) * _taken_out(term) for term in (_terms(node) if node.kind == "sum" else (node,))]
    if any(number.denominator != 1 for number in numbers):
        return 1
    return gcd(*(number.numerator for number in numbers))


def _has_root(value: Fraction, degree: Formula) -> bool:
    if degree.kind != "number" or degree.value.denominator != 1 or degree.value < 1:
        return False
    n = int(degree.value)
    return all(
        round(abs(part) ** (1 / n)) ** n == abs(part)
        for part in (value.numerator, value.denominator)
        if abs(part) < 1 << 50
    )


def _terms(node: Formula) -> Iterator[Formula]:
    for term in node.parts:
        inner = term.parts[0] if term.kind in ("negative", "either") else term
        yield from _terms(inner) if inner.kind == "sum" else [inner]


def _factors(product: Formula) -> Iterator[Formula]:
    for factor in product.parts:
        if factor.kind == "negative":
            factor = factor.parts[0]
        yield from _factors(factor) if factor.kind == "product" else [factor]


def _is_number(node: Formula) -> bool:
    """Whether a formula is a number or a fraction of numbers."""
    if node.kind == "negative":
        node = node.parts[0]
    return node.kind == "number" or (
        node.kind == "quotient" and all(part.kind == "number" for part in node.parts) and node.parts[1].value != 0
    )


def _number(node: Formula) -> Fraction:
    if node.kind == "negative":
        return -_number(node.parts[0])
    return node.value if node.kind == "number" else node.parts[0].value / node.parts[1].value


def _factors_of(node: Formula) -> Iterator[Formula]:
    return _factors(node if node.kind == "product" else Formula("product", (node,)))


def _has_whole_exponent(node: Formula) -> bool:
    return node.kind == "power" and node.parts[1].kind == "number" and node.parts[1].value.denominator == 1


def _coefficient(node: Formula) -> Fraction:
    """Returns the product of the numbers among the factors."""
    found = Fraction(1)
    for factor in _factors_of(node):
        if _is_number(factor):
            found *= _number(factor)
    return found


def shape(node: Formula) -> str:
    """Returns whether a formula is a sum, a product (also a quotient or a power of one) or neither."""
    while node.kind == "negative":
        node = node.parts[0]
    if node.kind == "power" and node.parts[0].kind in ("sum", "product") and _is_number(node.parts[1]):
        return "product"
    if node.kind == "product" and not any(
        factor.kind in ("sum", "power") and _within(factor) for factor in _factors(node)
    ):
        return "term"
    return {"sum": "sum", "product": "product", "quotient": "quotient"}.get(node.kind, "term")


def _within(factor: Formula) -> bool:
    return factor.kind == "sum" or factor.parts[0].kind == "sum"


def is_expanded(node: Formula) -> bool:
    """Whether a formula is a sum of terms without sums in them, no two of which could be put together."""
    terms = node.parts if node.kind == "sum" else (node,)
    seen = set()
    for term in terms:
        while term.kind == "negative":
            term = term.parts[0]
        if any(part.kind in ("sum", "quotient") and not _is_number(part) for part in term.all() if not _divided(part)):
            return False
        key = key_of(term)
        monomial = _monomial(key)
        if monomial in seen:
            return False
        seen.add(monomial)
    return True


def combines(node: Formula) -> bool:
    """Whether a formula holds a sum in which terms with the same symbols could be put together, once it is multiplied
    out, a product in which powers of a symbol could be, or a root of a multiple of a square."""
    for part in node.all():
        if part.kind == "product":
            powers = [power for factor in _factors(part) for power in _monomial(key_of(factor))]
            together = [base for base, _ in powers]
            if any(exponent != 1 and together.count(base) > 1 for base, exponent in powers):
                return True
        if part.kind == "root" and _taken_out(part) > 1:
            return True
        if part.kind == "sum":
            monomials = [each for term in _terms(part) for each in _multiplied_out(term) if each]
            if len(set(monomials)) < len(monomials):
                return True
    return False


def _taken_out(term: Formula) -> int:
    """Returns the small numbers of which roots of whole numbers among the factors are multiples: 2 of √8."""
    found = 1
    for root in _factors_of(term):
        if root.kind == "root" and all(part.kind == "number" for part in root.parts):
            value, degree = abs(root.parts[0].value.numerator), root.parts[1].value
            if value and degree.denominator == 1 < degree < 100:
                found *= max(base for base in range(1, _LARGEST_BASE) if value % base ** int(degree) == 0)
    return found


def _multiplied_out(term: Formula) -> list[tuple]:
    """Returns the powers in each term of a product of sums."""
    found: list[dict[Key, Fraction]] = [{}]
    for factor in _factors_of(term):
        terms = list(_terms(factor)) if factor.kind == "sum" else [factor]
        if len(found) * len(terms) > _MOST_TERMS:
            return []
        found = [_together(powers, _monomial(key_of(term))) for powers in found for term in terms]
    return [tuple(sorted(powers.items(), key=repr)) for powers in found]


def _together(powers: dict[Key, Fraction], others: tuple) -> dict[Key, Fraction]:
    joined = dict(powers)
    for base, exponent in others:
        joined[base] = joined.get(base, Fraction(0)) + exponent
    return joined


def _divided(part: Formula) -> bool:
    """Whether a fraction has a number below, as in \\frac{3x}{2}."""
    return part.kind == "quotient" and _is_number(part.parts[1]) and not any(p.kind == "sum" for p in part.all())


def _monomial(key: Key) -> tuple:
    """Returns the powers of a term, each base once, without its number."""
    factors = key[1] if key[0] == "product" else (key,)
    powers: dict[Key, Fraction] = {}
    for factor in factors:
        if factor[0] == "number":
            continue
        base, exponent = (factor[1], factor[2][1]) if factor[0] == "^" and factor[2][0] == "number" else (factor, 1)
        powers[base] = powers.get(base, Fraction(0)) + exponent
    return tuple(sorted(powers.items(), key=repr))
