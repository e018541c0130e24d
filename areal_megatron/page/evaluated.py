"""The answers to the same prompts at each evaluation of a run, for its page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areal_megatron.config import ConfigError
from areal_megatron.observe.shown_answers import evenly, read_answers
from areal_megatron.run.folder import RunFolder

_MOST = 40
"""Most evaluations that are shown."""


class Evaluated:
    """The answers of the evaluations that count, as they come; each file is read once."""

    def __init__(self, run: RunFolder):
        self._run = run
        self._read: dict[tuple[int, float], list[dict[str, Any]]] = {}
        self.shown: list[dict[str, Any]] = []
        """{version, accuracy, rows} by version."""
        self.revision = 0
        """Changes whenever `shown` does."""
        self.problem = ""
        """What is wrong with the first file that could not be read."""

    def update(self, evaluations: Sequence[dict[str, Any]]) -> None:
        """Reads what is new. `evaluations`: their lines in metrics.jsonl. Raises OSError."""
        newest = {line["version"]: line for line in evaluations}
        lines = evenly([newest[version] for version in sorted(newest)], _MOST)
        keys = [(line["version"], line["time"]) for line in lines]
        if keys == list(self._read):
            return
        self._read = {key: self._read[key] if key in self._read else self._rows(key[0]) for key in keys}
        rows = zip(lines, self._read.values(), strict=True)
        self.shown = [
            {"version": line["version"], "accuracy": line.get("accuracy"), "rows": own} for line, own in rows if own
        ]
        self.revision += 1

    def _rows(self, version: int) -> list[dict[str, Any]]:
        try:
            answers = read_answers(self._run, version)
        except ConfigError as e:
            self.problem = self.problem or str(e)
            return []
        return [{"cells": answer.row, "correct": answer.correct, "truncated": answer.truncated} for answer in answers]
