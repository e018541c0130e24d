"""The decisions of the rollout as a pure state machine: which groups are admitted, and which a batch trains.

No I/O, no clock, no asyncio: the controller tells it what happened and asks what may happen next. The unit is the
group: the n trajectories of one prompt, admitted together on one engine; G = B / n groups make a batch. Three rules
hold for every sequence of events (tests/unit/controller/test_schedule.py draws thousands):

1. A trained group was admitted at most `max_staleness` versions before the version that trains it.
2. Once everything in flight has finished, a batch forms or another group may be admitted, as long as the engines have
   committed the current version: nothing deadlocks.
3. Each (epoch, prompt) ends with exactly one disposition: trained, filtered or skipped.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil
from operator import attrgetter

from areal_megatron.controller.lead import Lead

TRAINED = "trained"
FILTERED = "filtered"


class ScheduleError(RuntimeError):
    """The schedule was told of an event that cannot happen in its state."""


@dataclass(frozen=True)
class Group:
    """The n trajectories of one prompt, from their admission to their disposition."""

    number: int
    """Admission number in the run, from 0; trajectory k of the group has uid number * n + k."""
    epoch: int
    prompt_id: int
    engine: int
    admission_version: int
    """Version that the engine had committed when it took the group."""
    deadline: int
    """Last version that may train it: admission_version + max_staleness."""


@dataclass(frozen=True)
class ScheduleState:
    """What is saved of a schedule, between two batches and without engines."""

    version: int
    admitted: int
    dispositions: list[tuple[int, int, str]]
    """(epoch, prompt_id, disposition)"""
    finished: list[Group]
    interrupted: list[Group]
    """Groups that are to be resumed; the other running ones are to be admitted again."""


class Schedule:
    """Groups in flight and finished, engines with their versions, and the version that trains next.

    Example:
        schedule = Schedule(batch_size=2, group_size=2, max_staleness=1, updates=10)
        schedule.add_engine(0, version=0)
        if schedule.may_admit(0):
            group = schedule.admit(0, epoch=0, prompt_id=17)
            schedule.finish(group)  # its answers have been scored
        if schedule.form_batch() is not None:
            schedule.applied()  # schedule.version is 1 now
            schedule.committed(0, version=1)
    """

    def __init__(self, *, batch_size: int, group_size: int, max_staleness: int, updates: int):
        """`batch_size` (B) is in trajectories and a multiple of `group_size` (n); `updates` batches are trained in all.
        Raises ValueError if batch_size is no multiple."""
        if batch_size % group_size:
            raise ValueError(f"group_size={group_size} does not divide batch_size={batch_size}")
        self.groups_per_batch = batch_size // group_size
        self.max_staleness = max_staleness
        self._lead = Lead(max_staleness)
        self.updates = updates
        self.version = 0
        self.engines: dict[int, int] = {}
        """Committed version of each engine that may take groups."""
        self.newest: int | None = None
        """The newest of these; None without engines."""
        self.dispositions: dict[tuple[int, int], str] = {}
        """(epoch, prompt_id) → "trained", "filtered" or "skipped: REASON"."""
        self.counts: Counter[str] = Counter()
        """Dispositions so far by kind: trained, filtered, skipped."""
        self.running: dict[int, Group] = {}
        self._running_on: Counter[int] = Counter()
        """Running groups, by engine."""
        self.interrupted: dict[int, Group] = {}
        """Groups that were interrupted before this schedule was restored and that no engine has resumed yet."""
        self.finished: dict[int, Group] = {}
        self.training: list[Group] = []
        self.held_up_by: int | None = None
        """The deadline that no batch would meet until another unfinished group with it, or with an earlier one, ends;
        None unless enough groups have finished for a batch. Thousands of groups are not gone through for each that ends
        meanwhile."""
        self._admitted = 0

    @property
    def ahead(self) -> float:
        """The batches that may be under way beside the one that trains next, at most `max_staleness`."""
        return self._lead.batches

    def add_engine(self, engine: int, version: int) -> None:
        if engine in self.engines:
            raise ScheduleError(f"engine {engine} is already there")
        self._commit(engine, version)

    def remove_engine(self, engine: int) -> list[Group]:
        """Forgets the engine. Returns its running groups, which leave N_r and are to be admitted again or skipped."""
        del self.engines[engine]
        self.newest = max(self.engines.values(), default=None)
        lost = [group for group in self.running.values() if group.engine == engine]
        for group in lost:
            self._leave_running(group)
        return lost

    def committed(self, engine: int, version: int) -> None:
        """Records that the engine samples from `version` now."""
        if not self.engines[engine] <= version <= self.version:
            raise ScheduleError(
                f"engine {engine} cannot go from version {self.engines[engine]} to {version}, "
                f"the policy is at {self.version}"
            )
        self._commit(engine, version)

    def may_admit(self, engine: int) -> bool:
        """Returns whether the engine may take another group, by Equation 3 of the paper (arXiv 2505.24298) with the
        engine's own version: floor((N_r − 1) / B) ≤ v + η, this group included in N_r.

        In groups, with c counted before this one, that is c < (v + η + 1) · G. `ahead`, which is at most η, stands in
        its place, but for groups of the batch that trains next: nobody is to wait for those. Groups that only versions
        after the last could train are not admitted.
        """
        return self._counted() < self._admitted_by(self.engines[engine])

    def share(self, engines: int) -> int:
        """Returns how many groups each of n engines should run now: 1/n, rounded up, of the groups that would run if
        everything the newest committed version admits were admitted.

        Without this share, the first engine to commit a version takes every group that the version admits, as far as it
        has room, and everybody waits for its answers. The parts are enough for all: while a group may begin, an engine
        has fewer.
        """
        newest = self.version if self.newest is None else self.newest
        admitted = self._admitted_by(newest)
        waiting = self.version * self.groups_per_batch + len(self.finished) + len(self.training)
        return max(ceil((admitted - waiting) / max(engines, 1)), 1)

    def takers(self, engines: Iterable[int], load: Callable[[int], int], most_load: int, sharing: int) -> Iterator[int]:
        """Yields the engine that is to take the next group, until none of `engines` may: the least loaded with at most
        `most_load`, within its share of what `sharing` engines share. It must take the group before the next is asked
        for.

        Engines are looked at once for all groups: thousands of them, for each group, would take seconds.
        """
        share = self.share(sharing)

        def has_room(engine: int) -> bool:
            return load(engine) <= most_load and self.running_on(engine) < share

        free = [(load(engine), engine) for engine in engines if has_room(engine)]
        heapq.heapify(free)
        while free:
            _, engine = heapq.heappop(free)
            if self.interrupted or self.may_admit(engine):
                yield engine
                if has_room(engine):
                    heapq.heappush(free, (load(engine), engine))

    def running_on(self, engine: int) -> int:
        """Returns how many groups run on the engine."""
        return self._running_on[engine]

    def admit(self, engine: int, epoch: int, prompt_id: int) -> Group:
        """Starts a group on the engine. Raises ScheduleError unless `may_admit`, or if the prompt has a disposition."""
        if not self.may_admit(engine):
            raise ScheduleError(f"engine {engine} at version {self.engines[engine]} may not take another group")
        self._check_undisposed(epoch, prompt_id)
        version = self.engines[engine]
        group = Group(self._admitted, epoch, prompt_id, engine, version, version + self.max_staleness)
        self._admitted += 1
        return self._run(group)

    def resume(self, engine: int) -> Group:
        """Starts the interrupted group with the oldest deadline on this engine; it keeps its admission version."""
        if engine not in self.engines or not self.interrupted:
            raise ScheduleError(f"engine {engine} has nothing to resume")
        first = min(self.interrupted.values(), key=_by_deadline)
        return self._run(replace(self.interrupted.pop(first.number), engine=engine))

    def finish(self, group: Group) -> None:
        """Records that all trajectories of the group are sampled and scored: it may be trained."""
        self.finished[group.number] = self._leave_running(group)

    def filter(self, group: Group) -> None:
        """Drops a group that carries nothing to train on; it leaves N_r."""
        self._leave_running(group)
        self._dispose(group.epoch, group.prompt_id, FILTERED)

    def fail(self, group: Group, reason: str) -> None:
        """Drops a group that failed; it leaves N_r."""
        self._leave_running(group)
        self.skip_prompt(group.epoch, group.prompt_id, reason)

    def skip_prompt(self, epoch: int, prompt_id: int, reason: str) -> None:
        """Records that the prompt is not admitted in this epoch."""
        self._dispose(epoch, prompt_id, f"skipped: {reason}")

    def form_batch(self) -> list[Group] | None:
        """Returns the G groups that train version `version`, ordered by (epoch, prompt_id); None if it is too early.

        Oldest deadline first among the finished, and only if every deadline stays feasible: for every
        k ≥ version, the groups left over with deadline ≤ k are at most (k − version) · G.
        """
        if self.training:
            raise ScheduleError(f"the batch of version {self.version} is still in training")
        if self.held_up_by is not None or len(self.finished) < self.groups_per_batch:
            return None
        batch = self._oldest_finished()
        if late := self.late_without(batch):
            self.held_up_by = min(late)
            return None
        self._lead.began(self._counted() / self.groups_per_batch - self.version)
        for group in batch:
            del self.finished[group.number]
        self.training = sorted(batch, key=lambda group: (group.epoch, group.prompt_id))
        return list(self.training)

    def awaited(self) -> tuple[int, set[int]]:
        """Returns how many groups a batch still waits for to finish or leave N_r, and the candidates."""
        if self.training or len(self.finished) < self.groups_per_batch:
            return 0, set()
        late = self.late_without(self._oldest_finished())
        if not late:
            return 0, set()
        deadline = max(late, key=late.__getitem__)
        unfinished = [*self.running.values(), *self.interrupted.values()]
        return late[deadline], {group.number for group in unfinished if group.deadline <= deadline}

    def late_without(self, batch: list[Group]) -> dict[int, int]:
        """Returns the deadlines that cannot all be met if `batch` trains now → how many groups are too many for it."""
        left_by_deadline = Counter(map(_deadline, self._in_flight()))
        left_by_deadline.subtract(map(_deadline, batch))  # which is a part of them
        late, left = {}, 0
        for deadline in sorted(deadline for deadline, count in left_by_deadline.items() if count):
            left += left_by_deadline[deadline]
            if left > (most := (deadline - self.version) * self.groups_per_batch):
                late[deadline] = left - most
        return late

    def applied(self) -> None:
        """Records that the update of the batch in training is done: the policy is one version further."""
        for group in self._take_training():
            self._dispose(group.epoch, group.prompt_id, TRAINED)
        self.version += 1

    def rejected(self, reason: str) -> None:
        """Records that every optimizer step of the batch was skipped: its groups leave N_r and the version stays.

        The run does not make up for the update: it reaches one version less.
        """
        for group in self._take_training():
            self.skip_prompt(group.epoch, group.prompt_id, reason)
        self.updates -= 1

    def close(self, reason: str) -> None:
        """Skips whatever is still in flight: it will not be trained."""
        for group in [*self._in_flight(), *self.training]:
            self.skip_prompt(group.epoch, group.prompt_id, reason)
        self.running, self.interrupted, self.finished, self.training = {}, {}, {}, []
        self._running_on.clear()

    def save(self, interrupted: Collection[int] = ()) -> ScheduleState:
        """Returns the state for a later schedule to restore. No batch may be in training.

        Running groups whose numbers are in `interrupted` are kept; the others are to be admitted again.
        """
        if self.training:
            raise ScheduleError(f"the batch of version {self.version} is still in training")
        disposed = [(epoch, prompt_id, kind) for (epoch, prompt_id), kind in self.dispositions.items()]
        kept = [*self.interrupted.values(), *(self.running[number] for number in interrupted)]
        return ScheduleState(self.version, self._admitted, disposed, list(self.finished.values()), kept)

    def restore(self, saved: ScheduleState) -> list[Group]:
        """Continues from a saved state, with this schedule's bound; to be called before any engine is added.

        Returns the finished and interrupted groups that this bound has no place for: they leave N_r and are to be
        admitted again.
        """
        self.version, self._admitted = saved.version, saved.admitted
        for epoch, prompt_id, disposition in saved.dispositions:
            self._dispose(epoch, prompt_id, disposition)
        finished = {group.number for group in saved.finished}
        bounded = [
            replace(group, deadline=group.admission_version + self.max_staleness)
            for group in (*saved.finished, *saved.interrupted)
        ]
        lost = []
        for group in sorted(bounded, key=_by_deadline):
            # All kept so far have a deadline as early or earlier, and must train up to this one.
            if len(self.finished) + len(self.interrupted) < (group.deadline - self.version + 1) * self.groups_per_batch:
                (self.finished if group.number in finished else self.interrupted)[group.number] = group
            else:
                lost.append(group)
        return lost

    def _counted(self) -> int:
        """N_r / n: the number of admitted groups that were not filtered, failed or left untrained."""
        trained = self.version * self.groups_per_batch
        return trained + len(self.running) + len(self.interrupted) + len(self.finished) + len(self.training)

    def _admitted_by(self, version: int) -> float:
        """The number of groups that an engine with this version may have counted when it takes none any more."""
        ahead = max(self.ahead, min(self.version - version, self.max_staleness))
        return min(version + ahead + 1, self.updates) * self.groups_per_batch

    def _oldest_finished(self) -> list[Group]:
        return sorted(self.finished.values(), key=_by_deadline)[: self.groups_per_batch]

    def _commit(self, engine: int, version: int) -> None:
        self.engines[engine] = version
        self.newest = version if self.newest is None else max(self.newest, version)

    def _in_flight(self) -> Iterator[Group]:
        return chain(self.running.values(), self.interrupted.values(), self.finished.values())

    def _run(self, group: Group) -> Group:
        self.running[group.number] = group
        self._running_on[group.engine] += 1
        return group

    def _leave_running(self, group: Group) -> Group:
        if (running := self.running.pop(group.number, None)) is None:
            raise ScheduleError(f"group {group.number} (epoch {group.epoch}, prompt {group.prompt_id}) is not running")
        self._running_on[running.engine] -= 1
        if self.held_up_by is not None and group.deadline <= self.held_up_by:
            self.held_up_by = None
        return group

    def _take_training(self) -> list[Group]:
        if not self.training:
            raise ScheduleError(f"no batch of version {self.version} is in training")
        batch, self.training = self.training, []
        self._lead.ready(len(self.finished) / self.groups_per_batch)
        return batch

    def _check_undisposed(self, epoch: int, prompt_id: int) -> None:
        if (epoch, prompt_id) in self.dispositions:
            raise ScheduleError(f"prompt {prompt_id} of epoch {epoch} is already {self.dispositions[epoch, prompt_id]}")

    def _dispose(self, epoch: int, prompt_id: int, disposition: str) -> None:
        self._check_undisposed(epoch, prompt_id)
        self.dispositions[epoch, prompt_id] = disposition
        self.counts[disposition.partition(":")[0]] += 1


_by_deadline = attrgetter("deadline", "number")
_deadline = attrgetter("deadline")
