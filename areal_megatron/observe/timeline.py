"""Records when a process does what, as spans in Chrome's trace format: generate, reward, train, publish, commit.

Each process writes a file of its own; `areal report` merges them. What the disk does not take is left out.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path

from areal_megatron.observe.background import FLUSH_S, AppendedFile


class Timeline:
    """Appends the spans of one process to its file. Thread-safe; spans of one thread may be nested.

    Example:
        timeline = Timeline(run.timeline("trainer-0"), "trainer-0")
        with timeline.span("train", version=3):
            ...
        timeline.close()
    """

    def __init__(self, path: Path, process: str):
        self.process = process
        self._file = AppendedFile(path, kept=False)

    @contextlib.contextmanager
    def span(self, name: str, **args):
        """Records the time in which the context is entered; the viewer shows `args` (numbers, short strings)."""
        start = time.time_ns()
        try:
            yield
        finally:
            self.event(name, start, time.time_ns(), **args)

    def event(self, name: str, start_ns: int, end_ns: int, **args) -> None:
        """Records a span with known wall-clock times (time.time_ns)."""
        event = {
            "name": name,
            "ph": "X",
            "ts": start_ns / 1e3,
            "dur": (end_ns - start_ns) / 1e3,
            "pid": self.process,
            "tid": threading.current_thread().name,
            "args": args,
        }
        self._file.write(f"{json.dumps(event)}\n".encode())

    def close(self, timeout_s: float = FLUSH_S) -> None:
        self._file.close(timeout_s)
