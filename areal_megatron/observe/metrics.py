"""Numbers of a run: lines of metrics.jsonl, mirrored to TensorBoard, and the status of this moment.

metrics.jsonl is the record (one writer, append only); status.json is overwritten all the time and only
says what goes on now. Imports no torch: the controller writes both.
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

from areal_megatron.files import drop_torn_line, write_atomically
from areal_megatron.run import Run


class MetricsWriter:
    """Appends to metrics.jsonl and to the TensorBoard folder of a run. One process a run has one."""

    def __init__(self, run: Run):
        drop_torn_line(run.metrics)
        self._file = run.metrics.open("a", buffering=1)
        self._tensorboard = EventFileWriter(str(run.folder / "tensorboard"), flush_secs=10)

    def write(self, kind: str, version: int, values: dict[str, Any]) -> None:
        """Appends {"time", "kind", "version", **values}; `time` is seconds since the epoch.

        `kind` is `update`, `eval`, `checkpoint`, `start`, `resume` or `sft`; `version` is the policy version (sft: the
        step) and the x axis in TensorBoard, which shows each number as `kind/key`. Values are numbers, strings, or
        dicts of them (dicts stay out of TensorBoard); a non-finite number becomes null. Raises TypeError for other
        values.
        """
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
    """Follows metrics.jsonl while it grows."""

    def __init__(self, run: Run):
        self._path = run.metrics
        self._offset = 0
        self._lines = 0

    def new(self) -> list[dict[str, Any]]:
        """The lines finished since the last call; a line that is still being written waits for its end.

        Raises ValueError that names file and line if a finished line is not JSON.
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
                raise ValueError(f"{self._path}:{self._lines}: not a JSON line; remove it to go on") from None
        return records


def read_metrics(run: Run) -> list[dict[str, Any]]:
    """Every finished line of the surviving line of the run, oldest first; [] before the first.

    What came after a checkpoint from which the run was resumed later has been done again, and is left out.
    """
    kept: list[dict[str, Any]] = []
    for record in MetricsReader(run).new():
        if record["kind"] == "resume":
            kept = surviving(kept, record["version"])
        kept.append(record)
    return kept


def surviving(records: list[dict[str, Any]], version: int) -> list[dict[str, Any]]:
    """Those of the records that a resume from the checkpoint of `version` keeps."""
    return [record for record in records if record["version"] <= version]


def write_status(run: Run, status: dict[str, Any]) -> None:
    """Replaces the status that the console shows; a reader never sees a part of it."""
    write_atomically(run.status, json.dumps(_plain(status), allow_nan=False))


def read_status(run: Run) -> dict[str, Any]:
    """The last status; {} before the first."""
    try:
        return json.loads(run.status.read_text())
    except FileNotFoundError:
        return {}


def _plain(value: Any) -> Any:
    """The same value in JSON's types; numpy's numbers become Python's."""
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
