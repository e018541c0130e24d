"""Advice on the split of a run's GPUs: which pool is short, by how much, and what one engine more or less would give;
and on staleness, where it shortens the optimizer's steps.

A small model of one update, corrected by what was measured. Trainers train a batch in a time that no engine changes.
Engines generate it in a time of which the part in which they are full is divided among more of them; in the rest they
wait for answers to become longer. How far the pools overlap, and how long neither works, is taken from the run's own
updates, and assumed to stay (docs/watching.md, "Advice"). Pure; imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter
from typing import Any

from areal_megatron.config import Config

MOST_UPDATES, FEWEST_UPDATES = 20, 10
"""The largest and the smallest number of last updates for advice."""
GAIN = 0.05
"""More engines that make updates faster by less than this share are not worth their GPUs."""
MANY = 8
"""Advice moves by one engine, or by one per MANY from 2 · MANY engines on."""
WAITING = 0.1
"""A pool that waits for less than this share of the time counts as being at work."""
BOTH_WAIT = 0.2
"""Where both pools wait for this share of the time, neither is short."""
BUSY = 0.9
"""Reward workers that are at work for this share of the time have answers wait for their scores."""
SLACK = 0.3
"""Engines that have room for more prompts for this share of the time could do more."""
SHORTENED = 0.8
"""Where staleness leaves at most this share of the learning rate, less of it is worth a look."""
NEEDED = (
    "update_s",
    "trainer_wait_s",
    "straggler_wait_s",
    "engine_idle_share",
    "engine_full_share",
    "engines_serving",
)


class Short(StrEnum):
    """What a run would have to have more of."""

    ENGINES = "engines"
    TRAINERS = "trainers"
    NEITHER = "neither"
    """Both pools wait: for the longest answers, or for each other in turns."""
    REWARDS = "rewards"
    """Trainers wait for scores, which more engines would not give."""
    FRESHNESS = "freshness"
    """Nothing that GPUs would give, but answers are so stale that steps are short."""


@dataclass(frozen=True)
class Balance:
    """What the pools do in one update: means over several, in seconds."""

    engines: int
    update_s: float
    training_s: float
    """Trainers are at work."""
    straggler_s: float
    """Trainers wait for an answer longer than the rest, which more engines would not shorten."""
    generating_s: float
    """An engine has requests."""
    full_s: float
    """An engine has no room for more of them: only this part do more engines divide."""
    rewards_busy: float
    """Share of the time in which a reward worker has answers to score."""

    @classmethod
    def of(cls, updates: Sequence[dict[str, Any]]) -> Balance:
        """Returns the means over these update lines of metrics.jsonl, which have all the keys and equal numbers of
        engines."""

        def mean_of(seconds: Callable[[dict[str, Any]], float]) -> float:
            return sum(map(seconds, updates)) / len(updates)

        update_s = mean_of(itemgetter("update_s"))
        wait_s = min(mean_of(itemgetter("trainer_wait_s")), update_s)
        idle_s = mean_of(lambda update: update["update_s"] * update["engine_idle_share"])
        full_s = mean_of(lambda update: update["update_s"] * update["engine_full_share"])
        return cls(
            engines=updates[0]["engines_serving"],
            update_s=update_s,
            training_s=update_s - wait_s,
            straggler_s=min(mean_of(itemgetter("straggler_wait_s")), wait_s),
            generating_s=update_s - idle_s,
            full_s=min(full_s, update_s - idle_s),
            rewards_busy=mean_of(lambda update: update.get("reward_busy_share") or 0.0),
        )

    @property
    def trainer_idle(self) -> float:
        return 1 - self.training_s / self.update_s

    @property
    def engine_idle(self) -> float:
        return 1 - self.generating_s / self.update_s

    @property
    def engine_full(self) -> float:
        return self.full_s / self.update_s

    def update_s_with(self, engines: int, trainers: float = 1.0) -> float:
        """Returns the seconds per update with `engines` engines, and with trainers `trainers` times as fast.

        With the measured numbers it is the measured time: the pools' overlap and the time in which neither works come
        from the measurement.
        """
        trains, generates = self.training_s + self.straggler_s, self.generating_s
        longer, shorter = max(trains, generates), min(trains, generates)
        alone = min(max(self.update_s - longer, 0.0), shorter)
        resting_s = max(self.update_s - longer - alone, 0.0)
        trains = self.training_s / trainers + self.straggler_s
        generates += self.full_s * (self.engines / engines - 1)
        return max(trains, generates) + min(trains, generates) * (alone / shorter if shorter else 0.0) + resting_s

    def faster(self, engines: int, trainers: float = 1.0) -> float:
        """Returns by which share updates would be faster, below 0 if slower."""
        return self.update_s / self.update_s_with(engines, trainers) - 1

    @property
    def gain(self) -> float:
        """By which share updates would be faster with one engine more, or with an eighth more of many."""
        return self.faster(self.engines + self.step)

    @property
    def enough_engines(self) -> int | None:
        """The fewest engines beside which more are not worth their GPUs; None if that is not within half and twice as
        many as there are: so far off nothing was measured."""
        for engines in range(-(-self.engines // 2), 2 * self.engines + 1):
            if self.update_s_with(engines) < (1 + GAIN) * self.update_s_with(engines + _step(engines)):
                return engines
        return None

    @property
    def step(self) -> int:
        """How many engines more or fewer are worth a look."""
        return _step(self.engines)

    @property
    def short(self) -> Short | None:
        """What is short; None if there is nothing to gain."""
        if self.rewards_busy >= BUSY and self.trainer_idle >= WAITING:
            return Short.REWARDS
        if self.gain >= GAIN:
            return Short.ENGINES
        if self.straggler_s >= WAITING * self.update_s or min(self.trainer_idle, self.engine_idle) >= BOTH_WAIT:
            return Short.NEITHER
        return Short.TRAINERS if self.trainer_idle < WAITING and 1 - self.engine_full >= SLACK else None


@dataclass(frozen=True)
class Advice:
    """What a run's last updates say about its pools and its staleness."""

    short: Short
    line: str


