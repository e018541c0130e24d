"""How long a run took from its launch to the first trained batch, and which pool it waited for."""

from __future__ import annotations

import time


class Startup:
    """Seconds since the launcher began this incarnation; every event counts once."""

    def __init__(self, begun: float):
        """`begun`: seconds since the epoch, by the launcher's clock."""
        self._begun = begun
        self._after: dict[str, float] = {}

    def mark(self, event: str) -> bool:
        """Whether `event` (engines, trainers or first_batch) has happened for the first time."""
        new = event not in self._after
        self._after.setdefault(event, time.time() - self._begun)
        return new

    def figures(self) -> dict[str, float]:
        """engines_s, trainers_s, first_batch_s, and that over the slower of both pools."""
        slowest = max(self._after["engines"], self._after["trainers"])
        over = self._after["first_batch"] / max(slowest, 1e-3)
        return {f"{event}_s": seconds for event, seconds in self._after.items()} | {"over_slowest_pool": over}
