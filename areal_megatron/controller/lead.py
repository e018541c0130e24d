"""How far engines may be ahead of trainers: as far as keeps trainers at work, and no further.

Engines that are faster than trainers would fill whatever bound of staleness they have: each answer would be trained as
late as it may be, and no batch would be ready earlier for it. Pure: no I/O, no clock.
"""

from __future__ import annotations

import math

WATCHED = 8
"""Batches in a row, besides those under way, for which a lead must not be used up before it is shortened."""
SPARE = 0.25
"""What is left of it then, of a batch: lengths of answers vary."""
LONGER = 1.0
"""Batches by which it grows whenever trainers find too few answers."""


class Lead:
    """The batches that may be under way beside the one that is trained next, from the least of 1 and `most` to `most`.

    It begins with whatever the engines can run until the first batch is there.

    Example:
        lead = Lead(most=8)
        lead.began(under_way=3.5)  # lead.batches is 2.5
        lead.ready(0.9)  # trainers are free, and wait for a tenth of a batch: lead.batches is 3.5
    """

    def __init__(self, most: int):
        self.most, self.batches = float(most), float(most)
        self._began = False
        self._ready: list[float] = []
        """What was ready each time that trainers became free, since the lead was changed."""

    def began(self, under_way: float) -> None:
        """Takes what is under way, in batches, when the first batch is complete, which counts. Later calls change
        nothing."""
        if not self._began:
            self._began = True
            self._change(under_way - 1)

    def ready(self, batches: float) -> None:
        """Tells how many batches were ready when trainers became free."""
        if batches < 1:
            self._change(self.batches + LONGER)
            return
        self._ready.append(batches)
        if len(self._ready) >= WATCHED + math.ceil(self.batches):
            self._change(self.batches - max(min(self._ready) - 1 - SPARE, 0.0))

    def _change(self, batches: float) -> None:
        self.batches = min(max(batches, 1.0), self.most)
        self._ready = []
