"""Records when a process does what, as spans in Chrome's trace format: generate, reward, train, publish, commit.

Each process writes a file of its own; `areal report` merges them. What the disk does not take is left out. Imports no
torch.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from areal_megatron.observe.background import FLUSH_S, AppendedFile


class Event(Protocol):
    """A place in what a device has been told to do, such as a torch.cuda.Event."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Timeline:
    """Appends the spans of one process to its file. Thread-safe; spans of one thread may be nested.

    `event` makes an event of the device, and is None where what the host starts is done when the call returns, as on a
    CPU.

    Example:
        timeline = Timeline(run.timeline("trainer-0"), "trainer-0")
        with timeline.span("train", version=3):
            ...
        timeline.close()
    """

    def __init__(self, path: Path, process: str, event: Callable[[], Event] | None = None):
        self.process, self._event = process, event
        self._file = AppendedFile(path, kept=False)
        self._launched: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
        self._follower = threading.Thread(target=self._follow, name="timeline", daemon=True) if event else None
        if self._follower:
            self._follower.start()

    @contextlib.contextmanager
    def span(self, name: str, **args):
        """Records the time in which the context is entered; the viewer shows `args` (numbers, short strings)."""
        start = time.time_ns()
        try:
            yield
        finally:
            self.event(name, start, time.time_ns(), **args)

    @contextlib.contextmanager
    def device_span(self, name: str, **args):
        """Records the time in which the device does what the context launches on its current stream.

        The host waits for nothing: a thread of the timeline does.
        """
        if self._event is None:
            with self.span(name, **args):
                yield
            return
        begun, done = self._event(), self._event()
        begun.record()
        try:
            yield
        finally:
            done.record()
            self._launched.put((name, threading.current_thread().name, begun, done, args))

    def _follow(self) -> None:
        while launched := self._launched.get():
            name, thread, begun, done, args = launched
            begun.synchronize()
            start = time.time_ns()
            done.synchronize()
            self._record(name, thread, start, time.time_ns(), args)

    def event(self, name: str, start_ns: int, end_ns: int, **args) -> None:
        """Records a span with known wall-clock times (time.time_ns)."""
        self._record(name, threading.current_thread().name, start_ns, end_ns, args)

    def _record(self, name: str, thread: str, start_ns: int, end_ns: int, args: dict[str, Any]) -> None:
        event = {
            "name": name,
            "ph": "X",
            "ts": start_ns / 1e3,
            "dur": (end_ns - start_ns) / 1e3,
            "pid": self.process,
            "tid": thread,
            "args": args,
        }
        self._file.write(msgspec.json.encode(event) + b"\n")

    def close(self, timeout_s: float = FLUSH_S) -> None:
        if self._follower:
            self._launched.put(None)
            self._follower.join(timeout_s)  # a device that hangs ends no span
        self._file.close(timeout_s)
