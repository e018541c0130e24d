"""The metrics of a run by column, for its page."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict, deque
from contextlib import suppress
from typing import Any

import numpy as np

from areal_megatron.config import ConfigError
from areal_megatron.observe.metrics import STEPS, MetricsReader, surviving, trained_before
from areal_megatron.run.folder import RunFolder

MOST_POINTS = 400
"""Most points of a curve that are shown."""
_LATELY = 200
"""Updates that advice may be from."""


class History:
    """The metrics of a run by column, as they come; work that was done again after a resume is dropped."""

    def __init__(self, run: RunFolder):
        self._run, self._reader = run, MetricsReader(run)
        self._before = 0
        self._versions = array("d")
        """Those of the updates."""
        self._columns: dict[str, tuple[array, array]] = {}
        self._counts: dict[str, list[tuple[int, dict[str, float]]]] = {}
        self.evaluations: list[dict[str, Any]] = []
        self.last: dict[str, Any] = {}
        """The newest line of an update."""
        self.lately: deque[dict[str, Any]] = deque(maxlen=_LATELY)
        """The newest lines of updates since the run began, or was resumed, last."""
        self.revision = 0
        """Changes whenever anything else does."""

    def update(self) -> None:
        """Reads what is new. Raises OSError."""
        for record in self._reader.new():
            self.revision += 1
            if record["kind"] == "resume":
                self._forget(record["version"])
                self.lately.clear()
            elif record["kind"] == "eval":
                self.evaluations.append(record)
            elif record["kind"] in STEPS:
                self._add(record)

    @property
    def done(self) -> int:
        """The number of updates."""
        return self._before + len(self._versions)

    @property
    def problem(self) -> str:
        return self._reader.problem

    def _add(self, record: dict[str, Any]) -> None:
        if not self._versions:
            with suppress(ConfigError):  # the run's other programs name a damaged record
                self._before = trained_before(self._run)
        self.last = record
        self._versions.append(record["version"])
        self.lately.append(record)
        for key, value in record.items():
            if isinstance(value, dict):
                self._counts.setdefault(key, []).append((record["version"], value))
            elif isinstance(value, int | float) and key not in ("version", "time"):
                versions, values = self._columns.setdefault(key, (array("d"), array("d")))
                versions.append(record["version"])
                values.append(value)

    def _forget(self, version: int) -> None:
        del self._versions[bisect_right(self._versions, version) :]
        for versions, values in self._columns.values():
            end = bisect_right(versions, version)
            del versions[end:], values[end:]
        for counts in self._counts.values():
            del counts[bisect_right(counts, version, key=lambda entry: entry[0]) :]
        self.evaluations = surviving(self.evaluations, version)

    @property
    def keys(self) -> set[str]:
        return self._columns.keys() | self._counts.keys()

    def curve(self, key: str) -> list[list[float]]:
        """Returns [versions, values] with at most MOST_POINTS points: of more, the least and the greatest of each
        stretch."""
        versions, values = self._columns.get(key, ((), ()))
        x, y = thinned(np.array(versions), np.array(values), MOST_POINTS)
        return [x.tolist(), [float(f"{value:.6g}") for value in y]]

    def values(self, key: str) -> array:
        return self._columns.get(key, (array("d"), array("d")))[1]

    def histogram(self, key: str) -> list[list[float]]:
        """Returns [values, shares] of the counts of all updates together."""
        total: defaultdict[int, float] = defaultdict(float)
        for _, counts in self._counts.get(key, []):
            for value, count in counts.items():
                total[int(value)] += count
        whole = sum(total.values()) or 1
        return [sorted(total), [total[value] / whole for value in sorted(total)]]


def thinned(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most `most` of the points [n], in order: the least and the greatest y of each stretch of x, and both
    ends."""
    if len(x) <= most:
        return x, y
    kept = {0, len(x) - 1}
    for stretch in np.array_split(np.arange(len(x)), most // 2 - 1):
        kept |= {int(stretch[y[stretch].argmin()]), int(stretch[y[stretch].argmax()])}
    order = sorted(kept)
    return x[order], y[order]
