"""Engines that come and go while a run goes on: their names, who is to leave, and those of the run's own launcher."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from areal_megatron.config import Config
from areal_megatron.launch.balance import Balancer
from areal_megatron.launch.pools import Placement, Process
from areal_megatron.observe.metrics import read_status
from areal_megatron.observe.status import EngineState, engines_of
from areal_megatron.run import Run, engine_index, engine_name

LOOK_S = 5.0
"""Interval between two looks at what a run needs."""


def claim(run: Run, first: int) -> str:
    """Returns a name that no other engine of the run has or will have. `first`: the least number to try."""
    folder = run.folder / "added"
    folder.mkdir(exist_ok=True)
    index = first
    while True:
        try:
            (folder / engine_name(index)).touch(exist_ok=False)
            return engine_name(index)
        except FileExistsError:
            index += 1


def ask_to_leave(run: Run, engine: str) -> None:
    """Has an engine answer the requests that it has, and then leave."""
    path = run.drain(engine)
    path.parent.mkdir(exist_ok=True)
    path.touch()


def have_some_leave(run: Run, count: int, own: Collection[str]) -> list[str]:
    """Asks as many engines to leave, the newest first, and rather those of `own`. Returns their names."""
    present = [name for name, state in states_of(run).items() if not state.gone]
    chosen = sorted(present, key=lambda name: (name not in own, -engine_index(name)))[:count]
    for name in chosen:
        ask_to_leave(run, name)
    return chosen


def states_of(run: Run) -> dict[str, EngineState]:
    """Returns the state of each engine, as the controller says."""
    return {engine.name: engine.state for engine in engines_of(read_status(run))}


class Elastic:
    """The engines of a run's launcher, of which as many run as launch/balance.py says: those of the placement, with
    which the run begins, and those that may join them, each with slots and a name of its own for good."""

    def __init__(self, run: Run, config: Config, placement: Placement):
        rollout = config.rollout
        self._run, self._looked = run, 0.0
        self._balancer = Balancer(config, rollout.least_engines, rollout.most_engines) if rollout.most_engines else None
        self.joining: list[Process] = []
        """Those with which the run does not begin."""
        for slots in placement.spare:
            name = claim(run, rollout.engines)
            self.joining.append(Process(name, "rollout", engine_index(name), slots[0].node, slots))
        self.resting = {process.name for process in self.joining}
        """Those that are not to run at present."""
        self._own = {process.name: process for process in [*placement.pool("rollout"), *self.joining]}
        self._failed: set[str] = set()

    def begin(self) -> None:
        """Begins with a new controller, which waits for all engines of the placement."""
        self.resting &= {process.name for process in self.joining}

    def look(
        self, updates: Sequence[dict[str, Any]], drained: Collection[str], is_reached: Callable[[Process], bool]
    ) -> tuple[list[str], list[str]]:
        """Returns the engines to start now, and those that were asked to leave. To be called often.

        `updates` as in Balancer.decide; `drained`: engines that have left and whose processes have ended;
        `is_reached` tells whether the nodes of a process can be told to start it.
        """
        if self._balancer is None or time.monotonic() - self._looked < LOOK_S:
            return [], []
        self._looked = time.monotonic()
        for name in (drained & self._own.keys()) - self.resting:
            with suppress(OSError):  # of a shared file system: it rests from the next look on
                self._run.drain(name).unlink(missing_ok=True)
                self.resting.add(name)
        change = self._balancer.decide(updates)
        if change < 0:
            with suppress(OSError):  # as of a full disk: they are asked when they are too many again
                return [], have_some_leave(self._run, -change, self._own)
            return [], []
        ready = [name for name in self._own if name in self.resting - self._failed and is_reached(self._own[name])]
        for _ in range(change - len(ready)):
            self._balancer.failed()
        self.resting -= (coming := set(ready[:change]))
        return sorted(coming, key=engine_index), []

    def is_dropped(self, name: str) -> bool:
        """Gives up an engine that was to join and has failed; returns False if the run began with it, and needs it."""
        if name not in {process.name for process in self.joining}:
            return False
        self._failed.add(name)
        self.resting.add(name)
        self._balancer.failed()
        return True
