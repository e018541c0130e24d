"""What is drawn and what is trained by pass rate, against counts by hand."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import msgspec
import pytest

from areal_megatron.config import Config, ConfigError, DataConfig, ModelConfig, RewardConfig, RolloutConfig
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.difficulty import Difficulty, SampledGroups
from areal_megatron.controller.environment import Environment
from areal_megatron.controller.generation import Generation
from areal_megatron.controller.sampler import Sampler
from areal_megatron.controller.schedule import Schedule
from areal_megatron.data.check import _check_pass_rates
from areal_megatron.data.prompts import Prompt
from areal_megatron.run.folder import RunError
from areal_megatron.workflows.scoring import Score, Scorer
from areal_megatron.workflows.single_turn import SingleTurn


def scores(*found):
    return [Score(reward=score, correct=score >= 1, truncated=False, trained=True, score=score) for score in found]


def rollout(pass_rate, easiest_first=False, drawn=None, remeasure_after=10**6):
    """Filters by the bounds `pass_rate`, if there are any, and draws within `drawn`, by default the same."""
    low, high = pass_rate or (0.0, 1.0)
    least, most = drawn or (low, high)
    return RolloutConfig(
        group_size=2,
        max_staleness=10**6,
        filter_groups=bool(pass_rate),
        min_pass_rate=low,
        max_pass_rate=high,
        draw_min_pass_rate=least,
        draw_max_pass_rate=most,
        remeasure_after=remeasure_after,
        easiest_first=easiest_first,
    )


def prompt(number, pass_rate=None, tokens=1):
    return Prompt(number, "", "", [1] * tokens, None, pass_rate=pass_rate)


@pytest.mark.parametrize(
    ("pass_rate", "given", "filtered"),
    [
        ([], [1, 1, 1, 1], False),
        ([], [0, 0, 0, 0], False),
        ([0, 1], [1, 1, 1, 1], True),
        ([0, 1], [0, 0, 0, 0], True),
        ([0, 1], [0, 0, 0, 1], False),
        ([0, 1], [0.5, 0.5, 0.5, 0.5], True),
        ([0, 1], [0.3, 0.1 + 0.2, 0.3, 0.30000001], True),
        ([0, 1], [0.5, 0.5, 0.25, 0.5], False),
        ([0.25, 0.5], [0, 0, 0, 1], False),
        ([0.25, 0.5], [0, 1, 0, 1], False),
        ([0.25, 0.5], [0, 1, 1, 1], True),
        ([0.3, 0.5], [0, 0, 0.9, 1], True),
    ],
)
def test_groups_outside_of_the_range_and_uniform_ones_are_filtered(pass_rate, given, filtered):
    subject = Difficulty(rollout(pass_rate))
    assert subject.filters(prompt(7), scores(*given), version=3) == filtered
    assert subject.measured == {7: (sum(score >= 1 for score in given) / 4, 3)}


def shaped(truncated, answers):
    """Scores answers (score, tokens) of at most 100 tokens as a run with reward.truncated=`truncated` does."""
    scorer = Scorer(RewardConfig(truncated=truncated), None, max_new_tokens=100)
    return [scorer.reward(score, tokens, truncated=tokens == 100, forced=False) for score, tokens in answers]


@pytest.mark.parametrize(
    ("of_answers", "filtered"),
    [
        ([(5, 0), (0, 5)], False),
        ([(5, 0), (5, 0)], True),
        ([(5, 0, 0), (0, 5, 0)], False),
        ([(5, 0, 0), (5, 0)], True),
        ([(0.3, 4.7), (0.1 + 0.2, 4.7)], True),
        ([(0, 5), (0, 0, 5)], True),  # the same answer is right, a turn later
        ([(), ()], True),
    ],
)
def test_episodes_that_earn_as_much_at_other_answers_are_not_uniform(of_answers, filtered):
    found = [replace(score, of_answers=each) for score, each in zip(scores(1, 1), of_answers, strict=True)]
    assert Difficulty(rollout([0, 1])).filters(prompt(7), found, version=3) == filtered


@pytest.mark.parametrize(
    ("truncated", "answers", "filtered"),
    [
        ("overlong", [(1, 50)] * 15 + [(1, 81)], True),
        ("overlong", [(0, 50)] * 14 + [(0, 90), (0, 95)], True),
        ("overlong", [(0.4, 50)] * 14 + [(0.5, 90), (0.4, 95)], False),
        ("overlong", [(1, 50)] * 15 + [(0, 100)], False),
        ("masked", [(1, 50)] * 15 + [(0, 100)], True),
        ("masked", [(1, 50)] * 14 + [(0, 50), (0, 100)], False),
        ("masked", [(0, 100)] * 16, True),
        ("incorrect", [(1, 50)] * 15 + [(0, 100)], False),
    ],
)
def test_a_group_is_uniform_by_right_and_wrong_of_its_trained_answers(truncated, answers, filtered):
    subject, found = Difficulty(rollout([0, 1])), shaped(truncated, answers)
    assert subject.filters(prompt(7), found, version=0) == filtered
    trained = [score >= 1 for score, tokens in answers if truncated != "masked" or tokens < 100]
    assert subject.measured == ({7: (sum(trained) / len(trained), 0)} if trained else {})


def test_the_last_group_counts_and_only_then_the_row():
    subject = Difficulty(rollout([0.25, 0.75]))
    assert subject.reason_to_skip(prompt(1, 0.9), 0) == "pass rate 0.9"
    assert not subject.reason_to_skip(prompt(1), 0) and not subject.reason_to_skip(prompt(1, 0.25), 0)
    subject.filters(prompt(1, 0.9), scores(0, 1), 0)
    assert not subject.reason_to_skip(prompt(1, 0.9), 0)
    subject.filters(prompt(1, 0.9), scores(0, 0), 0)
    assert subject.reason_to_skip(prompt(1, 0.9), 0) == "pass rate 0"
    assert not Difficulty(rollout([])).reason_to_skip(prompt(1, 0.0), 0)


def test_what_is_drawn_does_not_depend_on_what_is_filtered_and_is_forgotten():
    subject = Difficulty(rollout([0, 1], drawn=[0.1, 0.9], remeasure_after=50))
    assert subject.filters(prompt(1), scores(0, 0), version=7)
    assert subject.reason_to_skip(prompt(1), 56) == "pass rate 0" and not subject.reason_to_skip(prompt(1), 57)
    rated = prompt(2, 1.0)
    assert subject.reason_to_skip(rated, 49) == "pass rate 1" and not subject.reason_to_skip(rated, 50)
    everything = Difficulty(rollout([0.4, 0.6], drawn=[0, 1]))
    assert everything.filters(prompt(1), scores(0, 0, 0, 1), 0) and not everything.reason_to_skip(prompt(1), 0)
    unfiltered = Difficulty(rollout([], drawn=[0.1, 0.9]))
    assert not unfiltered.filters(prompt(1), scores(0, 0), 0) and unfiltered.reason_to_skip(prompt(1), 0)


def test_what_was_sampled_is_counted_whether_it_is_trained_or_not():
    """The shares are of groups, the accuracy of answers; no answer that is left out makes a group mixed."""
    subject = SampledGroups()
    for answers, filtered in (
        ([(1, 50), (1, 60)], True),
        ([(1, 50), (0, 100)], True),  # the second is masked
        ([(0, 50), (0, 60)], True),
        ([(1, 50), (0, 60)], False),
        ([(0, 100), (0, 100)], True),
    ):
        subject.add(shaped("masked", answers), sum(tokens for _, tokens in answers), filtered)
    assert subject.metrics() == {
        "sampled_groups": 5,
        "filtered_tokens": 110 + 150 + 110 + 200,
        "sampled_accuracy": 4 / 10,
        "solved_all": 2 / 5,
        "solved_none": 1 / 5,
    }
    assert SampledGroups().metrics() == {"sampled_groups": 0, "filtered_tokens": 0}


def config(pass_rate, easiest_first=False):
    return Config(
        name="x",
        updates=10**6,
        batch_size=2,
        model=ModelConfig("m"),
        data=DataConfig("d.jsonl", max_prompt_tokens=4),
        rollout=rollout(pass_rate, easiest_first),
    )


def generation(asked, prompts):
    schedule = Schedule(batch_size=2, group_size=2, max_staleness=10**6, updates=10**6)
    schedule.add_engine(0, 0)
    sampler = Sampler(
        engines=[],
        is_lost=None,
        stop_tokens=[],
        environments=[Environment(asked, scorer=None, runner=SingleTurn(None))],
        timeline=None,
        evaluation=None,
    )
    return schedule, Generation(asked, schedule, sampler, prompts, Changed())


@pytest.mark.parametrize("easiest_first", [False, True])
def test_every_prompt_of_an_epoch_has_one_disposition_also_after_a_resume(easiest_first):
    """The real schedule under draws with known and measured rates; a model of the rule beside it."""
    rng = random.Random(3)
    prompts = [
        prompt(number, rng.choice([None, 0.0, 0.3, 0.7, 1.0]), tokens=9 if number % 10 == 9 else 1)
        for number in range(40)
    ]
    known = {p.id: p.pass_rate for p in prompts}

    async def play():
        schedule, subject = generation(config([0.2, 0.8], easiest_first), prompts)
        expected = {}
        for step in range(60):
            before = set(schedule.dispositions)
            epoch, drawn = subject._draw()
            assert known[drawn.id] is None or 0.2 <= known[drawn.id] <= 0.8
            for skipped in set(schedule.dispositions) - before:
                rate = known[skipped[1]]
                too_long = len(prompts[skipped[1]].tokens) > 4
                expected[skipped] = (
                    "skipped: longer than data.max_prompt_tokens" if too_long else f"skipped: pass rate {rate:.3g}"
                )
            found = rng.choice([[0, 1]] * 5 + [[0.5, 1], [0, 0], [1, 1]])
            known[drawn.id] = sum(score >= 1 for score in found) / 2
            group = schedule.admit(0, epoch, drawn.id)
            useless = len(set(found)) == 1 or not 0.2 <= known[drawn.id] <= 0.8
            assert subject._difficulty.filters(drawn, scores(*found), 0) == useless
            schedule.filter(group)
            expected[epoch, drawn.id] = "filtered"
            assert schedule.dispositions == expected
            if step % 20 == 7:
                saved = subject.save()
                schedule, subject = generation(config([0.2, 0.8], easiest_first), prompts)
                subject.restore(saved)
                schedule.add_engine(0, 0) if not schedule.engines else None
        return schedule

    schedule = asyncio.run(play())
    whole = Counter(epoch for epoch, _ in schedule.dispositions)
    assert len(whole) > 2 and whole[0] == whole[1] == 40
    kinds = Counter(kind.split(" ")[1] if " " in kind else kind for kind in schedule.dispositions.values())
    assert min(kinds["filtered"], kinds["pass"], kinds["longer"]) > 5


def test_a_resumed_run_knows_how_old_a_pass_rate_is():
    _, subject = generation(config([0.2, 0.8]), [prompt(0), prompt(1)])
    subject._difficulty.filters(prompt(1), scores(0, 1), version=30)
    saved = subject.save()
    for state, version in ((saved, 30), (msgspec.structs.replace(saved, measured_at={}), 0)):
        _, resumed = generation(config([0.2, 0.8]), [prompt(0), prompt(1)])
        resumed.restore(state)
        assert resumed._difficulty.measured == {1: (0.5, version)}


def test_when_no_prompt_is_left_the_run_ends_with_a_reason():
    schedule, subject = generation(config([0.4, 0.6]), [prompt(0), prompt(1), prompt(2, 0.1), prompt(3, tokens=9)])
    for _ in range(2):
        epoch, drawn = subject._draw()
        schedule.admit(0, epoch, drawn.id)
        subject._difficulty.filters(drawn, scores(1, 1), 0)
    with pytest.raises(RunError, match=r"rollout.draw_min_pass_rate: no prompt is left that is not too hard"):
        subject._draw()


def test_a_range_that_leaves_nothing_and_an_order_by_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"every prompt of d.jsonl has a pass_rate outside of 0.4 to "):
        _check_pass_rates(config([0.4, 0.6]), [prompt(0, 0.1), prompt(1, 0.5, tokens=9)])
    with pytest.raises(ConfigError, match=r"no row of d.jsonl has a pass_rate to order by"):
        _check_pass_rates(config([], easiest_first=True), [prompt(0), prompt(1)])
    _check_pass_rates(config([0.4, 0.6], easiest_first=True), [prompt(0), prompt(1, 0.1)])
    _check_pass_rates(config([]), [prompt(0, 0.1)])
