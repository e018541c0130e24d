"""Spans of every process in Chrome's trace format, one file a process, merged by areal_megatron.report.

`metrics.jsonl` says how much; the timeline says when: generate, reward, train, publish, commit.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path


class Timeline:
    """Appends events of one process to its file. Thread-safe; spans of one thread may nest."""

    def __init__(self, path: Path, process: str):
        self.process = process
        self._file = path.open("a", buffering=1)
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def span(self, name: str, **args):
        """Records the time from enter to exit; `args` (numbers, short strings) show up in the viewer."""
        start = time.time_ns()
        try:
            yield
        finally:
            self.event(name, start, time.time_ns(), **args)

    def event(self, name: str, start_ns: int, end_ns: int, **args) -> None:
        """Records a span whose wall-clock times (time.time_ns) are known."""
        event = {
            "name": name,
            "ph": "X",
            "ts": start_ns / 1e3,
            "dur": (end_ns - start_ns) / 1e3,
            "pid": self.process,
            "tid": threading.current_thread().name,
            "args": args,
        }
        with self._lock:
            self._file.write(json.dumps(event) + "\n")

    def close(self) -> None:
        self._file.close()
