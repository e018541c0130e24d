"""Advice on the split of a run: known answers, and when there is none. How well it predicts: test_simulator.py."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_megatron.config import Config
from areal_megatron.observe.advice import FEWEST_UPDATES, GAIN, Balance, Short, advise, since_resumed

SETTLING = 3


def config(updates=1000, eta=SETTLING - 1, dp=1):
    made = Config(name="run", updates=updates)
    made.rollout.max_staleness, made.trainer.dp = eta, dp
    return made


def lines(count, first=1, *, update_s=10.0, wait=0.0, straggler=0.0, idle=0.0, full=0.0, engines=3, **others):
    return [
        {
            "version": first + n,
            "update_s": update_s,
            "trainer_wait_s": wait,
            "straggler_wait_s": straggler,
            "engine_idle_share": idle,
            "engine_full_share": full,
            "engines_serving": engines,
        }
        | others
        for n in range(count)
    ]


def balance(**measured):
    return Balance.of(lines(5, **measured))


ENGINES_SHORT = {"wait": 4.0, "full": 1.0}
TRAINERS_SHORT = {"idle": 0.2, "full": 0.3}


def test_full_engines_divide_their_work_until_trainers_are_slower():
    found = balance(**ENGINES_SHORT)
    assert found.update_s_with(4) == pytest.approx(7.5)
    assert found.update_s_with(2) == pytest.approx(15)
    assert found.update_s_with(6) == pytest.approx(6), "trainers work for so long"
    assert found.faster(4) == pytest.approx(1 / 3) and found.faster(2) == pytest.approx(-1 / 3)
    assert found.short is Short.ENGINES and found.enough_engines == 5


def test_work_of_engines_that_are_not_full_is_not_divided():
    found = balance(wait=4.0, full=0.4)
    assert found.update_s_with(4) == pytest.approx(6 + 4 * 3 / 4)
    assert balance(wait=4.0, full=0.0).short is None


def test_no_engine_is_advised_where_there_is_no_room_for_it():
    assert advise(config(), lines(20, **ENGINES_SHORT), has_room=True).short is Short.ENGINES
    assert advise(config(), lines(20, **ENGINES_SHORT), has_room=False) is None
    stale = advise(config(eta=8), lines(40, lr_factor=0.5, staleness_mean=6.0, **ENGINES_SHORT), has_room=False)
    assert stale.short is Short.FRESHNESS and "engine" not in stale.line
    assert advise(config(), lines(20, **TRAINERS_SHORT), has_room=False).short is Short.TRAINERS


def test_reward_workers_that_never_rest_are_what_is_short():
    """Engines are full too, since answers that wait for a score keep their place in the batch."""
    busy = {"reward_busy_share": 0.97}
    found = advise(config(), lines(20, **ENGINES_SHORT, **busy))
    assert found.short is Short.REWARDS
    assert found.line.startswith("reward workers are short: they have answers to score for 97% of the time")
    assert advise(config(), lines(20, **ENGINES_SHORT, reward_busy_share=0.5)).short is Short.ENGINES
    assert advise(config(), lines(20, **TRAINERS_SHORT, **busy)).short is Short.TRAINERS, "nobody waits for scores"


def test_stragglers_stay_however_many_engines_there_are():
    found = balance(wait=4.0, straggler=3.5, full=1.0)
    assert found.update_s_with(4) == pytest.approx(9.5)
    assert balance(wait=4.0, straggler=4.0, full=1.0).short is Short.NEITHER


def test_pools_that_take_turns_go_on_doing_so():
    found = balance(wait=6.0, idle=0.4, full=0.6)
    assert found.update_s_with(2) == pytest.approx(4 + 9) and found.update_s_with(6) == pytest.approx(4 + 3)
    assert found.update_s_with(3, trainers=2) == pytest.approx(2 + 6)


def test_time_in_which_nobody_works_stays():
    found = balance(wait=5.0, idle=0.5, full=0.3)
    assert found.update_s_with(6) == pytest.approx(10 - 1.5)
    found = balance(wait=9.0, idle=0.8, full=0.2)
    assert found.update_s_with(1) == pytest.approx(7 + 1 + 6)


def test_engines_that_wait_for_trainers():
    found = balance(**TRAINERS_SHORT)
    assert found.short is Short.TRAINERS and found.faster(4) == 0
    assert found.update_s_with(2) == pytest.approx(10) and found.enough_engines == 2


shares = st.floats(0, 1)


@given(st.floats(0.01, 1e5), shares, shares, shares, shares, st.integers(1, 200))
def test_what_was_measured_is_predicted_and_more_never_takes_longer(seconds, wait, straggler, idle, full, engines):
    found = balance(
        update_s=seconds, wait=seconds * wait, straggler=seconds * straggler, idle=idle, full=full, engines=engines
    )
    assert found.update_s_with(engines) == pytest.approx(seconds)
    predicted = [found.update_s_with(n) for n in range(1, 2 * engines + 2)]
    assert all(more <= fewer * (1 + 1e-9) for fewer, more in pairwise(predicted))
    assert found.update_s_with(engines, trainers=0.5) >= seconds * (1 - 1e-9)
    if (enough := found.enough_engines) is not None:
        assert predicted[enough - 1] <= (1 + GAIN) * found.update_s_with(enough + max(1, enough // 8))


@pytest.mark.parametrize(
    ("measured", "dp", "said"),
    [
        (
            ENGINES_SHORT,
            1,
            "engines are short: trainers wait for 40% of the time, engines are full for 100% of it; 4 engines would be "
            "33% faster; 2 engines would be 33% slower; 5 engines would do",
        ),
        (
            {"wait": 6.0, "full": 1.0, "engines": 1},
            2,
            "engines are short: trainers wait for 60% of the time, engines are full for 100% of it; 2 engines would be "
            "100% faster; half of trainer.dp=2 would be as fast",
        ),
        (
            ENGINES_SHORT | {"engines": 96},
            1,
            "engines are short: trainers wait for 40% of the time, engines are full for 100% of it; 108 engines would "
            "be 12% faster; 84 engines would be 12% slower; 153 engines would do",
        ),
        (
            TRAINERS_SHORT,
            2,
            "trainers are short: they wait for 0% of the time, engines are full for 30% of it and idle for 20%; 4 "
            "engines would be as fast; 2 engines would be as fast",
        ),
        (
            {"wait": 4.0, "straggler": 4.0, "full": 0.5, "engines": 1},
            1,
            "neither pool is short, batches wait for their longest answers, or for rewards: trainers wait for 40% of "
            "the time, engines are full for 50% of it; more than rollout.max_staleness=2 would help; 2 engines would "
            "be as fast",
        ),
    ],
)
def test_the_line(measured, dp, said):
    assert advise(config(dp=dp), lines(SETTLING + FEWEST_UPDATES, **measured)).line == said


def test_it_waits_for_enough_updates_after_the_beginning_and_after_a_change_of_the_engines():
    enough = SETTLING + FEWEST_UPDATES
    assert advise(config(), lines(enough - 1, **ENGINES_SHORT)) is None
    assert advise(config(), lines(enough, **ENGINES_SHORT)).short is Short.ENGINES
    before = lines(50, **ENGINES_SHORT)
    after = {**ENGINES_SHORT, "engines": 4}
    assert advise(config(), before + lines(enough - 1, 51, **after)) is None
    assert "5 engines would be" in advise(config(), before + lines(enough, 51, **after)).line


def test_the_first_updates_and_the_last_of_the_run_do_not_count():
    first = lines(SETTLING, **TRAINERS_SHORT)
    most = lines(10, 1 + SETTLING, **ENGINES_SHORT)
    last = lines(SETTLING, 11 + SETTLING, **TRAINERS_SHORT)
    whole = first + most + last
    steady = advise(config(), lines(13, **ENGINES_SHORT)).line
    assert advise(config(updates=len(whole)), whole).line == steady
    assert advise(config(updates=len(whole) + 100), whole).line != steady


def test_only_the_last_updates_count():
    old = lines(50, **ENGINES_SHORT)
    assert advise(config(), old + lines(10, 51, **TRAINERS_SHORT)) is None, "both halves must say the same"
    assert advise(config(), old + lines(20, 51, **TRAINERS_SHORT)).short is Short.TRAINERS


def test_halves_whose_gains_differ_say_nothing():
    little = {"wait": 1.0, "full": 1.0}
    assert advise(config(), lines(20, **little)).short is Short.ENGINES
    assert advise(config(), lines(13, **little) + lines(10, 14, **ENGINES_SHORT)) is None


@pytest.mark.parametrize(
    "odd", [{"engines_unreached": 1}, {"update_s": 0.0}, {"engine_full_share": None}, {"engines": 0}]
)
def test_updates_that_say_nothing_end_what_counts(odd):
    updates = lines(20, **ENGINES_SHORT) + lines(1, 21, **(ENGINES_SHORT | odd)) + lines(12, 22, **ENGINES_SHORT)
    assert advise(config(), updates) is None
    assert advise(config(), updates + lines(1, 34, **ENGINES_SHORT)).short is Short.ENGINES


def test_runs_of_which_nothing_is_said():
    updates = lines(40, **ENGINES_SHORT)
    made = config()
    made.machine.shared = True
    assert advise(made, updates) is None
    made = config()
    made.mode = "sft"
    assert advise(made, updates) is None
    assert advise(config(), lines(40, full=1.0)) is None, "full pools: nothing to gain"


def test_what_came_before_a_resume_does_not_count():
    records = [
        {"kind": "update", "version": 1},
        {"kind": "resume", "version": 1},
        {"kind": "eval", "version": 1},
        {"kind": "update", "version": 2},
    ]
    assert [update["version"] for update in since_resumed(records)] == [2]
    assert len(since_resumed(records[:1])) == 1 and since_resumed(records[:2]) == [] == since_resumed([])


STALE = {"full": 0.9, "staleness_mean": 7.5, "lr_factor": 0.4}
SHORTENED = (
    "answers 7.5 versions old leave 0.40 of optimizer.lr=2e-05: rollout.max_staleness=3 instead of 8 would let steps "
    "be 2.5 times as long, which pays unless updates take as much longer"
)


def advised(measured):
    found = advise(config(eta=8), lines(40, **measured))
    return found and (found.short, found.line)


def test_staleness_that_shortens_steps_is_told_alone_or_behind_what_is_short():
    assert advised(STALE) == (Short.FRESHNESS, SHORTENED)
    short, line = advised(STALE | ENGINES_SHORT)
    assert short is Short.ENGINES and line.startswith("engines are short: ") and line.endswith(f"; {SHORTENED}")
    waiting = {"wait": 4.0, "straggler": 4.0, "full": 0.5}
    assert "more than rollout.max_staleness=8 would help" in advised(waiting)[1]
    assert "would help" not in advised(STALE | waiting)[1], "that would shorten them further"


@pytest.mark.parametrize("other", [{"lr_factor": 0.9}, {"lr_factor": None}, {"staleness_mean": 1.0}])
def test_staleness_that_costs_little_is_not_told(other):
    assert advised(STALE | other) is None
