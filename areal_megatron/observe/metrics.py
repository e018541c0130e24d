"""The metrics of a run: lines of metrics.jsonl, mirrored to TensorBoard, and the current status in status.json.

metrics.jsonl is the record: one process writes it, and only appends. status.json is overwritten all the time and holds
the present state only. Imports no torch, since the controller writes both.
"""

from __future__ import annotations

import json
import math
import time
from numbers import Integral, Real
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from areal_megatron.files import drop_torn_line, read_replaced, write_atomically
from areal_megatron.run import Run


class MetricsWriter:
    """Appends to metrics.jsonl and to the TensorBoard folder of a run; one process of the run has a writer.

    Example:
        metrics = MetricsWriter(run)
        metrics.write("update", version=3, values={"reward_mean": 1.2, "loss": -0.01})
        metrics.close()
    """

    def __init__(self, run: Run):
        run.check_current()
        drop_torn_line(run.metrics)
        self._run = run
        self._file = run.metrics.open("a", buffering=1)
        self._tensorboard = EventFileWriter(str(run.folder / "tensorboard"), flush_secs=10)

    def write(self, kind: str, version: int, values: dict[str, Any]) -> None:
        """Appends the line {"time", "kind", "version", **values}, with the time in seconds since the epoch.

        `kind` is `update`, `eval`, `checkpoint`, `start`, `resume` or `sft`; `version` is the policy version (sft: the
        step) and the x axis in TensorBoard, which shows each number as `kind/key`. Values are numbers, strings, or
        dicts of them (dicts stay out of TensorBoard); a non-finite number becomes null. Raises TypeError for other
        values, and Replaced.
        """
        self._run.check_current()
        now = time.time()
        line = {"time": now, "kind": kind, "version": version, **_plain(values)}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        scalars = [
            Summary.Value(tag=f"{kind}/{key}", simple_value=float(value))
            for key, value in values.items()
            if isinstance(value, Real)
        ]
        self._tensorboard.add_event(Event(wall_time=now, step=version, summary=Summary(value=scalars)))

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()


class MetricsReader:
    """Reads metrics.jsonl while it grows."""

    def __init__(self, run: Run):
        self._path = run.metrics
        self._offset = 0
        self._lines = 0

    def new(self) -> list[dict[str, Any]]:
        """Returns the lines completed since the last call; a line that is still being written comes later.

        Raises ValueError, which names the file and the line, if a completed line is not JSON.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                finished, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(finished) + len(newline)
        records = []
        for line in finished.splitlines():
            self._lines += 1
            try:
                records.append(json.loads(line))
            except ValueError:
                raise ValueError(f"{self._path}:{self._lines}: not a JSON line; remove it to continue") from None
        return records


def read_metrics(run: Run) -> list[dict[str, Any]]:
    """Returns the completed lines of metrics.jsonl, oldest first; [] before the first.

    Lines after a checkpoint from which the run was later resumed are left out: that work has been done again.
    """
    kept: list[dict[str, Any]] = []
    for record in MetricsReader(run).new():
        if record["kind"] == "resume":
            kept = surviving(kept, record["version"])
        kept.append(record)
    return kept


def surviving(records: list[dict[str, Any]], version: int) -> list[dict[str, Any]]:
    """Returns the records that a resume from the checkpoint of `version` keeps."""
    return [record for record in records if record["version"] <= version]


def write_status(run: Run, status: dict[str, Any]) -> None:
    """Replaces the status that the console shows, atomically. Raises Replaced."""
    run.check_current()
    write_atomically(run.status, json.dumps(_plain(status), allow_nan=False))


def read_status(run: Run, patience_s: float = 1.0) -> dict[str, Any]:
    """Returns the last status; {} before the first, and if none can be read within patience_s."""
    return read_replaced(run.status, json.loads, patience_s) or {}


def _plain(value: Any) -> Any:
    """Returns the value in JSON's types: numpy's numbers become Python's, and those that are not finite None."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    raise TypeError(f"metrics hold numbers, strings, lists and dicts, not {type(value).__name__}")
