"""What a question holds and asks for, so that an answer copied from it is not taken for a worked-out one."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator

from areal_megatron.reward.form import Key, has_operation, key_of
from areal_megatron.reward.formula import Formula, read
from areal_megatron.reward.notation import FORMULA, LONGEST_PROMPT
from areal_megatron.reward.numeral import bare, words
from areal_megatron.reward.tokens import NotRead

_MOST_FORMULAS = 200
_LONGEST_FORMULA = 300

_REWRITING = re.compile(
    r"\b(?:(?:rational|fractional|positive|negative)\s+exponents?|(?:exponential|radical)\s+form|interval\s+notation|inequality)",
    re.IGNORECASE,
)
_SCALED_MATRIX = re.compile(r"[0-9}] ?(?:[(\[]? ?\\begin ?\{[a-zB]*matrix|\([^()]*,)")
"""A fraction before a matrix."""
_PLAIN_WORD = re.compile(r"[A-Za-z'’-]{2,}[.,:;?!]*|[aAI]")
_FUNCTIONS = words("sin cos tan ln log exp sqrt pi")
_NOUN = r"(?<!\ba )(?<!the )(?<!scale )(?<!common )(?<!growth )(?<!what )(?<!this )"
_OPERATIONS = {
    "product": re.compile(rf"{_NOUN}\bfactori[sz]e|{_NOUN}\bfactor(?:ed)?\b(?! of\b)|factored form|as a product", re.I),
    "sum": re.compile(
        r"\bexpand|\bmultiply out|\bdistribute\b|expanded form|standard form|partial fraction|complet\w+ the square"
        r"|vertex form|as a polynomial",
        re.I,
    ),
    "quotient": re.compile(r"as a single fraction|common denominator|as one fraction", re.I),
    "nothing to combine": re.compile(
        r"\bsimplif|\bcombine|as a single fraction|common denominator|as one fraction", re.I
    ),
    "no root below": re.compile(r"\brationali[sz]e", re.I),
}


def asked_for(prompt: str) -> set[str]:
    """Returns the forms that a question asks for: product, sum, quotient, nothing to combine, no root below."""
    prompt = prompt[-LONGEST_PROMPT:]
    return {shape for shape, phrase in _OPERATIONS.items() if phrase.search(prompt)}


def has_name(prompt: str, name: str) -> bool:
    """Whether a formula of a question has a symbol of one letter."""
    texts = (text for text in itertools.islice(FORMULA.finditer(prompt[-LONGEST_PROMPT:]), _MOST_FORMULAS))
    return any(re.search(rf"(?<![A-Za-z\\]){name}(?![A-Za-z])", text[0]) for text in texts)


def repeats(prompt: str, text: str, node: Formula | None) -> bool:
    """Whether a question holds a formula, as it is written or with its terms in another order."""
    if node is not None and not has_operation(node):
        return rewrites(prompt, text)
    return is_written(prompt, text) or (node is not None and key_of(node) in formulas_in(prompt[-LONGEST_PROMPT:]))


def rewrites(prompt: str, text: str) -> bool:
    """Whether a question holds a text and asks to write it in another form that has no other value or key."""
    asked = _SCALED_MATRIX.search(text) or _REWRITING.search(prompt[-LONGEST_PROMPT:])
    return bool(asked) and is_written(prompt, text)


def is_written(prompt: str, text: str) -> bool:
    """Whether a text stands in a question by itself."""
    compact, _ = _compact(text)
    return len(compact) > 2 and _holds(*_compact_prompt(prompt[-LONGEST_PROMPT:]), compact)


def _holds(prompt: str, gaps: frozenset[int], text: str) -> bool:
    """Whether a text stands in a prompt by itself, and not as a part of a longer formula."""
    at = prompt.find(text)
    for _ in range(_MOST_FORMULAS):
        if at < 0:
            break
        end = at + len(text)
        begins = at in gaps or not re.match(r"[\w.^/*+-]", prompt[at - 1 : at])
        if begins and (end in gaps or not re.match(r"[\w^(/*+-]|\.[0-9]", prompt[end : end + 2])):
            return True
        at = prompt.find(text, at + 1)
    return False


def _compact(text: str) -> tuple[str, frozenset[int]]:
    """Returns a text without spaces, braces, signs of formulas and commands that change nothing, and where there was
    one of them."""
    text = re.sub(r"\\(?:left|right|displaystyle|cdot|times|[,;:!()\[\]])(?![A-Za-z])|[$*{}\s]+", " ", text)
    pieces = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text).split()
    return "".join(pieces), frozenset(itertools.accumulate(map(len, pieces)))


_compact_prompt = functools.lru_cache(maxsize=4)(_compact)


@functools.lru_cache(maxsize=16)
def formulas_in(prompt: str) -> frozenset[Key]:
    """Returns the keys of all formulas in a prompt, and of all within them, that are more than a number or a name."""
    found = set()
    for number, text in enumerate(_texts(prompt)):
        if number >= _MOST_FORMULAS:
            break
        try:
            node = read(bare(text))
        except NotRead:
            continue
        found |= {key_of(part) for part in node.all() if has_operation(part)}
    return frozenset(found)


def _texts(prompt: str) -> Iterator[str]:
    """Yields what stands between signs of formulas, then what could be formulas without them."""
    for formula in FORMULA.finditer(prompt):
        yield next(group for group in formula.groups() if group is not None).strip(" .,")
    run: list[str] = []
    for token in [*FORMULA.sub(" the ", prompt).split(), "the"]:
        if _PLAIN_WORD.fullmatch(token) and token.strip(".,:;?!") not in _FUNCTIONS:
            text = " ".join(run).strip(" .,:;?!")
            if 2 < len(text) <= _LONGEST_FORMULA:
                yield text
                yield from (part.strip(".,:;?!") for part in run if len(run) > 1 and len(part) > 2)
            run = []
        else:
            run.append(token)
