"""Prompts and supervised examples from JSONL files, and the order in which prompts are drawn. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_megatron.config import Config, ConfigError
from areal_megatron.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    id: int
    """Line of the file, from 0."""
    text: str
    answer: str
    tokens: list[int]
    response_tokens: int | None
    """Forced length of every answer, for benchmarks; None: the model ends it."""


@dataclass(frozen=True)
class Example:
    """A supervised example; the tokens after the prompt are trained."""

    tokens: np.ndarray
    """int32, prompt and response with its end token"""
    prompt_length: int


def read_prompts(config: Config, key: str, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts of data.train or data.eval, as `key` says, those beyond data.max_prompt_tokens among them.

    A line is {"prompt": text, "answer": text, number or object, "response_tokens": optional forced length}; an
    object, as tests of programs are, becomes its JSON text. Raises ConfigError that names file and line for an
    unreadable or empty file, a line that is no JSON object, a missing field, a wrong type, a forced length above
    rollout.max_new_tokens, or if no prompt fits.
    """
    path, limit, max_new_tokens = (
        getattr(config.data, key),
        config.data.max_prompt_tokens,
        config.rollout.max_new_tokens,
    )
    rows = []
    for line, where, row in _rows(path):
        answer = _field(row, "answer", (str, int, float, dict), where)
        answer = json.dumps(answer) if isinstance(answer, dict) else str(answer)
        length = row.get("response_tokens")
        if length is not None and (type(length) is not int or not 0 < length <= max_new_tokens):
            raise ConfigError(f"{where}: response_tokens is {length!r}, expected a whole number from 1 to "
                              f"rollout.max_new_tokens={max_new_tokens}")  # fmt: skip
        rows.append((line, _field(row, "prompt", (str,), where), answer, length))
    tokens = tokenizer.prompts([text for _, text, _, _ in rows])
    if (shortest := min(map(len, tokens))) > limit:
        raise ConfigError(f"{path}: the shortest prompt has {shortest} tokens, data.max_prompt_tokens is {limit}")
    return [Prompt(line, text, answer, ids, length)
            for (line, text, answer, length), ids in zip(rows, tokens, strict=True)]  # fmt: skip


def read_examples(path: str | Path, tokenizer: Tokenizer) -> list[Example]:
    """One supervised example a line: {"prompt": text, "response": text}. Raises ConfigError as `read_prompts`."""
    rows = [(_field(row, "prompt", (str,), where), _field(row, "response", (str,), where))
            for _, where, row in _rows(path)]  # fmt: skip
    prompts = tokenizer.prompts([prompt for prompt, _ in rows])
    responses = tokenizer.responses([response for _, response in rows])
    return [Example(np.array([*prompt, *response], np.int32), len(prompt))
            for prompt, response in zip(prompts, responses, strict=True)]  # fmt: skip


def prompt_ids(path: str | Path) -> list[int]:
    """Of every prompt of the file, in its order. Raises ConfigError as `read_prompts`."""
    return [line for line, _, _ in _rows(path)]


def check_data(config: Config) -> None:
    """Reads every file of `config.data` once. Raises ConfigError for the first thing that a run would trip over."""
    tokenizer = Tokenizer(config.model.path)
    if config.mode == "sft":
        read_examples(config.data.train, tokenizer)
        return
    read_prompts(config, "train", tokenizer)
    if config.data.eval:
        read_prompts(config, "eval", tokenizer)


class Cursor:
    """Every position of a dataset of `size` once an epoch, each epoch in an order of its own; endless."""

    def __init__(self, size: int, seed: int, at: tuple[int, int] = (0, 0)):
        self._size, self._seed = size, seed
        self._epoch, self._next = at
        self._order = self._shuffled()

    @property
    def at(self) -> tuple[int, int]:
        """Epoch, and positions of it that have been drawn: a cursor begun there goes on as this one."""
        return self._epoch, self._next

    def next(self) -> tuple[int, int]:
        """(epoch, position in the dataset)."""
        if self._next == self._size:
            self._epoch, self._next = self._epoch + 1, 0
            self._order = self._shuffled()
        position = int(self._order[self._next])
        self._next += 1
        return self._epoch, position

    def _shuffled(self) -> np.ndarray:
        return np.random.default_rng([self._seed, self._epoch]).permutation(self._size)


def _rows(path: str | Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(line from 0, `file:line` from 1, object) of each line that is not blank."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as e:
        raise ConfigError(f"{path}: cannot read the dataset: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: the dataset is not UTF-8: {e.reason} at byte {e.start}") from None
    found = False
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        where = f"{path}:{number + 1}"
        try:
            row = json.loads(line)
        except ValueError as e:
            raise ConfigError(f"{where}: not JSON: {e}") from None
        if not isinstance(row, dict):
            raise ConfigError(f'{where}: expected an object like {{"prompt": …}}, found {type(row).__name__}')
        found = True
        yield number, where, row
    if not found:
        raise ConfigError(f"{path}: the dataset is empty; it needs one JSON object a line")


def _field(row: dict[str, Any], name: str, kinds: tuple[type, ...], where: str) -> Any:
    if name not in row:
        raise ConfigError(f"{where}: field {name!r} is missing, found {', '.join(map(repr, row)) or 'no field'}")
    value = row[name]
    if type(value) not in kinds:
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"{where}: field {name!r} is {type(value).__name__}, expected {expected}")
    if value == "":
        raise ConfigError(f"{where}: field {name!r} is empty")
    return value
