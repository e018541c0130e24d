"""Whether the kernel of this machine ends processes because memory has run out."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

_RECENT_S = 15.0


class OutOfMemory:
    """Counts along with the kernel, whichever cgroup lacks memory. To be looked at now and then."""

    def __init__(self, counts: Path = Path("/proc/vmstat")):
        self._counts, self._risen_at = counts, float("-inf")
        self._kills = self._read()

    def look(self) -> bool:
        """Returns whether it has ended a process in the last seconds."""
        if (kills := self._read()) != self._kills:
            self._kills, self._risen_at = kills, time.monotonic()
        return time.monotonic() - self._risen_at < _RECENT_S

    def _read(self) -> str:
        with suppress(OSError):
            return next(
                (
                    line
                    for line in self._counts.read_text(encoding="utf-8").splitlines()
                    if line.startswith("oom_kill ")
                ),
                "",
            )
        return ""
