"""The metrics of a run: lines of metrics.jsonl, mirrored to TensorBoard, and the current status in status.json.
Other trackers have processes of their own, which follow metrics.jsonl (areal_megatron/observe/mirror.py).

metrics.jsonl is the record: one process writes it, and only appends. Its lines wait in memory while the disk is full or
hangs. status.json is overwritten all the time and holds the present state only. A thread writes both (background.py):
neither ever holds up or ends the process. Imports no torch, since the controller writes both.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from areal_megatron.config import ConfigError
from areal_megatron.observe.background import FLUSH_S, AppendedFile, LatestFile, close_all
from areal_megatron.observe.status import Number, Status
from areal_megatron.process.files import read_replaced, write_atomically
from areal_megatron.run.folder import RunFolder, line_of
from areal_megatron.run.json_input import read_record

STEPS = ("update", "sft", "dpo", "reward_model")
"""The kinds of lines that tell of an update: `update` in RL, the mode in supervised runs."""


class MetricsWriter:
    """Appends to metrics.jsonl and to the TensorBoard folder of a run; one process of the run has a writer.

    Example:
        metrics = MetricsWriter(run)
        metrics.write("update", version=3, values={"reward_mean": 1.2, "loss": -0.01})
        metrics.close()
    """

    def __init__(self, run: RunFolder):
        from tensorboard.compat.proto import event_pb2, summary_pb2  # which those who only read need not have
        from tensorboard.summary.writer.record_writer import RecordWriter

        messages: Any = event_pb2, summary_pb2  # protobuf makes their names when they are imported
        self._event, self._summary = messages[0].Event, messages[1].Summary
        self._file = AppendedFile(run.metrics, kept=True, check=run.look)
        events = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"
        self._events = AppendedFile(run.folder / "tensorboard" / events, kept=True, lines=False, check=run.look)
        self._tensorboard = RecordWriter(self._events)
        self._add_event(file_version="brain.Event:2")

    def write(self, kind: str, version: int, values: dict[str, Any]) -> None:
        """Has the line {"time", "kind", "version", **values} appended soon, with the time in seconds since the epoch.

        `kind` is one of STEPS, `eval`, `checkpoint`, `start` or `resume`; `version` is the policy version (supervised:
        the step) and the x axis in TensorBoard, which shows the `scalars`. Values are numbers, strings, or dicts of
        them; a non-finite number becomes null. Raises TypeError for other values, and Replaced once a line was found to
        come from a process that has been replaced.
        """
        now = time.time()
        line = {"time": now, "kind": kind, "version": version, **_plain(values)}
        self._file.write(f"{json.dumps(line, allow_nan=False)}\n".encode())
        shown = scalars(kind, values)
        summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=shown[tag]) for tag in shown])
        self._add_event(wall_time=now, step=version, summary=summary)

    def table(self, name: str, version: int, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Shows a table in TensorBoard, and nowhere else; its texts are shown as they are. Raises Replaced."""
        from tensorboard.compat.proto import types_pb2

        cells = [as_markdown(cell).encode() for row in (head, *rows) for cell in row]
        shape = {"dim": [{"size": 1 + len(rows)}, {"size": len(head)}]}
        tensor = {"dtype": vars(types_pb2)["DT_STRING"], "tensor_shape": shape, "string_val": cells}
        metadata = {"plugin_data": {"plugin_name": "text"}}
        value = self._summary.Value(tag=name, metadata=metadata, tensor=tensor)
        self._add_event(step=version, summary=self._summary(value=[value]))

    def flush(self) -> None:
        """Waits until everything is on the disk, at most background.FLUSH_S for each file. Raises Replaced."""
        self._file.flush()
        self._events.flush()

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Waits until everything is on the disk, at most timeout_s."""
        close_all((self._file, self._events), timeout_s)

    def _add_event(self, **fields: Any) -> None:
        event = self._event(**{"wall_time": time.time(), **fields})
        self._tensorboard.write(event.SerializeToString())


class StatusWriter:
    """Keeps the status that the console shows up to date; one process of the run has a writer."""

    def __init__(self, run: RunFolder):
        self._file = LatestFile(run.status, partial(write_status, run))

    def write(self, status: Status) -> None:
        """Has the status replaced soon; nobody may change it any more. Raises Replaced as MetricsWriter does."""
        self._file.write(status)

    @property
    def failures(self) -> int:
        """How often the status could not be written."""
        return self._file.failures

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Waits until the last status is on the disk, at most timeout_s."""
        self._file.close(timeout_s)


class _Head(msgspec.Struct):
    time: Annotated[float, Meta(ge=0, le=1e11)]
    kind: str
    version: Annotated[int, Meta(ge=-1, le=2**53)]


class _Interval(msgspec.Struct):
    value: Number
    low: Number | None = None
    high: Number | None = None


