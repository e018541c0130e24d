"""Answers to the same few prompts of data.eval at each evaluation of a run, for a reader to see them get better.

The evaluation of version 10 has its answers in evaluations/00010.json of the run folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from areal_megatron.config import ConfigError
from areal_megatron.observe.background import FLUSH_S, LatestFile
from areal_megatron.observe.metrics import MetricsWriter, Number
from areal_megatron.process.files import numbered, write_atomically
from areal_megatron.process.shown import visible
from areal_megatron.run.folder import RunFolder
from areal_megatron.run.json_input import read_record

SHOWN = 8
"""Prompts of which answers are kept."""
LONGEST = 1000
"""Characters of a text that are kept: of a longer one, its beginning and its end."""
TABLE = "eval/answers"
"""The name of the table in TensorBoard and in trackers."""
HEAD = ("prompt", "right answer", "answer", "score")
_Item = TypeVar("_Item")


class ShownAnswer(msgspec.Struct, kw_only=True):
    """The first answer to a prompt, and how it was scored; the texts as they are shown to people."""

    prompt: str
    answer: str
    """The right one."""
    response: str
    score: Number | None
    """None: its reward failed."""
    correct: bool
    truncated: bool

    def __post_init__(self):
        self.prompt, self.answer, self.response = map(_shown, (self.prompt, self.answer, self.response))

    @property
    def row(self) -> list[Any]:
        """The cells below HEAD."""
        return [self.prompt, self.answer, self.response, self.score]


class AnswersWriter:
    """Keeps the answers of evaluations; one process of the run has a writer."""

    def __init__(self, run: RunFolder, metrics: MetricsWriter):
        self._run, self._metrics = run, metrics
        self._file = LatestFile(run.evaluations, self._store)

    def write(self, version: int, answers: Sequence[ShownAnswer]) -> None:
        """Keeps the answers of an evaluation, and shows them in TensorBoard. Returns when they are on the disk, at most
        after background.FLUSH_S. Raises Replaced."""
        self._metrics.table(TABLE, version, HEAD, [answer.row for answer in answers])
        self._file.write((version, answers))
        self._file.flush()

    def close(self, timeout_s: float = FLUSH_S) -> None:
        self._file.close(timeout_s)

    def _store(self, content: tuple[int, Sequence[ShownAnswer]]) -> None:
        version, answers = content
        self._run.look()
        self._run.evaluations.mkdir(mode=0o700, exist_ok=True)
        write_atomically(numbered(self._run.evaluations, version), msgspec.json.encode(answers))


def read_answers(run: RunFolder, version: int) -> list[ShownAnswer]:
    """Returns the answers of an evaluation; [] if none were kept. Raises OSError, and ConfigError if damaged."""
    path = numbered(run.evaluations, version)
    try:
        return read_record(path.read_bytes(), list[ShownAnswer], path)[:SHOWN]
    except FileNotFoundError:
        return []
    except ConfigError as e:
        raise ConfigError(f"{e}; without it the page has no answers of version {version}, remove it") from None


def evenly(items: Sequence[_Item], most: int) -> list[_Item]:
    """Returns `most` of the items, or all if there are fewer: the first, the last, and others at equal distances."""
    last = len(items) - 1
    return [items[round(k * last / (most - 1))] for k in range(most)] if last >= most else list(items)


def _shown(text: str) -> str:
    return _shortened(visible(_shortened(text)))


def _shortened(text: str) -> str:
    gap = " […] "
    half = (LONGEST - len(gap)) // 2
    return text if len(text) <= LONGEST else f"{text[:half]}{gap}{text[-half:]}"
