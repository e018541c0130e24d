"""The controller of a run in which every answer is trained exactly η versions after its admission, at the beginning as
many as there are: trainers and engines take turns. For tools/bench/staleness.py; called in Python's place:

    areal train CONFIG --python 'controller=python tools/bench/equal_staleness.py' …
"""

from __future__ import annotations

import sys

from areal_megatron.controller import controller
from areal_megatron.controller.schedule import Group, Schedule


class EqualStaleness(Schedule):
    """Forms a batch only once an engine samples from the version that trains next, and all that Eq. 3 lets begin has
    finished."""

    @property
    def ahead(self) -> float:
        return self.max_staleness

    def form_batch(self) -> list[Group] | None:
        waits = self.running or self.interrupted or any(map(self.may_admit, self.engines))
        if not self.training and (self.newest != self.version or waits):
            return None
        return super().form_batch()


if __name__ == "__main__":
    del sys.argv[1:3]  # -m and the module that a launcher calls
    sys.exit(controller.main(EqualStaleness))
