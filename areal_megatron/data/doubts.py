"""Rows that a run accepts but can hardly learn from: repetitions, contradictions and empty phrases."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from areal_megatron.config import Config, ConfigError
from areal_megatron.data.examples import Example
from areal_megatron.data.pairs import Pair
from areal_megatron.data.prompts import Prompt
from areal_megatron.process.errors import printable

_SHOWN = 3
"""Most rows of a kind that are named, but for repeated ones."""
_NOTHING = {
    *("none", "null", "nil", "nan", "nat", "na", "n/a", "<na>", "#n/a", "unknown", "not available", "not given"),
    *("no answer", "missing", "tbd", "todo", "see solution", "see above", "see below", "omitted", "empty"),
    *("proof", "see proof", "see the proof", "notfound", "not found", "no answer given", "not provided", "answer"),
}
_UNKNOWN = "characters that the tokenizer does not know, which are all the same to the model"
_AROUND = re.compile(r"\\(?:boxed|fbox|text|mathrm|textbf)\b|[{}$\\]|^\W*answer\W*:", re.IGNORECASE)


def doubts(config: Config, key: str, prompts: Sequence[Prompt], unknown: int | None = None) -> list[str]:
    """Returns a line for each kind of doubtful rows of data.train or data.eval (`key`): repeated prompts, prompts with
    several right answers, prompts with the token `unknown`, empty prompts, and empty answers (for the reward `math`;
    other functions may take any). Raises ConfigError if every answer is empty."""
    first: dict[tuple[int, str], Prompt] = {}
    again, against = [], []
    for prompt in prompts:
        place = prompt.environment, " ".join(prompt.text.split())
        before = first.setdefault(place, prompt)
        if before is not prompt:
            same = prompt.answer == before.answer or _value(prompt.answer) == _value(before.answer)
            (again if same else against).append((prompt, before))
    compared = {number for number, own in enumerate(config.by_environment()) if own.reward.function == "math"}
    asked = [prompt for prompt in prompts if prompt.environment in compared]
    empty = [prompt for prompt in asked if says_nothing(prompt.answer)]
    if empty and len(empty) == len(prompts):
        raise ConfigError(
            f"data.{key}: no row has an answer that says anything, such as {printable(repr(empty[0].answer), 60)} of "
            f"{empty[0].where}: nothing can be learnt from it"
        )
    mute = [prompt for prompt in prompts if says_nothing(prompt.text)]
    return [
        *_repeated(key, [(one.where, other.where) for one, other in again], len(prompts), "prompt and answer"),
        *_line(
            key,
            against,
            len(prompts),
            "the prompt of another row, and another answer, so that what is right for one is wrong for the other",
            lambda pair: f"{pair[0].where} ({_cut(pair[0].answer)}) and {pair[1].where} ({_cut(pair[1].answer)})",
        ),
        *_line(key, empty, len(prompts), "no answer", lambda one: f"{_cut(one.answer)} of {one.where}"),
        *_line(key, mute, len(prompts), "a prompt that asks nothing", _asked),
        *_line(key, [prompt for prompt in prompts if unknown in prompt.tokens], len(prompts), _UNKNOWN, _asked),
    ]


def doubts_about_items(key: str, items: Sequence[Example] | Sequence[Pair], unknown: int | None = None) -> list[str]:
    """Returns a line for each kind of doubtful rows of a supervised run: repeated rows, rows with the token `unknown`,
    and pairs that prefer an answer which another pair rejects."""
    first: dict[Any, Example | Pair] = {}
    again, against, unread = [], [], []
    for item in items:
        is_example = isinstance(item, Example)
        answers = [each.tokens for each in item.samples] if is_example else [item.chosen, item.rejected]
        place = tuple(tokens.tobytes() for tokens in answers)
        if unknown is not None and any((tokens == unknown).any() for tokens in answers):
            unread.append(item.where)
        before = first.setdefault(place, item)
        if before is not item:
            again.append((item.where, before.where))
        elif not is_example and (other := first.get(place[::-1])):
            against.append((item.where, other.where))
    what = "the two answers of another row the other way round, so that they teach nothing together"
    return [
        *_repeated(key, again, len(items), "prompt and answers"),
        *_line(key, against, len(items), what, lambda pair: f"{pair[0]} and {pair[1]}"),
        *_line(key, unread, len(items), _UNKNOWN, str),
    ]


def messages_left_out(key: str, items: Sequence[Example] | Sequence[Pair], most: int) -> list[str]:
    """Returns a line if samples of `most` tokens leave trained messages out."""
    cut = [item for item in items if isinstance(item, Example) and item.cut]
    return [
        f"data.{key}: {sum(item.cut for item in cut)} trained messages in {len(cut)} rows are beyond "
        f"sft.max_tokens={most} and left out, such as in {item.where}"
        for item in cut[:1]
    ]


def says_nothing(text: str) -> bool:
    """Whether a text is no more than a word for a missing value, or has no letter, digit or mathematical symbol."""
    bare = " ".join(_AROUND.sub(" ", text).split()).casefold().rstrip(".!")
    says = (one.isalnum() or one in "<>=" or not (one.isascii() or one.isspace()) for one in bare)
    return bare in _NOTHING or not any(says)


def _value(answer: str) -> Any:
    """Returns what answers are compared by: a number by its value."""
    bare = " ".join(answer.split()).casefold()
    try:
        number = Decimal(bare.replace(",", ""))
    except InvalidOperation:
        return bare
    return number if number.is_finite() else bare  # sNaN cannot be compared


def _repeated(key: str, again: Sequence[tuple[str, str]], rows: int, what: str) -> Iterable[str]:
    def shown(pair: tuple[str, str]) -> str:
        return f"{pair[0]}, which is {pair[1]} again"

    return _line(key, again, rows, f"the {what} of an earlier row", shown, most=1)


def _line(key: str, found: Sequence[Any], rows: int, what: str, shown: Any, most: int = _SHOWN) -> Iterable[str]:
    if found:
        named = "; ".join(map(shown, found[:most]))
        yield f"data.{key}: {len(found):,} of {rows:,} rows {'have' if len(found) > 1 else 'has'} {what}: {named}" + (
            "; …" if len(found) > most else ""
        )


def _asked(prompt: Prompt) -> str:
    return f"{_cut(prompt.text)} of {prompt.where}"


def _cut(text: str) -> str:
    return printable(repr(text), 60)
