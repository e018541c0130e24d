"""Scores mathematical answers: compares the last \\boxed{…} of a response, or what it says its answer is, with the
right one.

An answer must be worked out: what a computer algebra system would have to evaluate, such as the question itself, is
refused (docs/graders.md has the rules).
"""

from __future__ import annotations

import re
from contextlib import suppress
from fractions import Fraction

from areal_megatron.data.boxed import BOX, last_boxed
from areal_megatron.reward.no_score import AnswerRefused
from areal_megatron.reward.notation import numbers_in, restates
from areal_megatron.reward.numeral import LONGEST, Numeral, bare, counts_otherwise, in_digits, is_name, numeral
from areal_megatron.reward.quantity import quantity, same_quantity
from areal_megatron.reward.wording import as_clock, halves_of_day, ratio_as_fraction
from areal_megatron.run.json_input import parse_json

_SAYS = re.compile(r"####|<answer>|(?i:answers?+\s*+(?:is|are|:|=))")
_SAID = re.compile(r"[\s:*]*+(?:\$([^$\n]++)\$|\\\(([^\n]*?)\\\)|([^\n]*?)(?:\.?$|\.\s|\s\(|\n|</answer>))")
_LAST_FORMULA = re.compile(r"(?:\$([^$]++)\$|\\\(((?:(?!\\\().)*)\\\)|\\\[((?:(?!\\\[).)*)\\\])[.$\s*]*$", re.DOTALL)
_FORMATTING = " \n*`"
_NUMBER = re.compile(r"[-+]?\$?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?")
_OTHER_NUMBER = re.compile(
    r"[0-9]\S*\s+(?:or|to|and|through|until)\s+(?:maybe\s+|perhaps\s+)?$|[0-9]\S*\s+or\s+(?:\S+\s+){1,4}$|[0-9],\s+$"
    r"|[0-9)}]\s*[-+*/^!–—x×·÷%]+\s*$|[0-9]:$|[_^][{(]?$|(?<![-=])[<>≤≥≠]=?\s*$"
    r"|(?<![A-Za-z])(?:sqrt|root|log|ln|exp|sin|cos|tan|mod|choose)\s*\(?$"
    r"|(?:\b(?i:not|never|neither|nor)|n['’]t)\s+(?:be\s+|equal\s+(?:to\s+)?)?$"
)
"""Before a number: it is one of several, the end of an expression, or denied."""
_LINE = re.compile("[A-Z]{2,4}")
_PERCENT = re.compile("percent|%", re.IGNORECASE)
_TAIL = 2 * LONGEST
"""How many of the last characters of a response are searched for an answer without a box."""


def score(prompt: str, response: str, answer: str) -> float:
    """Returns 1.0 if the final answer of the response equals `answer`, else 0.0.

    If `answer` is a plain number, the response's must be one, too; other formulas are read whole and compared by
    value. An `answer` that is a JSON list of texts holds several right ones. Raises AnswerRefused for an answer that is
    not worked out, such as an expression that `prompt` holds.
    """
    found = final_answer(response)
    if found is None:
        return 0.0
    refusal = None
    for one in right_answers(answer):
        try:
            if _equal(found, one, prompt):
                return 1.0
        except AnswerRefused as e:
            refusal = e
    if refusal:
        raise refusal
    return 0.0


def right_answers(answer: str) -> list[str]:
    """Returns the right answers that a row's `answer` holds: what follows its last ####, or a JSON list's texts."""
    if answer.startswith('["'):
        with suppress(ValueError):
            several = parse_json(answer)
            if all(isinstance(one, str) for one in several):
                return several
    return [answer.rpartition("####")[2]]


def _equal(found: str, answer: str, prompt: str) -> bool:
    halves, others = halves_of_day(found), halves_of_day(answer)
    if halves and others and halves != others:
        return False
    if halves and others:  # 10 a.m. and 10:00 a.m.
        found, answer = as_clock(found), as_clock(answer)
    if (same := same_quantity(found, answer, prompt)) is not None:
        return same
    if numeral(found) or numeral(answer):
        found, answer = ratio_as_fraction(found), ratio_as_fraction(answer)
    if (digits := in_digits(answer)) != bare(answer):  # words are right where the right answer is one
        found, answer = in_digits(found), digits
    known = numeral(answer) if answer.count("=") < 2 else None  # a = b = 1 is more than a number
    if known is None:
        from areal_megatron.reward.expression import same_expression  # mpmath takes a while to import

        return same_expression(found, answer, prompt)
    number = numeral(found)
    if number is None:
        if re.search("[0-9]", found):
            raise AnswerRefused("The final answer must be one plain number.")
        return False
    if not number.simple and bare(found) != bare(answer):
        raise AnswerRefused("The final answer must be worked out: a fraction in lowest terms, or a decimal.")
    if _named_otherwise(found, answer) or (
        counts_otherwise(number, known) and not (quantity(found) and quantity(answer))
    ):
        return False
    right = number.answers(known) or (number.percent and _percent_of(prompt, number) == known.value)
    if right and restates(prompt, number, known):
        raise AnswerRefused("The final answer must be written as the question asks for.")
    return right


def _named_otherwise(found: str, answer: str) -> bool:
    """Whether two answers name two things of one kind, two symbols or two lines, or only one of them an absolute
    value."""
    sides = (bare(text).rpartition("=") for text in (found, answer))
    name, other = (right if left and is_name(right) else left for left, _, right in sides)
    if not (name and other) or name == other:
        return False
    if _LINE.fullmatch(name) and _LINE.fullmatch(other):
        return sorted(name) != sorted(other)
    from areal_megatron.reward.expression import name_differently

    return name_differently(name, other)


def _percent_of(prompt: str, number: Numeral) -> Fraction | None:
    """Returns the 50 of 50% where a question asks for a percentage, but does not itself hold this one; else None."""
    if not _PERCENT.search(prompt):
        return None
    return None if any(other.percent and other.value == number.value for other in numbers_in(prompt)) else number.value


def final_answer(response: str) -> str | None:
    """Returns the contents of the last complete \\boxed{…}; in a response without any box the text after the last
    "answer is" or ####, or a formula or number at its end. None if there is no such answer."""
    boxed = last_boxed(response)
    if boxed is not None or BOX.search(response):  # one that is not complete: the response was cut
        return boxed
    *_, said = [None, *_SAYS.finditer(response)]
    if said and (found := _SAID.match(response[said.end() : said.end() + _TAIL])):
        return next(group for group in found.groups() if group is not None).strip(_FORMATTING)
    tail = response.rstrip(_FORMATTING)[-_TAIL:]
    if found := _LAST_FORMULA.search(tail):
        return next(group for group in found.groups() if group is not None)
    *_, last = [None, *_NUMBER.finditer(tail)]
    if not last or _OTHER_NUMBER.search(tail[: last.start()]) or len(tail[last.end() :].split()) > 2:
        return None
    return tail[last.start() :]
