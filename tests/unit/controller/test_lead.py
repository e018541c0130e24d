"""How far engines are ahead: what a lead becomes by what it is told, and in runs of which engines or trainers are the
slower part."""

import math

import pytest

from areal_megatron.controller.lead import SPARE, WATCHED, Lead
from areal_megatron.controller.schedule import Schedule


def began(most, under_way):
    lead = Lead(most)
    lead.began(under_way)
    return lead


@pytest.mark.parametrize(
    ("most", "under_way", "batches"), [(8, 9, 8), (8, 3.5, 2.5), (8, 1.25, 1), (8, 30, 8), (1, 1, 1), (0, 1, 0)]
)
def test_it_begins_with_what_engines_can_run(most, under_way, batches):
    assert Lead(most).batches == most
    lead = began(most, under_way)
    assert lead.batches == batches
    lead.began(5)
    assert lead.batches == batches, "only the first batch counts"


def test_trainers_that_wait_make_it_longer_up_to_the_bound():
    lead = began(4, 2)
    found = []
    for _ in range(5):
        lead.ready(0.9)
        found.append(lead.batches)
    assert found == [2, 3, 4, 4, 4]


def test_what_is_never_used_up_is_taken_away_but_for_a_spare():
    lead = began(8, 7)
    for ready in (5.0, *[3.5] * (WATCHED + 4)):
        lead.ready(ready)
        assert lead.batches == 6
    lead.ready(3.5)
    assert lead.batches == 6 - (2.5 - SPARE), "the fewest decide"
    for _ in range(3 * WATCHED):
        lead.ready(1 + SPARE)
    assert lead.batches == 6 - (2.5 - SPARE)


def test_a_wait_is_watched_anew():
    lead = began(8, 3)
    for _ in range(WATCHED + 1):
        lead.ready(2.0)
    lead.ready(0.5)
    assert lead.batches == 3
    for _ in range(WATCHED + 2):
        lead.ready(2.0)
    assert lead.batches == 3
    lead.ready(2.0)
    assert lead.batches == 3 - (1 - SPARE)


def run(eta, generating, training, running=64, updates=200, groups=16):
    """Trains `updates` batches of `groups` groups, one engine that takes `generating` seconds for each of up to
    `running` groups at a time, weights that arrive at once. Returns seconds per update and staleness, the means over
    the second half."""
    it = Schedule(batch_size=groups, group_size=1, max_staleness=eta, updates=updates + 100)
    it.add_engine(0, 0)
    now, ends, free_at, prompts, batch, told = 0.0, [], 0.0, iter(range(10**6)), None, []
    while it.version < updates:
        while len(ends) < running and it.may_admit(0):
            ends.append((now + generating(len(ends)), it.admit(0, 0, next(prompts))))
        if batch is None and (batch := it.form_batch()):
            free_at = now + training
            told.append((now, sum(it.version - group.admission_version for group in batch) / groups))
        ends.sort(key=lambda each: each[0])
        soonest = min([each[0] for each in ends[:1]] + [free_at] * (batch is not None), default=math.inf)
        assert soonest < math.inf, "nothing happens any more"
        now = soonest
        while ends and ends[0][0] <= now:
            it.finish(ends.pop(0)[1])
        if batch is not None and free_at <= now:
            batch = None
            it.applied()
            it.committed(0, it.version)
    half = told[len(told) // 2 :]
    return (half[-1][0] - half[0][0]) / (len(half) - 1), sum(stale for _, stale in half) / len(half), it.ahead


def varied(seconds):
    """Answers of which some take eight times as long."""
    return lambda number: seconds * (8 if number % 16 == 5 else 1)


@pytest.mark.parametrize("eta", [1, 2, 4, 8])
def test_engines_that_are_faster_are_hardly_ahead_and_trainers_never_wait(eta):
    seconds, staleness, ahead = run(eta, lambda _: 0.3, training=1.0, running=16)
    assert seconds == pytest.approx(1.0) and staleness <= 1.3 and ahead <= min(eta, 1.3)


@pytest.mark.parametrize("eta", [2, 4, 8])
@pytest.mark.parametrize("slow", [varied(1.0), lambda _: 3.0], ids=["a-tail", "all"])
def test_engines_that_are_slower_get_all_the_bound_allows(eta, slow, monkeypatch):
    seconds, *_, ahead = run(eta, slow, training=0.2)
    monkeypatch.setattr(Schedule, "ahead", property(lambda self: self.max_staleness))
    bounded, _, _ = run(eta, slow, training=0.2)
    assert seconds <= 1.02 * bounded and ahead > min(eta, 2) - 1


@pytest.mark.parametrize("training", [0.5, 0.75, 1.0, 1.5, 3.0])
@pytest.mark.parametrize("eta", [2, 4, 8])
def test_what_it_saves_in_staleness_costs_no_time(eta, training, monkeypatch):
    answers = varied(0.5)
    seconds, staleness, _ = run(eta, answers, training)
    monkeypatch.setattr(Schedule, "ahead", property(lambda self: self.max_staleness))
    bounded, stale, _ = run(eta, answers, training)
    assert seconds <= 1.02 * bounded and staleness <= stale + 0.01


def test_a_lead_that_was_needed_for_a_while_is_given_back():
    begun = iter(range(10**6))
    seconds, staleness, ahead = run(8, lambda _: 6.0 if next(begun) < 20 * 16 else 0.3, training=1.0, running=16)
    assert seconds == pytest.approx(1.0) and staleness <= 1.5 and ahead <= 1.5
