"""What is drawn and what is trained by pass rate, against counts by hand."""

import asyncio
import random
from collections import Counter
from types import SimpleNamespace

import pytest

from areal_megatron.config import Config, ConfigError, DataConfig, ModelConfig, RolloutConfig
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.difficulty import Difficulty
from areal_megatron.controller.generation import Generation
from areal_megatron.controller.schedule import Schedule
from areal_megatron.data.check import _check_pass_rates
from areal_megatron.data.prompts import Prompt
from areal_megatron.run import RunError
from areal_megatron.workflows.scoring import Score


def scores(*rewards, right=1.0):
    return [Score(reward=reward, correct=reward >= right, truncated=False, trained=True) for reward in rewards]


def rollout(pass_rate, easiest_first=False):
    """Filters by the bounds `pass_rate`, if there are any."""
    low, high = pass_rate or (0.0, 1.0)
    return RolloutConfig(
        group_size=2,
        max_staleness=10**6,
        filter_groups=bool(pass_rate),
        min_pass_rate=low,
        max_pass_rate=high,
        easiest_first=easiest_first,
    )


def prompt(number, pass_rate=None, tokens=1):
    return Prompt(number, "", "", [1] * tokens, None, pass_rate=pass_rate)


@pytest.mark.parametrize(
    ("pass_rate", "rewards", "filtered"),
    [
        ([], [1, 1, 1, 1], False),
        ([], [0, 0, 0, 0], False),
        ([0, 1], [1, 1, 1, 1], True),
        ([0, 1], [0, 0, 0, 0], True),
        ([0, 1], [0, 0, 0, 1], False),
        ([0, 1], [0.5, 0.5, 0.5, 0.5], True),
        ([0, 1], [0.5, 0.5, 0.25, 0.5], False),
        ([0.25, 0.5], [0, 0, 0, 1], False),
        ([0.25, 0.5], [0, 1, 0, 1], False),
        ([0.25, 0.5], [0, 1, 1, 1], True),
        ([0.3, 0.5], [0, 0, 0.9, 1], True),
    ],
)
def test_groups_outside_of_the_range_and_uniform_ones_are_filtered(pass_rate, rewards, filtered):
    subject = Difficulty(rollout(pass_rate))
    assert subject.filters(prompt(7), scores(*rewards)) == filtered
    assert subject.measured == {7: sum(reward >= 1 for reward in rewards) / 4}


def test_the_last_group_counts_and_only_then_the_row():
    subject = Difficulty(rollout([0.25, 0.75]))
    assert subject.reason_to_skip(prompt(1, 0.9)) == "pass rate 0.9"
    assert not subject.reason_to_skip(prompt(1)) and not subject.reason_to_skip(prompt(1, 0.25))
    subject.filters(prompt(1, 0.9), scores(0, 1))
    assert not subject.reason_to_skip(prompt(1, 0.9))
    subject.filters(prompt(1, 0.9), scores(0, 0))
    assert subject.reason_to_skip(prompt(1, 0.9)) == "pass rate 0"
    assert not Difficulty(rollout([])).reason_to_skip(prompt(1, 0.0))


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
    return schedule, Generation(asked, schedule, SimpleNamespace(episodes=None), prompts, Changed())


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
            known[drawn.id] = sum(reward >= 1 for reward in found) / 2
            group = schedule.admit(0, epoch, drawn.id)
            useless = len(set(found)) == 1 or not 0.2 <= known[drawn.id] <= 0.8
            assert subject._difficulty.filters(drawn, scores(*found)) == useless
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


def test_when_no_prompt_is_left_the_run_ends_with_a_reason():
    schedule, subject = generation(config([0.4, 0.6]), [prompt(0), prompt(1), prompt(2, 0.1), prompt(3, tokens=9)])
    for _ in range(2):
        epoch, drawn = subject._draw()
        schedule.admit(0, epoch, drawn.id)
        subject._difficulty.filters(drawn, scores(1, 1))
    with pytest.raises(RunError, match=r"rollout.filter_groups: no prompt is left that is not too easy"):
        subject._draw()


def test_a_range_that_leaves_nothing_and_an_order_by_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"every prompt of d.jsonl has a pass_rate outside of min_pass_rate=0.4"):
        _check_pass_rates(config([0.4, 0.6]), [prompt(0, 0.1), prompt(1, 0.5, tokens=9)])
    with pytest.raises(ConfigError, match=r"no row of d.jsonl has a pass_rate to order by"):
        _check_pass_rates(config([], easiest_first=True), [prompt(0), prompt(1)])
    _check_pass_rates(config([0.4, 0.6], easiest_first=True), [prompt(0), prompt(1, 0.1)])
    _check_pass_rates(config([]), [prompt(0, 0.1)])
