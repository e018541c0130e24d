"""A signal for several tasks that wait for the same state to change."""

from __future__ import annotations

import asyncio


class Changed:
    """Wakes every task that waits. No wake-up is lost by a task that does not await between its look and its wait.

    An asyncio.Event would need one task to clear it, which the others could miss.

    Example:
        while not schedule.may_admit(engine):
            await changed.wait()
    """

    def __init__(self):
        self._next = asyncio.Event()

    def notify(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        """Returns after the next `notify`."""
        await self._next.wait()