def advise(config: Config, updates: Sequence[dict[str, Any]], has_room: bool = True) -> Advice | None:
    """Returns what to change in the split or the staleness of a run; None if nothing would gain enough, or if that is
    not certain yet.

    `updates` are the update lines of metrics.jsonl since the run began, or was resumed, last. The first
    η + 1 versions after that, or after an engine came or went, and the last η + 1 of the run are left out: engines
    have another amount of work then. Both halves of the rest must say the same, with gains that differ by a factor of
    two at most. Nothing is said of pools that share their GPUs, and of short engines where there is no room for another
    (`has_room`).
    """
    if config.mode != "rl" or config.machine.shared:
        return None
    steady = _steady(config, updates)
    if len(steady) < FEWEST_UPDATES:
        return None
    half = len(steady) // 2
    whole, halves = Balance.of(steady), [Balance.of(part) for part in (steady[:half], steady[half:])]
    gains = sorted(part.gain for part in halves)
    if {part.short for part in halves} != {whole.short} or gains[1] > 2 * gains[0] + GAIN:
        return None
    shortened = _shortened(config, steady)
    if whole.short is None or (whole.short is Short.ENGINES and not has_room):
        return Advice(Short.FRESHNESS, shortened) if shortened else None
    line = _line(config, whole, more_staleness=not shortened)
    return Advice(whole.short, f"{line}; {shortened}" if shortened else line)


def _shortened(config: Config, updates: Sequence[dict[str, Any]]) -> str:
    """Says what staleness costs the steps, and with how much less of it they would have nearly their whole length; ""
    where they have that. Steps may be as much longer as answers are fresher (areal_megatron/ppo/in_flight.py)."""
    if any(update.get(key) is None for update in updates for key in ("lr_factor", "staleness_mean")):
        return ""
    left, stale = (sum(update[key] for update in updates) / len(updates) for key in ("lr_factor", "staleness_mean"))
    fresher = max(1, round(stale * left))
    if left > SHORTENED or stale <= fresher:
        return ""
    return (
        f"answers {stale:.1f} versions old leave {left:.2f} of optimizer.lr={config.optimizer.lr:g}: "
        f"rollout.max_staleness={fresher} instead of {config.rollout.max_staleness} would let steps be "
        f"{min(stale / fresher, 1 / left):.1f} times as long, which pays unless updates take as much longer"
    )


def since_resumed(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the update lines since the run began, or was resumed, last, of all lines of metrics.jsonl."""
    begins = max((place for place, record in enumerate(records) if record["kind"] == "resume"), default=-1)
    return [record for record in records[begins + 1 :] if record["kind"] == "update"]


def _steady(config: Config, updates: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the last updates whose engines were the same and had the usual work."""
    settling = config.rollout.max_staleness + 1
    same: list[dict[str, Any]] = []
    for update in reversed(updates):
        if update["version"] > config.updates - settling:
            continue
        unusable = any(update.get(key) is None for key in NEEDED) or update.get("engines_unreached")
        if unusable or not update["update_s"] or not update["engines_serving"]:
            break
        if same and update["engines_serving"] != same[0]["engines_serving"]:
            break
        same.append(update)
        if len(same) == MOST_UPDATES + settling:
            break
    return same[: max(len(same) - settling, 0)][::-1]


def _line(config: Config, found: Balance, more_staleness: bool) -> str:
    engines, trainers_wait = found.engines, f"wait for {found.trainer_idle:.0%} of the time"
    if found.short is Short.REWARDS:
        return (
            f"reward workers are short: they have answers to score for {found.rewards_busy:.0%} of the time, trainers "
            f"{trainers_wait}; more of them (reward.workers) or a faster reward would help"
        )
    full = f"engines are full for {found.engine_full:.0%} of it"
    step = found.step
    others = [engines + step] + [engines - step] * (engines > 1)
    changes = "; ".join(f"{_engines(n)} would be {_change(found.faster(n))}" for n in others)
    if found.enough_engines not in (None, engines, *others):
        changes += f"; {_engines(found.enough_engines)} would do"
    if found.short is Short.NEITHER:
        more = f"more than rollout.max_staleness={config.rollout.max_staleness} would help; " if more_staleness else ""
        return (
            f"neither pool is short, batches wait for their longest answers, or for rewards: trainers {trainers_wait}, "
            f"{full}; {more}{changes}"
        )
    if found.short is Short.TRAINERS:
        return f"trainers are short: they {trainers_wait}, {full} and idle for {found.engine_idle:.0%}; {changes}"
    smaller, half = "", found.faster(engines, trainers=0.5)
    if config.trainer.dp % 2 == 0 and half > -GAIN:
        smaller = f"; half of trainer.dp={config.trainer.dp} would be {_change(half)}"
    return f"engines are short: trainers {trainers_wait}, {full}; {changes}{smaller}"


def _step(engines: int) -> int:
    """Returns how many engines more or fewer than `engines` are worth a look."""
    return max(1, engines // MANY)


def _engines(count: int) -> str:
    return f"{count} engine{'s' * (count > 1)}"


def _change(faster: float) -> str:
    """Returns a change of the speed in words."""
    if abs(faster) < 0.01:
        return "as fast"
    return f"{faster:.0%} faster" if faster > 0 else f"{-faster:.0%} slower"
