"""The time from a run's launch to its first trained batch, compared with the slower of the two pools."""

from __future__ import annotations

import time


class Startup:
    """The times of the events of a startup, in seconds since the launcher began this incarnation."""

    def __init__(self, begun: float):
        """`begun` is the start in seconds since the epoch, by the launcher's clock."""
        self._begun = begun
        self._after: dict[str, float] = {}

    def mark(self, event: str) -> bool:
        """Records `event` (engines, trainers or first_batch) unless it is known; returns whether it was new."""
        new = event not in self._after
        self._after.setdefault(event, time.time() - self._begun)
        return new

    def figures(self) -> dict[str, float]:
        """Returns engines_s, trainers_s, first_batch_s, and the ratio of the last to the slower pool's."""
        slowest = max(self._after["engines"], self._after["trainers"])
        over = self._after["first_batch"] / max(slowest, 1e-3)
        return {f"{event}_s": seconds for event, seconds in self._after.items()} | {"over_slowest_pool": over}
