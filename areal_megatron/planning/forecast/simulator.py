"""A whole run in discrete events: the real `Schedule`, the real packing and the resharder's plan, on predicted times.

What happens and who waits for whom is as in controller/controller.py; only the clock is made up:

    a slot is free, or a version committed → Schedule.admit → the engine decodes → rewards → Schedule.finish
    enough have finished, trainers are free → Schedule.form_batch → TrainerTime → Schedule.applied → publish
    weights have arrived at an engine → it pauses, and prefills what it runs → Schedule.committed

tests/unit/planning/test_simulator.py holds it to this: no group is trained beyond its deadline, every prompt has one
disposition, every sampled token is trained, wasted or still under way, and the same seed gives the same run.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from areal_megatron.config import Config, ConfigError
from areal_megatron.controller.schedule import Group, Schedule, ScheduleState
from areal_megatron.planning.forecast.engine_time import EngineTime
from areal_megatron.planning.forecast.lengths import AnswerLengths
from areal_megatron.planning.forecast.simulated_engine import RunningAnswer, SimulatedEngine
from areal_megatron.planning.forecast.trainer_time import TrainerTime
from areal_megatron.planning.forecast.weights_time import WeightsTime

_MOST_IN_VAIN = 1000
"""Launches after which a run that gets no further is given up."""


@dataclass(frozen=True)
class Times:
    """What everything of a run takes."""

    engine: EngineTime
    trainer: TrainerTime
    weights: WeightsTime
    kv_tokens: float
    """Tokens that the KV cache of an engine holds."""
    reward_s: float
    alone: float = 1.0
    """What the times of an engine and a trainer rank are multiplied with while no other one works."""


@dataclass(frozen=True)
class Circumstances:
    """What is not in the config."""

    interruption: bool = True
    """Answers under way continue with new weights; otherwise an engine takes them once its answers have ended."""
    filtered: float = 0.0
    """Share of the groups that are filtered."""
    node_mtbf_s: float = math.inf
    """Mean time between two failures of a node."""
    return_s: float = 300.0
    """Until the engines of a node that failed serve again, or a run whose trainers failed has been launched again."""
    node_gpus: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.filtered < 1 and self.node_mtbf_s > 0 and self.return_s >= 0 and self.node_gpus >= 1):
            raise ConfigError(
                f"--filtered {self.filtered:g} --mtbf-hours {self.node_mtbf_s / 3600:g} --return-s {self.return_s:g}: "
                "expected a share below 1, a time above 0 and one of at least 0"
            )


@dataclass(frozen=True)
class TrainedUpdate:
    """One update of the simulated run."""

    version: int
    end: float
    """When it was done, in seconds since the launch."""
    tokens: int
    """Tokens of its answers."""
    training: float
    """How long trainers took, in seconds."""
    straggler_wait: float
    """How long enough finished groups waited for a running one, in seconds."""
    staleness: Counter[int]
    """Staleness → answers."""


@dataclass(frozen=True)
class SimulatedRun:
    """Results of a simulated run; only updates that survived all failures."""

    updates: list[TrainedUpdate]
    seconds: float
    gpus: int
    engine_busy: float
    """Share of the time in which an engine had something to do, the mean over all."""
    engine_full: float
    """Share of the time in which an engine had no room for another group, the mean over all."""
    trainer_busy: float
    sampled: float
    """Tokens, also of answers that were not trained."""
    trained: float
    """Sampled tokens that were trained in an update that survived."""
    under_way: float
    """Sampled tokens that would still be trained, had the simulation not ended."""
    prefilled_again: float
    """Tokens that an engine computed once more after an update, the mean over engines and updates."""
    prefilling_again: float
    """Share of the time in which an engine did that, the mean over all."""
    preempted: int
    """Times that an answer had to make room for others in an engine's memory."""
    failures: Counter[str] = field(default_factory=Counter)
    """engine node, trainer node → how often one failed."""

    @property
    def steady(self) -> list[TrainedUpdate]:
        """The later half of the updates, after what a run begins with."""
        return self.updates[len(self.updates) // 2 :]

    @property
    def tokens_per_s(self) -> float:
        """Trained answer tokens a second over the later half of the updates."""
        return sum(each.tokens for each in self.steady) / self._steady_s

    @property
    def update_s(self) -> float:
        """Seconds between two updates, the mean over the later half."""
        return self._steady_s / len(self.steady)

    def hours(self, updates: int) -> float:
        """Returns the hours that `updates` updates take; updates beyond the simulation count at the pace of its last
        ones."""
        return (self.seconds + (updates - len(self.updates)) * self.update_s) / 3600

    @property
    def wasted(self) -> float:
        """Share of the sampled tokens that were lost with an engine or filtered, or whose update was lost."""
        return max(0.0, 1 - (self.trained + self.under_way) / self.sampled)

    @property
    def staleness(self) -> Counter[int]:
        return sum((each.staleness for each in self.updates), Counter())

    @property
    def straggler_wait(self) -> float:
        """Share of the time in which trainers waited for a straggler though enough groups had finished."""
        return sum(each.straggler_wait for each in self.updates) / self.seconds

    @property
    def _steady_s(self) -> float:
        before = len(self.updates) - len(self.steady)
        return self.updates[-1].end - (self.updates[before - 1].end if before else 0.0)


@dataclass
class _Training:
    """A batch that trainers have."""

    batch: list[Group]
    tokens: int
    seconds: float
    """What it takes in all."""
    end: float


@dataclass(frozen=True)
class _Saved:
    """What a checkpoint holds of a run."""

    schedule: ScheduleState
    lengths: dict[int, tuple[int, np.ndarray]]
    again: list[tuple[int, int]]
    next_prompt: int
    updates: int


class Simulator:
    """Simulates one run.

    Example:
        run = Simulator(config, times, LognormalLengths(7000, 0.9, cap=27648), Circumstances()).run(updates=20)
        print(run.tokens_per_s, run.hours(config.updates))
    """

    def __init__(
        self,
        config: Config,
        times: Times,
        lengths: AnswerLengths,
        circumstances: Circumstances,
        rules: type[Schedule] = Schedule,
    ):
        """`rules`: the run's, if they differ from this project's. Raises ConfigError for trainers and engines that
        share GPUs and work at once, which no simulation knows."""
        if config.machine.shared and config.rollout.max_staleness > 0:
            raise ConfigError(
                "machine.shared: the simulator knows shared GPUs only with rollout.max_staleness=0, where trainers and "
                "engines take turns"
            )
        self._config, self._times, self._lengths, self._around = config, times, lengths, circumstances
        self._rules = rules
        self._rng = np.random.default_rng(circumstances.seed)
        self._now, self._events, self._order = 0.0, [], count()
        self._updates: list[TrainedUpdate] = []
        self._engine_busy = self._engine_full = self._trainer_busy = self._sampled = 0.0
        self._prefilled_again = self._prefilling_again = 0.0
        self._preempted, self._failures, self._incarnation = 0, Counter(), 0
        self._furthest = self._in_vain = 0
        self._saved: _Saved | None = None
        self._begin()

    def run(self, updates: int = 0, on_update: Callable[[TrainedUpdate], None] = lambda update: None) -> SimulatedRun:
        """Simulates until `updates` updates are done (0: all of the config's)."""
        wanted = min(updates or self._config.updates, self._config.updates)
        told = 0
        while len(self._updates) < wanted:
            if not self._events:
                raise ConfigError("lengths: the run came to a standstill; no answer ends and no batch is trained")
            self._now, _, incarnation, happen, *what = heapq.heappop(self._events)
            if incarnation in (self._incarnation, None):
                happen(*what)
                if self._times.alone < 1:
                    self._set_pace()
            for update in self._updates[told:]:
                on_update(update)
            told = len(self._updates)
        return self._result()

    # What a run begins with, again after a failure of its trainers

    def _begin(self) -> None:
        config, rollout = self._config, self._config.rollout
        self.schedule = self._rules(
            batch_size=config.batch_size,
            group_size=rollout.group_size,
            max_staleness=rollout.max_staleness,
            updates=config.updates,
        )
        self._data: dict[int, tuple[int, np.ndarray]] = {}
        self._ended: dict[int, list[int]] = {}
        self._groups: dict[int, Group] = {}
        self.again: deque[tuple[int, int]] = deque()
        """(epoch, prompt_id) of prompts that were lost and are to be admitted again."""
        self.prompts = 0
        """How many prompts have been drawn: they are numbered from 0, all of one epoch."""
        if self._saved:
            saved = self._saved
            self._data, self.prompts = dict(saved.lengths), saved.next_prompt
            lost = self.schedule.restore(saved.schedule)
            self.again.extend([*((g.epoch, g.prompt_id) for g in lost), *saved.again])
            for group in lost:
                del self._data[group.number]
        self._engines: dict[int, SimulatedEngine] = {}
        self._wakes: dict[int, float] = {}
        self._training: _Training | None = None
        self._trainer_pace = self._times.alone
        self._straggling_since = math.nan
        self._straggled = 0.0
        self._awaited: set[int] = set()
        self._wanting = 0
        """How many of these must finish, or be lost, before a batch may form."""
        self._weights_read = self._saved_until = 0.0
        for number in range(rollout.engines):
            self._serve(number)
        for pool, nodes in self._nodes().items():
            for node in range(nodes):
                self._fail_later(pool, node)
        self._dispatch(self._engines.values())
        self._train()

    def _nodes(self) -> dict[str, int]:
        gpus, per_node = self._config.rollout.engines * self._config.rollout.tp, self._around.node_gpus
        trainers = 0 if self._config.machine.shared else -(-self._config.trainer_ranks // per_node)
        return {"engine node": -(-gpus // per_node), "trainer node": trainers}

    def _serve(self, number: int) -> None:
        rollout = self._config.rollout
        room = rollout.max_running - rollout.group_size
        engine = SimulatedEngine(number, self._times.engine, self._times.kv_tokens, self.schedule.version, room)
        engine.now, engine.pace = self._now, self._times.alone
        self._engines[number] = engine
        self.schedule.add_engine(number, engine.version)

    def _at(self, time: float, happen: Callable[..., None], *what: Any) -> None:
        heapq.heappush(self._events, (time, next(self._order), self._incarnation, happen, *what))

    # Engines

    def _dispatch(self, engines: Any) -> None:
        """Gives groups to these engines, the least loaded first."""
        room = self._config.rollout.max_running - self._config.rollout.group_size
        free = {engine.number: engine for engine in engines if engine.pending is None}
        taken = set()
        for number in self.schedule.takers(free, lambda number: free[number].load, room, len(self._engines)):
            self._admit(free[number])
            taken.add(number)
        for number in taken:
            self._wake(self._engines[number])

    def _admit(self, engine: SimulatedEngine) -> None:
        if self.again:
            epoch, prompt = self.again.popleft()
        else:
            epoch, prompt = 0, self.prompts
            self.prompts += 1
        group = self.schedule.admit(engine.number, epoch, prompt)
        # of the prompt alone, so that runs that differ in something else have the same answers
        rng = np.random.default_rng((self._around.seed, prompt))
        tokens, answers = self._lengths.group(rng, self._config.rollout.group_size)
        self._data[group.number], self._ended[group.number] = (tokens, answers), []
        self._groups[group.number] = group
        engine.take([RunningAnswer(group.number, tokens, each) for each in answers.tolist()], self._now)

    def _wake(self, engine: SimulatedEngine) -> None:
        time = engine.next_event()
        self._wakes[engine.number] = time
        if math.isfinite(time):
            self._at(time, self._decoded, engine, time)

    def _decoded(self, engine: SimulatedEngine, time: float) -> None:
        if self._engines.get(engine.number) is engine and self._wakes[engine.number] == time:
            self._after(engine, engine.advance(self._now))

    def _after(self, engine: SimulatedEngine, ended: list[RunningAnswer]) -> None:
        for answer in ended:
            self._ended[answer.group].append(answer.tokens)
            if len(self._ended[answer.group]) == self._config.rollout.group_size:
                self._at(self._now + self._times.reward_s, self._scored, answer.group)
        if engine.pending is not None and not engine.load:
            self._pause(engine, engine.pending)
        self._dispatch([engine])
        self._wake(engine)

    def _scored(self, number: int) -> None:
        group = self._groups.get(number)
        if group is None or number not in self.schedule.running:  # lost with its engine while it was scored
            return
        self._left(number)
        if self._rng.random() < self._around.filtered:
            self.schedule.filter(group)
            self._forget(group)
            self._dispatch(self._engines.values())  # a group less that counts
        else:
            self.schedule.finish(group)
            self._dispatch([self._engines[group.engine]])  # a group less that runs there
        self._train()

    def _left(self, number: int) -> None:
        """Notes that a group does not run any more."""
        if number in self._awaited:
            self._awaited.discard(number)
            self._wanting -= 1

    def _forget(self, group: Group) -> None:
        for table in (self._data, self._ended, self._groups):
            table.pop(group.number, None)

    # Updates

    def _train(self) -> None:
        schedule = self.schedule
        if self._now < self._saved_until or schedule.training or len(schedule.finished) < schedule.groups_per_batch:
            return
        if self._wanting > 0:
            return
        batch = schedule.form_batch()
        self._wanting, self._awaited = schedule.awaited()
        if batch is None:
            if math.isnan(self._straggling_since):
                self._straggling_since = self._now
            return
        if not math.isnan(self._straggling_since):
            self._straggled, self._straggling_since = self._now - self._straggling_since, math.nan
        data = [self._data[group.number] for group in batch]
        answers = np.concatenate([each for _, each in data])
        prompts = np.repeat([tokens for tokens, _ in data], [len(each) for _, each in data])
        seconds = self._times.trainer.update(prompts, answers, schedule.version)
        # the first optimizer step waits until the weights of the version before have been read
        seconds *= self._trainer_pace
        first = self._now + seconds / self._config.ppo.minibatches
        end = self._now + seconds + max(0.0, self._weights_read - first)
        self._training = _Training(batch, int(answers.sum()), seconds, end)
        self._at(end, self._trained, self._training, end)

    def _trained(self, training: _Training, end: float) -> None:
        if training is not self._training or end != training.end:  # it took another pace meanwhile
            return
        self._training, seconds, tokens = None, training.seconds, training.tokens
        schedule = self.schedule
        version = schedule.version
        staleness: Counter[int] = Counter()
        for group in training.batch:
            staleness[version - group.admission_version] += len(self._data[group.number][1])
            self._forget(group)
        schedule.applied()
        self._trainer_busy += seconds
        if schedule.version > self._furthest:
            self._furthest, self._in_vain = schedule.version, 0
        self._updates.append(TrainedUpdate(version, self._now, tokens, seconds, self._straggled, staleness))
        self._straggled = 0.0
        self._weights_read = self._now + self._times.weights.transfer
        streamed = self._config.reshard.staging == "streamed"  # then engines are paused while they receive
        for engine in self._engines.values():
            self._at(self._now if streamed else self._weights_read, self._arrived, engine, schedule.version)
        every = self._config.checkpoint.every
        if every and schedule.version % every == 0:
            self._save()
            self._saved_until = self._now + self._times.weights.checkpoint
            self._at(self._saved_until, self._train)
        else:
            self._train()

    def _arrived(self, engine: SimulatedEngine, version: int) -> None:
        if self._engines.get(engine.number) is not engine:
            return
        if self._around.interruption or not engine.load:
            self._pause(engine, version)
        else:
            engine.pending = version

    def _pause(self, engine: SimulatedEngine, version: int) -> None:
        ended = engine.advance(self._now)
        engine.pending = None
        again = self._config.rollout.kv_policy == "recompute"
        engine.pause(self._now, self._times.weights.commit, again)
        self._at(self._now + self._times.weights.commit, self._committed, engine, version)
        if ended:
            self._after(engine, ended)
        self._wake(engine)

    def _committed(self, engine: SimulatedEngine, version: int) -> None:
        if self._engines.get(engine.number) is engine:
            is_first = self.schedule.newest is None or version > self.schedule.newest
            self.schedule.committed(engine.number, version)
            self._dispatch(self._engines.values() if is_first else [engine])  # by the first, all have larger shares

    # Who works beside whom

    def _set_pace(self) -> None:
        """Has everybody take the pace at which they work beside those who do now: faster if nobody else does."""
        ranks, tp = self._config.trainer_ranks, self._config.rollout.tp
        engines = sum(engine.load > 0 for engine in self._engines.values())
        at_work = (self._training is not None) * ranks + engines * tp

        def pace(own: int, works: bool) -> float:
            return self._times.alone if at_work + (not works) * own == 1 else 1.0

        before, self._trainer_pace = self._trainer_pace, pace(ranks, self._training is not None)
        if (training := self._training) is not None and self._trainer_pace != before:
            added = (training.end - self._now) * (self._trainer_pace / before - 1)
            training.seconds, training.end = training.seconds + added, training.end + added
            self._at(training.end, self._trained, training, training.end)
        for engine in self._engines.values():
            own = pace(tp, engine.load > 0)
            if own != engine.pace:
                ended = engine.advance(self._now)
                engine.pace = own
                self._after(engine, ended)

    # Failures

    def _fail_later(self, pool: str, node: int) -> None:
        if math.isfinite(self._around.node_mtbf_s):
            self._at(self._now + self._rng.exponential(self._around.node_mtbf_s), self._fail, pool, node)

    def _fail(self, pool: str, node: int) -> None:
        self._failures[pool] += 1
        if pool == "trainer node":
            self._relaunch()
            return
        rollout, per_node = self._config.rollout, self._around.node_gpus
        first, last = node * per_node // rollout.tp, -(-(node + 1) * per_node // rollout.tp)
        for number in range(first, min(last, rollout.engines)):
            if engine := self._engines.pop(number, None):
                self._lose(engine)
                self._at(self._now + self._around.return_s, self._returned, number)
        self._fail_later(pool, node)
        self._dispatch(self._engines.values())
        self._train()

    def _lose(self, engine: SimulatedEngine) -> None:
        self._count(engine)
        for group in self.schedule.remove_engine(engine.number):
            self.again.append((group.epoch, group.prompt_id))
            self._left(group.number)
            self._forget(group)

    def _count(self, engine: SimulatedEngine) -> None:
        engine.advance(self._now)
        self._engine_busy += engine.busy
        self._engine_full += engine.full
        self._sampled += engine.sampled
        self._prefilled_again += engine.prefilled_again
        self._prefilling_again += engine.prefilling_again
        self._preempted += engine.preempted

    def _returned(self, number: int) -> None:
        self._serve(number)
        self._dispatch([self._engines[number]])
        self._train()

    def _save(self) -> None:
        schedule = self.schedule
        running = [(group.epoch, group.prompt_id) for group in schedule.running.values()]
        finished = {number: self._data[number] for number in schedule.finished}
        again = [*running, *self.again]
        self._saved = _Saved(schedule.save(), finished, again, self.prompts, len(self._updates))

    def _relaunch(self) -> None:
        """Everything begins again from the last checkpoint, or from the model."""
        for engine in self._engines.values():
            self._count(engine)
        self._engines, self._training = {}, None
        kept = self._saved.updates if self._saved else 0
        del self._updates[kept:]
        self._incarnation += 1
        self._in_vain += 1
        if self._in_vain > _MOST_IN_VAIN:
            raise ConfigError(
                f"--mtbf-hours {self._around.node_mtbf_s / 3600:g}: the run was launched {_MOST_IN_VAIN} times without "
                f"reaching version {self._furthest + 1}: nodes live too short for checkpoint.every="
                f"{self._config.checkpoint.every}"
            )
        self._at(self._now + self._around.return_s, self._begin)

    # What came out

    def _result(self) -> SimulatedRun:
        for engine in self._engines.values():
            self._count(engine)
        rollout, config = self._config.rollout, self._config
        engine_gpus = rollout.engines * rollout.tp
        shared = config.machine.shared
        trained = sum(update.tokens for update in self._updates)
        return SimulatedRun(
            updates=self._updates,
            seconds=self._now,
            gpus=max(engine_gpus, config.trainer_ranks) if shared else engine_gpus + config.trainer_ranks,
            engine_busy=self._engine_busy / (self._now * rollout.engines),
            engine_full=self._engine_full / (self._now * rollout.engines),
            trainer_busy=min(1.0, self._trainer_busy / self._now),
            sampled=self._sampled,
            trained=trained,
            under_way=self._under_way(),
            prefilled_again=self._prefilled_again / (len(self._updates) * rollout.engines),
            prefilling_again=self._prefilling_again / (self._now * rollout.engines),
            preempted=self._preempted,
            failures=self._failures,
        )

    def _under_way(self) -> float:
        """The tokens of answers that may still be trained."""
        done = [self._data[group.number][1].sum() for group in self.schedule.finished.values()]
        done += [self._data[group.number][1].sum() for group in self.schedule.training]
        done += [sum(self._ended[number]) for number in self.schedule.running]
        return float(sum(done) + sum(engine.under_way for engine in self._engines.values()))
