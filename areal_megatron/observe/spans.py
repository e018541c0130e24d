"""Reads the timelines of a run: merges them into one trace to view, and computes figures for the report.

Times are seconds since the epoch. Lists of intervals are sorted and disjoint, as `union` returns them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from areal_megatron.config import ConfigError
from areal_megatron.process.files import write_atomically
from areal_megatron.run.folder import RunFolder
from areal_megatron.run.json_input import read_record

Interval = tuple[float, float]
FEWEST_DISTURBED = 20
"""The number of spans that must overlap a publish before its cost can be told from noise."""


@dataclass(frozen=True)
class Span:
    """A piece of work that one thread of one process recorded."""

    process: str
    thread: str
    name: str
    start: float
    end: float
    args: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def duration(self) -> float:
        return self.end - self.start


class _Event(msgspec.Struct):
    """A line of a timeline."""

    pid: str
    tid: str
    name: str
    ts: Annotated[float, Meta(ge=0, le=1e17)]
    """Microseconds since the epoch."""
    dur: Annotated[float, Meta(ge=0, le=1e17)]
    args: dict[str, float | bool | str | None]

    def __post_init__(self) -> None:
        if isinstance(self.args.get("tokens", 0), str | bool | None):
            raise ValueError("tokens is no number")


def read_spans(run: RunFolder) -> list[Span]:
    """Returns the spans of all processes, ordered by start. Lines that cannot be read are left out: a process was
    killed while it wrote one, or a machine has lost its power."""
    spans = []
    for path in sorted((run.folder / "timeline").glob("*.jsonl")):
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
            with suppress(ConfigError):
                event = read_record(line, _Event, f"{path}:{number}")
                start = event.ts / 1e6
                spans.append(Span(event.pid, event.tid, event.name, start, start + event.dur / 1e6, event.args))
    return sorted(spans, key=lambda span: span.start)


def merge(run: RunFolder) -> Path:
    """Writes timeline.json, which chrome://tracing and ui.perfetto.dev open, and returns its path.

    The format identifies processes and threads by numbers; metadata events hold their names. Spans of one thread that
    overlap, such as concurrent requests, get lanes of their own.
    """
    processes: dict[str, int] = {}
    lanes: dict[tuple[str, str, int], int] = {}
    events = []
    for span, lane in _in_lanes(read_spans(run)):
        pid = processes.setdefault(span.process, len(processes) + 1)
        tid = lanes.setdefault((span.process, span.thread, lane), len(lanes) + 1)
        events.append(
            {
                "name": span.name,
                "ph": "X",
                "ts": span.start * 1e6,
                "dur": span.duration * 1e6,
                "pid": pid,
                "tid": tid,
                "args": span.args,
            }
        )
    for process, pid in processes.items():
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": process}})
    for (process, thread, lane), tid in lanes.items():
        name = thread if lane == 0 else f"{thread} ({lane + 1})"
        events.append({"name": "thread_name", "ph": "M", "pid": processes[process], "tid": tid, "args": {"name": name}})
    path = run.folder / "timeline.json"
    write_atomically(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path


def _in_lanes(spans: list[Span]) -> Iterator[tuple[Span, int]]:
    """Yields each span with a lane: the first of its thread where it follows all others or is nested in one of
    another name."""
    open_spans: dict[tuple[str, str], list[list[Span]]] = {}
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        lanes = open_spans.setdefault((span.process, span.thread), [])
        for lane in lanes:
            lane[:] = [earlier for earlier in lane if earlier.end > span.start]
        fits = (
            number
            for number, lane in enumerate(lanes)
            if all(outer.end >= span.end and outer.name != span.name for outer in lane)
        )
        number = next(fits, len(lanes))
        if number == len(lanes):
            lanes.append([])
        lanes[number].append(span)
        yield span, number


def union(intervals: list[Interval]) -> list[Interval]:
    """Returns disjoint intervals, in order, that cover the same time."""
    covered: list[Interval] = []
    for start, end in sorted(intervals):
        if covered and start <= covered[-1][1]:
            covered[-1] = (covered[-1][0], max(end, covered[-1][1]))
        else:
            covered.append((start, end))
    return covered


def overlap(intervals: list[Interval], start: float, end: float) -> float:
    """Returns the seconds of [start, end] that the disjoint intervals cover."""
    return sum(max(0.0, min(end, b) - max(start, a)) for a, b in intervals)


def speeds_with_and_without(work: list[Span], other: list[Span]) -> tuple[float, float] | None:
    """Returns the tokens/s of the `work` spans that overlap one of `other` in their process, and of the rest.

    A work span, whose tokens are args["tokens"], is counted whole, so the cost of the other work is resolved no finer
    than that. Returns None if fewer than FEWEST_DISTURBED work spans are disturbed, or if all are.
    """
    intervals: dict[str, list[Interval]] = {}
    for span in other:
        intervals.setdefault(span.process, []).append((span.start, span.end))
    busy = {process: union(found) for process, found in intervals.items()}
    disturbed, alone = [], []
    for span in work:
        (disturbed if overlap(busy.get(span.process, []), span.start, span.end) else alone).append(span)
    if len(disturbed) < FEWEST_DISTURBED or not alone:
        return None
    speeds = _tokens_per_s(disturbed), _tokens_per_s(alone)
    return speeds if min(speeds) > 0 else None


def _tokens_per_s(spans: list[Span]) -> float:
    seconds = sum(span.duration for span in spans)
    return sum(span.args["tokens"] for span in spans) / seconds if seconds > 0 else 0.0
