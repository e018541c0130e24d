"""Signs of life, and how long to wait for one: what this process itself has slept is not the other's silence."""

from __future__ import annotations

import threading
from collections.abc import Callable

from areal_megatron.process.lateness import AttendedTime

SIGN_S = 5.0
"""Interval between two signs of life at most; a sixth of the least machine.silence_s."""


def sign_interval(silence_s: float) -> float:
    """Returns the seconds between two signs of life, where a silence of `silence_s` means loss."""
    return min(SIGN_S, silence_s / 6)


class Repeater:
    """Calls a function at an interval, on a thread of its own. A context manager: leaving it stops the calls."""

    def __init__(self, function: Callable[[], None], interval_s: float):
        self._function, self._interval_s = function, interval_s
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def _repeat(self) -> None:
        while not self._left.wait(self._interval_s):
            self._function()

    def __enter__(self) -> Repeater:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._left.set()
        self._thread.join(self._interval_s)  # no longer: it may wait for a file system that does not answer


class AwakeClock(AttendedTime):
    """Attended time (lateness.py) of a loop that reads it at each turn, from 0, to measure the silence of others with.

    The time between two readings counts at most as one interval between signs of life: a process has not listened while
    it was stopped, waited for a file system, or had its machine moved. Messages to it are still to be read, and every
    sender has nearly all of `silence_s` left to send more.
    """

    def __init__(self, silence_s: float):
        super().__init__(tick_s=sign_interval(silence_s))
        self._begun = super().now()

    def now(self) -> float:
        self.tick()
        return super().now() - self._begun
