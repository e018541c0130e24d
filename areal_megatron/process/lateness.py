"""Time limits for others that leave out the time in which this process itself was late: stopped, paused with its
machine, or too busy to look.

A process that was away finds its own timers expired and the answers of others unread, both at once. It has no reason
to blame them: it could not have heard them earlier. So limits are in *attended* seconds, of a clock that stops while
nobody comes to read it; and what had arrived by the end of a limit is in time, even if it has yet to be read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar
from weakref import WeakKeyDictionary

log = logging.getLogger(__name__)
T = TypeVar("T")
TICK_S = 0.25
"""How often an event loop proves that it attends; an absence is known this exactly."""
_READ_S = 0.1
"""How long a loop takes at most to read a short answer that has arrived."""
_WORTH_TELLING_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 16.0


class AttendedTime:
    """A clock that goes on for at most `tick_s` after each `tick`, however late the next one is. It never goes back.

    `clock` returns seconds and only ever rises.

    Example:
        time = AttendedTime()
        time.tick()  # again and again, every TICK_S
        time.now()
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, tick_s: float = TICK_S):
        self._clock, self._tick_s = clock, tick_s
        self._ticked = clock()
        self.late_s = 0.0
        """How late all ticks together were, in seconds."""

    def tick(self) -> float:
        """Returns how late this tick is, in seconds."""
        now = self._clock()
        late = max(0.0, now - self._ticked - self._tick_s)
        self.late_s, self._ticked = self.late_s + late, now
        return late

    def now(self) -> float:
        """Returns attended seconds, whose differences alone mean something."""
        now = self._clock()
        return min(now, self._ticked + self._tick_s) - self.late_s


_clocks: WeakKeyDictionary[asyncio.AbstractEventLoop, AttendedTime] = WeakKeyDictionary()


def attended_time() -> AttendedTime:
    """Returns the clock of the running event loop, which ticks from the first call to the end of the loop."""
    loop = asyncio.get_running_loop()
    if (clock := _clocks.get(loop)) is not None:
        return clock
    clock = _clocks[loop] = AttendedTime()

    def tick() -> None:
        if (late := clock.tick()) > _WORTH_TELLING_S:
            log.warning("this process stalled for %.1f s: every time limit for others is extended by that", late)
        loop.call_later(TICK_S, tick)

    loop.call_later(TICK_S, tick)
    return clock


def now() -> float:
    """Returns the attended seconds of the running event loop; for limits, in place of time.monotonic()."""
    return attended_time().now()


async def within(limit_s: float, awaited: Awaitable[T]) -> T:
    """Returns the result of `awaited`, or cancels it and raises TimeoutError after limit_s attended seconds."""
    clock = attended_time()
    deadline = clock.now() + limit_s + _READ_S
    task = asyncio.ensure_future(awaited)
    try:
        while not task.done():
            if (left := deadline - clock.now()) <= 0:
                raise TimeoutError(f"no result within {limit_s:g} s")
            await asyncio.wait([task], timeout=left)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


def pauses(limit_s: float) -> Iterator[float]:
    """Yields how many seconds to wait before each further try of what has failed: 1, 2, 4, 8, 16, 16, … At least one;
    no more once limit_s attended seconds have passed since the first was asked for."""
    began, pause = now(), _FIRST_PAUSE_S
    yield pause
    while now() - began < limit_s:
        pause = min(2 * pause, _LONGEST_PAUSE_S)
        yield pause
