"""Decides when a run should have more engines, and when fewer. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areal_megatron.config import Config
from areal_megatron.observe.advice import GAIN, WAITING, Balance, Short, settled

LOSS = 0.01
"""Engines are taken away where updates become slower by this share at most."""
FREED = 1 / 3
"""How much faster the others become at most, as is expected, when an engine leaves them CPU cores: one of two that had
two cores together with a trainer rank becomes so."""
OTHER_LOAD = 0.2
"""Where an update takes longer or shorter by this share than it did with as many engines, what moves have gained counts
no longer."""


class Balancer:
    """The rule by which engines come and go, between `least` and `most` of them, also if they are more or fewer first.

    Engines come if the model of observe/advice.py says that updates would be faster by GAIN at least, and go if
    trainers are short and updates would be slower by LOSS at most. On CPU cores, where an engine that goes leaves the
    others more of the machine than that model knows, one also goes if trainers never wait, engines do, and the others
    would suffice if they became faster by FREED. Nothing moves before advice.FEWEST_UPDATES updates with the same
    engines, after those that follow a move. A move that has gained less than half of what it had to gain, or lost more
    than it might, is taken back if the rule says so, and not made again under the same load.
    """

    def __init__(self, config: Config, least: int, most: int):
        self._config, self._least, self._most = config, least, most
        self._times: dict[tuple[int, int], float] = {}
        """Numbers of engines before and after a move → the time of an update after it over that before."""
        self._update_s: dict[int, float] = {}
        """Number of engines → seconds of an update, of those in `_times`."""
        self._before: Balance | None = None
        """What was measured before the last move, until it is measured after it."""
        self._moves = False
        """Whether engines have been as many as before the last move ever since."""
        self._moved_at = 0
        """The version at the last move."""

    def failed(self) -> None:
        """An engine that was to come never will: there can be one fewer, and others may move again."""
        self._most, self._before, self._moves = self._most - 1, None, False

    def decide(self, updates: Sequence[dict[str, Any]]) -> int:
        """Returns how many engines are to come, or below 0, to go; 0 for none. `updates` as in advice.settled."""
        # none: the run was resumed from before the move
        since = [update for update in updates if update["version"] > self._moved_at] or updates[-1:]
        if self._moves and any(each.get("engines_serving") not in (None, self._before.engines) for each in since):
            self._moves = False
        found = None if self._moves else settled(self._config, updates)
        if found is None:
            return 0
        self._learn(found)
        change = self._change(found)
        if change:
            self._before, self._moves, self._moved_at = found, True, updates[-1]["version"]
        return change

    def _learn(self, found: Balance) -> None:
        known = self._update_s.get(found.engines, found.update_s)
        if abs(found.update_s / known - 1) > OTHER_LOAD:
            self._times, self._update_s = {}, {}
        if self._before and self._before.engines != found.engines:
            times = found.update_s / self._before.update_s
            self._times[self._before.engines, found.engines] = times
            self._times[found.engines, self._before.engines] = 1 / times
            self._update_s |= {balance.engines: balance.update_s for balance in (self._before, found)}
        self._before = None

    def _change(self, found: Balance) -> int:
        within = min(max(found.engines, self._least), self._most)
        if within != found.engines:
            return within - found.engines
        fewer = max(found.engines - found.step, self._least)
        if found.short is Short.ENGINES:
            engines, most = min(found.engines + found.step, self._most), 1 / (1 + GAIN / 2)
        elif self._may_suffice(fewer, found):
            engines, most = fewer, 1 + LOSS
        else:
            return 0
        return engines - found.engines if self._times.get((found.engines, engines), 0.0) <= most else 0

    def _may_suffice(self, fewer: int, found: Balance) -> bool:
        if found.short is Short.TRAINERS and found.faster(fewer) >= -LOSS:
            return True
        if not self._config.machine.is_cpu or found.short is Short.NEITHER:
            return False
        waits = found.trainer_idle < WAITING <= found.engine_idle
        return waits and (1 - found.engine_idle) * found.engines <= (1 + FREED) * fewer