_Plain = Number | bool | str | None
_Counts = dict[str, _Plain | dict[int, Number]]
_CONTENTS = dict.fromkeys(STEPS, _Counts) | {
    "eval": dict[str, _Plain | dict[str, dict[str, Number | _Interval | None]]],
    "checkpoint": dict[str, _Plain],
    "start": dict[str, _Plain],
    "resume": dict[str, _Plain],
}
"""What a line of each kind holds."""
_TEXTS = {"kind", "error", "warning"}


def _read_line(content: bytes, place: str) -> dict[str, Any]:
    """Returns a line without what is not of the kind that readers expect. Raises ConfigError, as `read_record` does."""
    kind = read_record(content, _Head, place).kind
    line = read_record(content, dict[str, Any], place)
    if kind not in _CONTENTS:
        return line
    read_record(content, _CONTENTS[kind], place)
    return {key: value for key, value in line.items() if key in _TEXTS or _is_reckoned_with(key, value)}


def _is_reckoned_with(key: str, value: Any) -> bool:
    """Whether a value is of the kind that readers expect of its key."""
    of_many = key == "files" or key.endswith("_histogram")
    return value is None or (isinstance(value, dict) == of_many and not isinstance(value, str))


class MetricsReader:
    """Reads metrics.jsonl while it grows. Lines that cannot be read are left out: where a machine has lost its power,
    some file systems leave zeros in the middle of a file."""

    def __init__(self, run: RunFolder):
        self._path = run.metrics
        self._offset = 0
        self._lines = 0
        self._unreadable = 0
        self._first = ""

    def new(self) -> list[dict[str, Any]]:
        """Returns the lines completed since the last call; a line that is still being written comes later. Raises
        OSError."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                finished, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(finished) + len(newline)
        records = []
        for line in finished.split(b"\n") if newline else ():
            self._lines += 1
            try:
                records.append(_read_line(line, f"{self._path}:{self._lines}"))
            except ConfigError as e:
                self._unreadable += 1
                self._first = self._first or str(e)
        return records

    @property
    def problem(self) -> str:
        """Says how many lines were left out, and what is wrong with the first; "" if none were."""
        if not self._unreadable:
            return ""
        count = f"{self._unreadable} lines are" if self._unreadable > 1 else "the line is"
        return f"{self._first}; {count} left out"


def read_metrics(run: RunFolder, warn: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """Returns the completed lines of metrics.jsonl, oldest first; [] before the first. Raises OSError.

    Lines after a checkpoint from which the run was later resumed are left out: that work has been done again. `warn` is
    told in a line if others cannot be read.
    """
    kept: list[dict[str, Any]] = []
    reader = MetricsReader(run)
    for record in reader.new():
        if record["kind"] == "resume":
            kept = surviving(kept, record["version"])
        kept.append(record)
    if warn and reader.problem:
        warn(reader.problem)
    return kept


def trained_before(run: RunFolder) -> int:
    """Returns the number of batches that another run had trained, if this one began with its checkpoint: they count as
    updates, but have no line here. Raises OSError and ConfigError."""
    try:
        line = line_of(run.starts())
    except FileNotFoundError:  # it has not begun
        return 0
    return line[0][0].batches if line else 0


def last_saved(run: RunFolder) -> int | None:
    """Returns the version of the last checkpoint that metrics.jsonl says was saved, of work that counts; None if it
    says of none. Raises OSError."""
    saved = [line["version"] for line in read_metrics(run) if line["kind"] == "checkpoint" and not line.get("failed")]
    return max(saved, default=None)


def scalars(kind: str, values: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers that trackers show of one line of metrics.jsonl, as `kind/key`.

    Dicts stay out, but for the figures of each file of an evaluation, which come with their intervals:
    `eval/FILE/avg@n`, `eval/FILE/avg@n/low`, `eval/FILE/avg@n/high`.
    """
    shown = dict(values)
    for file, figures in values.get("files", {}).items() if kind == "eval" else ():
        for name, figure in figures.items():
            tag = f"{file}/{name}"
            if isinstance(figure, dict):
                shown |= {tag if part == "value" else f"{tag}/{part}": number for part, number in figure.items()}
            else:
                shown[tag] = figure
    return {f"{kind}/{key}": float(value) for key, value in shown.items() if isinstance(value, Real)}


def as_markdown(cell: Any) -> str:
    """Returns a cell of a table for those who take it for Markdown: text as a block of code, shown as it is."""
    return "\n".join(f"    {line}" for line in str(cell).split("\n")) if isinstance(cell, str) else str(cell)


def surviving(records: list[dict[str, Any]], version: int) -> list[dict[str, Any]]:
    """Returns the records that a resume from the checkpoint of `version` keeps."""
    return [record for record in records if record["version"] <= version]


def write_status(run: RunFolder, status: Status) -> None:
    """Replaces the status that the console shows, atomically and at once. Raises Replaced and OSError."""
    run.look()
    write_atomically(run.status, msgspec.json.encode(status))


def read_status(run: RunFolder, patience_s: float = 1.0) -> Status:
    """Returns the last status; an empty one before the first, and if none can be read within patience_s."""
    return read_replaced(run.status, lambda content: read_record(content, Status, run.status), patience_s) or Status()


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
