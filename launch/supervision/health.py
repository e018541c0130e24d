"""Tells the launcher of engines which of them hang and which are drained, from the controller's reports."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from areal_megatron.observe.metrics import read_status
from areal_megatron.observe.status import EngineState
from areal_megatron.run.folder import RunFolder

_LOOK_S = 5.0
"""Interval between two looks; a lost engine has this long to end by itself."""


class Health:
    """The health of the engines that one launcher has started."""

    def __init__(self, run: RunFolder):
        self._run = run
        self._starts: Counter[str] = Counter()
        self._looked = 0.0
        self.given_up: set[str] = set()
        """Engines that the controller has lost and that have not been restarted since."""
        self.drained: set[str] = set()
        self._back: set[str] = set()
        """Engines that were started again after they had been drained, until the controller sees them serve."""
        self.served: set[str] = set()
        """Engines that have held a version since they were started last."""
        self._before: dict[str, int] = {}
        """How often an engine had been lost when it was started again and the controller did not know that yet: what it
        says of the engine until the next loss is about the process before."""

    def begin(self, kept: Iterable[str] = ()) -> None:
        """Begins with a new controller, which has lost no engine yet; the engines in `kept` stay alive."""
        self._starts = Counter(list(kept))  # a mapping would be taken for counts
        self.given_up, self.drained, self._back, self._before = set(), set(), set(), {}

    def started(self, name: str) -> None:
        """Notes that an engine is being started, or started again."""
        self._starts[name] += 1
        self.served.discard(name)
        self._before.pop(name, None)
        self._before |= {e.name: e.losses for e in read_status(self._run).engines if e.name == name and e.serves}
        if name in self.drained:
            self.drained.remove(name)
            self._back.add(name)

    def to_end(self) -> dict[str, str]:
        """Returns the engines whose processes, if still alive, are to be ended now, and why. To be called often."""
        if time.monotonic() - self._looked < _LOOK_S:
            return {}
        self._looked = time.monotonic()
        own = [engine for engine in read_status(self._run).engines if engine.name in self._starts]
        self.served |= {e.name for e in own if e.serves and e.losses != self._before.get(e.name)}
        drained = {engine.name for engine in own if engine.state == EngineState.DRAINED}
        self._back &= drained
        self.drained = drained - self._back
        given_up = {engine.name for engine in own if engine.losses >= self._starts[engine.name]}
        hung, self.given_up = given_up & self.given_up, given_up
        return dict.fromkeys(hung, "lives but does not answer") | dict.fromkeys(self.drained, "is drained")
