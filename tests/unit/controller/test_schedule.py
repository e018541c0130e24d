"""The schedule against an independent account of the same random events, kept in trajectories, not groups."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_megatron.controller.schedule import Schedule, ScheduleError
from tools.bench.equal_staleness import EqualStaleness

RANDOM_SCHEDULES = 500


class World:
    """Draws a random run and keeps its own books: when was what admitted, and where did it end."""

    def __init__(self, rng):
        self.rng = rng
        self.n = rng.choice([1, 2, 4])
        self.groups_per_batch = rng.choice([1, 2, 4])
        self.batch_size = self.n * self.groups_per_batch
        self.staleness = rng.choice([0, 1, 2, 4, 8])
        self.restarts = rng.choice([0.005, 0.05])
        self.raised = self.lowered = 0
        """How often the bound was changed."""
        self.shortened = 0
        """How often the lead was shorter than the bound."""
        self.filter_share = rng.choice([0.0, 0.15, 0.4])
        self.exact = rng.random() < 0.3
        self.updates = rng.choice([3, 10_000, 10_000])
        self.schedule = self.new_schedule()
        self.version = 0
        self.engines = {}
        self.running = []
        self.interrupted = []
        self.finished = []
        self.training = []
        self.ended = {}
        self.next_prompt = 0
        self.returned = []
        self.awaited = 0, set()
        for _ in range(rng.randint(1, 4)):
            self.add_engine()

    def new_schedule(self):
        kind = EqualStaleness if self.exact else Schedule
        return kind(batch_size=self.batch_size, group_size=self.n, max_staleness=self.staleness, updates=self.updates)

    def add_engine(self):
        engine = len(self.engines)
        self.engines[engine] = self.version
        self.schedule.add_engine(engine, self.version)

    def trajectories_counted(self):
        return (
            self.n * (len(self.running) + len(self.interrupted) + len(self.finished) + len(self.training))
            + self.version * self.batch_size
        )

    def equation_3_allows(self, engine):
        """With the lead in place of η, but for the batch that trains next."""
        with_this, ahead = self.trajectories_counted() + self.n, self.schedule.ahead
        assert min(1, self.staleness) <= ahead <= self.staleness and (ahead == self.staleness or not self.exact)
        self.shortened += ahead < self.staleness
        ahead = max(ahead, min(self.version - self.engines[engine], self.staleness))
        return (with_this - self.n) / self.batch_size < self.engines[engine] + ahead + 1

    def allows(self, engine):
        return self.equation_3_allows(engine) and self.trajectories_counted() < self.updates * self.batch_size

    def try_admit(self, engine):
        allowed = self.allows(engine)
        assert self.schedule.may_admit(engine) == allowed
        held = Counter(group.engine for group in self.running)
        engines = self.schedule.engines
        assert all(self.schedule.running_on(each) == held[each] for each in engines)
        share = self.schedule.share(len(engines))
        assert not any(map(self.allows, engines)) or min(held[each] for each in engines) < share, "one has room for it"
        if not allowed:
            with pytest.raises(ScheduleError):
                self.schedule.admit(engine, 0, 10**9)
            return False
        prompt = self.returned.pop() if self.returned else self.next_prompt
        self.next_prompt += prompt == self.next_prompt
        group = self.schedule.admit(engine, prompt // 5, prompt)
        assert group.admission_version == self.engines[engine]
        self.running.append(group)
        return True

    def end(self, key, how):
        assert key not in self.ended
        self.ended[key] = how

    def finish_one(self):
        newest_first = self.rng.random() < 0.7
        group = self.running.pop(-1 if newest_first else self.rng.randrange(len(self.running)))
        fate = self.rng.random()
        if fate < self.filter_share:
            self.schedule.filter(group)
            self.end((group.epoch, group.prompt_id), "filtered")
        elif fate < self.filter_share + 0.05:
            self.schedule.fail(group, "failed")
            self.end((group.epoch, group.prompt_id), "skipped: failed")
        else:
            self.schedule.finish(group)
            self.finished.append(group)

    def try_batch(self):
        wanted, awaited = self.awaited
        batch = self.schedule.form_batch()
        self.awaited = self.schedule.awaited()
        if batch is None:
            assert self.exact or len(self.finished) < self.groups_per_batch or self.awaited[0] > 0
            return False
        left = awaited - {group.number for group in (*self.running, *self.interrupted)}
        assert len(left) >= wanted, "a batch formed before as many as it waited for had ended"
        assert len(batch) == self.groups_per_batch
        if self.exact:
            assert not self.running and not self.interrupted and self.version in self.schedule.engines.values()
            assert not any(map(self.allows, self.schedule.engines))
        assert [(g.epoch, g.prompt_id) for g in batch] == sorted((g.epoch, g.prompt_id) for g in batch)
        youngest_taken = max((g.deadline, g.number) for g in batch)
        for group in batch:
            assert self.version - group.admission_version <= self.staleness
            self.finished.remove(group)
        assert all((g.deadline, g.number) > youngest_taken for g in self.finished), "an older one was left over"
        self.training = batch
        return True

    def end_training(self):
        if self.rng.random() < 0.1:
            self.schedule.rejected("non-finite gradients")
            self.updates -= 1
            how = "skipped: non-finite gradients"
        else:
            self.schedule.applied()
            self.version += 1
            how = "trained"
        for group in self.training:
            self.end((group.epoch, group.prompt_id), how)
        self.training = []
        assert self.schedule.version == self.version

    def commit(self, engine):
        lags = self.rng.random() < 0.3
        version = self.rng.randint(self.engines[engine], self.version) if lags else self.version
        self.engines[engine] = version
        self.schedule.committed(engine, version)

    def lose_engine(self):
        engine = self.rng.choice(list(self.schedule.engines))
        lost = self.schedule.remove_engine(engine)
        assert lost == [g for g in self.running if g.engine == engine]
        self.running = [g for g in self.running if g.engine != engine]
        for group in lost:
            if self.rng.random() < 0.5:
                self.returned.append(group.prompt_id)
            else:
                self.schedule.skip_prompt(group.epoch, group.prompt_id, "engine lost")
                self.end((group.epoch, group.prompt_id), "skipped: engine lost")

    def restart(self):
        """A new schedule continues from what the old one saved, perhaps with another bound.

        What ran is run again; some of it was interrupted and is resumed, counted as admitted when it was.
        """
        if self.training:
            with pytest.raises(ScheduleError, match="in training"):
                self.schedule.save()
            return
        interrupted = [group.number for group in self.running if self.rng.random() < 0.4]
        saved = self.schedule.save(interrupted)
        if self.rng.random() < 0.5:
            before, self.staleness = self.staleness, self.rng.choice([0, 1, 2, 4, 8])
            self.raised += self.staleness > before
            self.lowered += self.staleness < before
        self.schedule, self.awaited = self.new_schedule(), (0, set())
        lost = self.schedule.restore(saved)
        numbers = {group.number for group in lost}
        admitted = {
            group.number: group.admission_version for group in (*self.finished, *self.running, *self.interrupted)
        }
        kept = {*(group.number for group in (*self.finished, *self.interrupted)), *interrupted}
        assert numbers <= kept
        self.returned += [group.prompt_id for group in self.running if group.number not in kept]
        self.returned += [group.prompt_id for group in lost]
        self.running, self.finished = [], list(self.schedule.finished.values())
        self.interrupted = list(self.schedule.interrupted.values())
        assert {g.number for g in (*self.finished, *self.interrupted)} == kept - numbers
        for group in (*self.finished, *self.interrupted):
            assert group.admission_version == admitted[group.number]
            assert group.deadline == group.admission_version + self.staleness >= self.version
        self.engines = {}
        self.add_engine()

    def resume(self):
        """An engine takes the interrupted group with the oldest deadline, whatever Eq. 3 says of new ones."""
        engine = self.rng.choice(list(self.schedule.engines))
        group = self.schedule.resume(engine)
        (interrupted,) = [other for other in self.interrupted if other.number == group.number]
        assert group.engine == engine and group.admission_version == interrupted.admission_version
        assert group.deadline == min(other.deadline for other in self.interrupted)
        self.interrupted.remove(interrupted)
        self.running.append(group)

    def step(self):
        assert self.schedule.newest == max(self.schedule.engines.values(), default=None)
        act = self.rng.random()
        if self.rng.random() < self.restarts:
            self.restart()
        if act < 0.20 and self.schedule.engines and self.interrupted:
            self.resume()
        elif act < 0.40 and self.schedule.engines:
            self.try_admit(self.rng.choice(list(self.schedule.engines)))
        elif act < 0.72 and self.running:
            self.finish_one()
        elif act < 0.82 and self.schedule.engines:
            self.commit(self.rng.choice(list(self.schedule.engines)))
        elif act < 0.825:
            self.add_engine()
        elif act < 0.83 and len(self.schedule.engines) > 1:
            self.lose_engine()
        elif self.training:
            self.end_training()
        elif self.version < self.updates:
            self.try_batch()

    def assert_alive(self):
        """With everything in flight finished and every engine up to date, the run can always continue."""
        if self.training:
            self.end_training()
        while self.interrupted:
            self.resume()
        for group in self.running:
            self.schedule.finish(group)
        self.finished, self.running = self.finished + self.running, []
        assert self.schedule.awaited()[0] == 0
        for engine in self.schedule.engines:
            self.schedule.committed(engine, self.version)
            self.engines[engine] = self.version
        if self.version < self.updates and not self.try_batch():
            engine = next(iter(self.schedule.engines))
            assert self.try_admit(engine), "deadlock: no batch forms and nothing may be admitted"

    def assert_books_agree(self):
        assert self.schedule.dispositions == self.ended
        assert sum(self.schedule.counts.values()) == len(self.ended)

    def play(self, steps):
        for _ in range(steps):
            self.step()
        self.assert_alive()
        self.assert_books_agree()
        for group in self.running + self.interrupted + self.finished + self.training:
            self.end((group.epoch, group.prompt_id), "skipped: the run ended")
        self.schedule.close("the run ended")
        self.assert_books_agree()


class Choices(random.Random):
    """A random source that replays drawn numbers, so that hypothesis can shrink a failing schedule."""

    def __init__(self, numbers):
        super().__init__(0)
        self.numbers = iter(numbers)

    def random(self):
        return next(self.numbers, 0) / 1000

    def getrandbits(self, bits):
        return next(self.numbers, 0) & ((1 << bits) - 1)


@given(st.lists(st.integers(0, 999), min_size=150, max_size=600))
@settings(max_examples=100, deadline=None)
def test_any_schedule_keeps_the_rules(numbers):
    World(Choices(numbers)).play(steps=len(numbers) // 2)


def test_long_random_schedules_keep_the_rules():
    worlds = [World(random.Random(seed)) for seed in range(RANDOM_SCHEDULES)]
    for world in worlds:
        world.play(steps=400)
    assert sum(world.version for world in worlds) > 10 * RANDOM_SCHEDULES, "the schedules hardly trained anything"
    for changes in ("raised", "lowered"):
        assert sum(getattr(world, changes) > 0 for world in worlds) > RANDOM_SCHEDULES / 3, (
            "the bound was hardly changed"
        )
    assert sum(world.shortened > 0 for world in worlds) > RANDOM_SCHEDULES / 3, "the lead was hardly shortened"


@pytest.mark.soak
def test_many_more_random_schedules_keep_the_rules():
    for seed in range(RANDOM_SCHEDULES, 60_000):
        World(random.Random(seed)).play(steps=1000)


def schedule(staleness=1, batch_size=4, group_size=2, updates=100):
    it = Schedule(batch_size=batch_size, group_size=group_size, max_staleness=staleness, updates=updates)
    it.add_engine(0, 0)
    return it


def test_synchronous_runs_admit_one_batch_and_train_it():
    it = schedule(staleness=0)
    a, b = it.admit(0, 0, 7), it.admit(0, 0, 3)
    assert not it.may_admit(0)
    it.finish(a)
    assert it.form_batch() is None
    it.finish(b)
    assert it.form_batch() == [b, a]
    assert not it.may_admit(0)
    it.applied()
    assert not it.may_admit(0), "the engine has not committed version 1 yet"
    it.committed(0, 1)
    assert it.may_admit(0)


def test_equal_staleness_trains_every_group_as_late_as_the_bound_allows():
    it = EqualStaleness(batch_size=4, group_size=2, max_staleness=3, updates=8)
    it.add_engine(0, 0)
    trained = []
    for prompt in range(1000):
        if it.may_admit(0):
            group = it.admit(0, 0, prompt)
            assert it.form_batch() is None
            it.finish(group)
        elif batch := it.form_batch():
            trained.append([it.version - group.admission_version for group in batch])
            it.applied()
            assert it.form_batch() is None, "the engine has yet to begin what the new version admits"
            it.committed(0, it.version)
    assert trained == [[min(version, 3)] * 2 for version in range(8)]


def test_a_batch_waits_for_a_straggler_only_when_its_slack_is_used_up():
    it = schedule(staleness=1, batch_size=2, group_size=1)
    slow, *quick = [it.admit(0, 0, prompt) for prompt in range(4)]
    for group in quick:
        it.finish(group)
    assert it.form_batch() == quick[:2]
    it.applied()
    it.committed(0, 1)
    younger = [it.admit(0, 0, prompt) for prompt in (4, 5)]
    for group in younger:
        it.finish(group)
    assert it.form_batch() is None
    assert it.awaited()[0] == 1
    it.finish(slow)
    assert it.form_batch() == [slow, quick[2]]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 9), st.integers(0, 3), st.integers(1, 4))
def test_the_least_loaded_engine_takes_the_next_group(loads, most_load, staleness, groups_per_batch):
    """Beside one that looks at all engines for each group."""

    def admitted(next_engine):
        it = Schedule(batch_size=2 * groups_per_batch, group_size=2, max_staleness=staleness, updates=100)
        own = list(loads)
        for engine in range(len(own)):
            it.add_engine(engine, 0)
        for engine in next_engine(it, own):
            it.admit(engine, 0, len(it.running))
            own[engine] += 2
        return [group.engine for group in it.running.values()]

    def naive(it, own):
        share = it.share(len(own))
        while free := [
            e for e in range(len(own)) if own[e] <= most_load and it.running_on(e) < share and it.may_admit(e)
        ]:
            yield min(free, key=own.__getitem__)

    expected = admitted(naive)
    assert admitted(lambda it, own: it.takers(range(len(own)), own.__getitem__, most_load, len(own))) == expected


def test_a_batch_waits_for_as_many_stragglers_as_would_be_too_late():
    it = schedule(staleness=1, batch_size=3, group_size=1)
    old = [it.admit(0, 0, prompt) for prompt in range(6)]
    for group in old[:4]:
        it.finish(group)
    assert it.form_batch() == old[:3]
    it.applied()
    it.committed(0, 1)
    for group in [it.admit(0, 0, prompt) for prompt in range(6, 9)]:
        it.finish(group)
    assert it.form_batch() is None
    assert it.awaited() == (2, {4, 5})
    it.finish(old[4])
    assert it.form_batch() is None and it.awaited()[0] == 1
    it.finish(old[5])
    assert it.awaited()[0] == 0 and it.form_batch() == old[3:]


def test_a_filtered_group_makes_room_for_another():
    it = schedule(staleness=0, batch_size=2, group_size=2)
    group = it.admit(0, 0, 0)
    assert not it.may_admit(0)
    it.filter(group)
    assert it.may_admit(0)
    assert it.dispositions == {(0, 0): "filtered"}


def test_an_update_that_was_not_applied_leaves_the_version_and_makes_room():
    it = schedule(staleness=0, batch_size=2, group_size=2)
    it.finish(it.admit(0, 0, 0))
    it.form_batch()
    it.rejected("non-finite gradients")
    assert it.version == 0
    assert it.may_admit(0)
    assert it.dispositions == {(0, 0): "skipped: non-finite gradients"}


def test_nothing_is_admitted_that_no_update_would_train():
    it = schedule(staleness=8, batch_size=2, group_size=1, updates=2)
    for prompt in range(4):
        it.admit(0, 0, prompt)
    assert not it.may_admit(0)


@pytest.mark.parametrize(
    "event",
    [
        lambda it, group: it.finish(group),
        lambda it, group: it.filter(group),
        lambda it, group: it.admit(0, 0, 0),
        lambda it, group: it.skip_prompt(0, 0, "again"),
        lambda it, group: it.committed(0, 1),
        lambda it, group: it.applied(),
        lambda it, group: it.add_engine(0, 0),
    ],
)
def test_impossible_events_are_refused(event):
    it = schedule()
    group = it.admit(0, 0, 0)
    it.filter(group)
    with pytest.raises(ScheduleError):
        event(it, group)


def test_the_share_of_an_engine_is_of_what_would_run_with_the_newest_version():
    schedule = Schedule(batch_size=8, group_size=2, max_staleness=1, updates=5)  # 4 groups a batch, 8 admitted at first
    schedule.add_engine(0, 0)
    schedule.add_engine(1, 0)
    assert [schedule.share(engines) for engines in (1, 2, 3, 8, 100)] == [8, 4, 3, 1, 1]
    groups = [schedule.admit(0, 0, prompt) for prompt in range(8)]
    assert [schedule.running_on(engine) for engine in (0, 1)] == [8, 0]
    for group in groups[:5]:
        schedule.finish(group)
    assert schedule.share(2) == 2 and schedule.running_on(0) == 3  # no other may begin
    assert len(schedule.form_batch()) == 4
    assert schedule.share(2) == 2
    schedule.applied()
    assert schedule.share(2) == 2
    schedule.committed(0, 1)
    assert schedule.share(2) == 4  # 4 more may begin: 7, of which one engine runs 4


def test_one_that_has_all_to_itself_may_run_all():
    schedule = Schedule(batch_size=4, group_size=2, max_staleness=0, updates=1)
    schedule.add_engine(0, 0)
    first = schedule.admit(0, 0, 0)
    assert schedule.share(1) == 2 and schedule.running_on(0) == 1 and schedule.may_admit(0)
    schedule.finish(schedule.admit(0, 0, 1))
    assert schedule.share(1) == 1 and schedule.running_on(0) == 1
    schedule.finish(first)
    assert schedule.running_on(0) == 0 and len(schedule.form_batch()) == 2
