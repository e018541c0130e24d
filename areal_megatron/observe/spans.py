"""Reads the timelines of a run back: one trace to look at, and what the report computes from the spans.

Times are seconds since the epoch. An interval list is sorted and disjoint, as `union` makes it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_megatron.files import write_atomically
from areal_megatron.run import Run

Interval = tuple[float, float]
FEWEST_DISTURBED = 20
"""Spans that must meet a publish before its cost can be told from noise."""


@dataclass(frozen=True)
class Span:
    """One recorded piece of work of one thread of one process."""

    process: str
    thread: str
    name: str
    start: float
    end: float
    args: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def duration(self) -> float:
        return self.end - self.start


def read_spans(run: Run) -> list[Span]:
    """Every span of every process, by start time; a line torn by a killed process is left out."""
    spans = []
    for event in _events(run):
        start = event["ts"] / 1e6
        spans.append(Span(event["pid"], event["tid"], event["name"], start, start + event["dur"] / 1e6, event["args"]))
    return sorted(spans, key=lambda span: span.start)


def merge(run: Run) -> Path:
    """Writes timeline.json, which chrome://tracing and ui.perfetto.dev open, and returns its path.

    Chrome wants numbers for processes and threads; their names become metadata events. Spans of one thread that
    overlap, as concurrent requests do, go to lanes of their own.
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
    """Each span with the first lane of its thread where it follows the others or nests in one of another name."""
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
    """The same time covered by disjoint intervals, in order."""
    covered: list[Interval] = []
    for start, end in sorted(intervals):
        if covered and start <= covered[-1][1]:
            covered[-1] = (covered[-1][0], max(end, covered[-1][1]))
        else:
            covered.append((start, end))
    return covered


def overlap(intervals: list[Interval], start: float, end: float) -> float:
    """Seconds of [start, end] that the disjoint intervals cover."""
    return sum(max(0.0, min(end, b) - max(start, a)) for a, b in intervals)


def busy_share(spans: list[Span], edges: list[float]) -> list[float]:
    """Per bin between neighbouring edges, the share of time that these spans cover, averaged over processes."""
    by_process: dict[str, list[Interval]] = {}
    for span in spans:
        by_process.setdefault(span.process, []).append((span.start, span.end))
    covered = [union(intervals) for intervals in by_process.values()]
    return [
        sum(overlap(intervals, a, b) for intervals in covered) / ((b - a) * max(1, len(covered)))
        for a, b in itertools.pairwise(edges)
    ]


def speed_by_company(work: list[Span], other: list[Span]) -> tuple[float, float] | None:
    """Tokens/s of the `work` spans (args["tokens"]) that share time with one of `other` in their process, and of the
    rest.

    A span is counted whole, so the difference is what the company costs at the grain of the work spans. None if
    fewer than FEWEST_DISTURBED have company, or none is without.
    """
    open_spans: dict[str, list[Interval]] = {}
    for span in other:
        open_spans.setdefault(span.process, []).append((span.start, span.end))
    disjoint = {process: union(intervals) for process, intervals in open_spans.items()}
    kinds: tuple[list[Span], list[Span]] = [], []
    for span in work:
        kinds[overlap(disjoint.get(span.process, []), span.start, span.end) == 0].append(span)
    if len(kinds[0]) < FEWEST_DISTURBED or not kinds[1]:
        return None
    with_company, alone = (sum(s.args["tokens"] for s in some) / sum(s.duration for s in some) for some in kinds)
    return with_company, alone


def _events(run: Run) -> list[dict[str, Any]]:
    events = []
    for path in sorted((run.folder / "timeline").glob("*.jsonl")):
        lines = path.read_text().splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                continue
            try:
                events.append(json.loads(line))
            except ValueError:
                raise ValueError(f"{path}:{number}: not a JSON line; remove it to go on") from None
    return events
