"""What becomes of groups whose rewards fail, and of a run in which too many do."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from areal_megatron.config import Config, DataConfig, ModelConfig, RewardConfig, RolloutConfig
from areal_megatron.controller.batches import describe, means_of_terms
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.engine import Engine
from areal_megatron.controller.environment import Environment
from areal_megatron.controller.failures import FailedAnswers
from areal_megatron.controller.generation import Generation
from areal_megatron.controller.sampler import Sampler
from areal_megatron.controller.schedule import Schedule
from areal_megatron.observe.timeline import Timeline
from areal_megatron.process import lateness
from areal_megatron.run.folder import RunError
from areal_megatron.workflows.sampling import Decoding
from tests.support.chat_world import World


def config(batch_size, group_size, share):
    return Config(
        name="x",
        updates=1,
        batch_size=batch_size,
        model=ModelConfig("m"),
        data=DataConfig("d"),
        rollout=RolloutConfig(group_size=group_size),
        reward=RewardConfig(failed_share=share),
    )


@pytest.mark.parametrize(("batch_size", "group_size", "window"), [(64, 4, 64), (16, 4, 40), (2, 1, 10), (512, 16, 512)])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_too_many_failures_among_the_last_answers_end_the_run(batch_size, group_size, window, share):
    chance, subject, seen = random.Random(batch_size), FailedAnswers(config(batch_size, group_size, share)), []
    for rate in [0.0] * window + [0.3 * share] * 200 + [1.0] * window:
        failures = ["away" if chance.random() < rate else "" for _ in range(group_size)]
        expected = [*seen, *failures]
        ends = range(len(seen) + 1, len(expected) + 1)
        counts = [sum(map(bool, expected[max(0, end - window) : end])) for end in ends]
        if max(counts) > share * window:
            with pytest.raises(RunError, match=r"^reward.failed_share: the rewards of \d+ of the last \d+ "):
                subject.add(failures)
            assert rate, "the first ones are all good"
            return
        subject.add(failures)
        seen = expected
    pytest.fail("the last ones all fail")


def test_one_group_that_cannot_be_scored_ends_no_small_run_and_a_share_of_one_ends_none():
    subject = FailedAnswers(config(batch_size=8, group_size=8, share=0.1))
    subject.add(["malformed tests"] * 8)
    with pytest.raises(RunError, match=r"of 9 of the last 80 answers failed, more than 0.1; the last one: malformed t"):
        subject.add([""] * 8 + ["malformed tests"])
    subject = FailedAnswers(config(batch_size=8, group_size=8, share=1.0))
    for _ in range(100):
        subject.add(["away"] * 8)


@pytest.fixture
def generate(tmp_path, monkeypatch):
    """Runs the real generation over the rows a to d. `failing`: how many answers of each group of a row have no reward;
    of the others the last is right."""
    monkeypatch.setattr(lateness, "_FIRST_PAUSE_S", 0.01)

    def run(failing, prompts=4, n=4, share=1.0):
        async def once(episode):
            await episode.sample()

        asked = Counter()

        def reward(prompt, response, answer):
            number, asked[answer] = asked[answer] % n, asked[answer] + 1
            if number < failing.get(answer, 0):
                raise ConnectionError("status 500")
            return float(number == n - 1)

        world = World(tmp_path, once, lambda *_: "1", reward=reward, batch_size=n)
        world.config.rollout.group_size, world.config.reward.failed_share = n, share
        rows = [replace(world.prompt(answer=chr(97 + number)), id=number) for number in range(prompts)]
        schedule = Schedule(batch_size=n, group_size=n, max_staleness=prompts - 1, updates=prompts)
        timeline = Timeline(tmp_path / "timeline", "controller")
        sampler = Sampler(
            engines=[Engine(0, world.client, timeline)],
            is_lost=None,
            stop_tokens=world.tokenizer.stop_tokens,
            environments=[Environment(world.config, world.scorer, world.groups)],
            timeline=timeline,
            evaluation=Decoding(1.0),
        )
        generation = Generation(world.config, schedule, sampler, rows, Changed())

        async def play():
            schedule.add_engine(0, 0)
            running = asyncio.create_task(generation.run())
            async with asyncio.timeout(60):
                while len(schedule.finished) < prompts and not running.done():
                    await asyncio.sleep(0.01)
            if running.done():
                await running
            running.cancel()

        asyncio.run(play())
        return schedule, generation

    return run


def test_answers_without_a_reward_are_not_trained_and_groups_of_them_are_skipped(generate):
    schedule, generation = generate({"b": 4, "c": 3, "d": 1})
    assert {key: kind for key, kind in schedule.dispositions.items() if key[0] == 0} == {
        (0, 1): "skipped: rewards failed",
        (0, 2): "skipped: rewards failed",
    }
    groups = {group.prompt_id: generation.take(group) for group in schedule.finished.values() if group.epoch == 0}
    assert groups.keys() == {0, 3}
    assert not any(t.failed for t in groups[0]) and all(t.loss_mask.all() for t in groups[0])
    (failed,) = [t for t in groups[3] if t.failed]
    known = [t for t in groups[3] if t is not failed]
    assert not failed.loss_mask.any() and all(t.loss_mask.all() for t in known)
    described = describe(groups[3], 100)
    assert described["accuracy"] == np.mean([t.reward == 5 for t in known])
    assert described["reward_mean"] == np.mean([t.reward for t in known])


def test_a_run_whose_rewards_all_fail_ends_with_the_reason(generate):
    """No batch can form, so nothing else would end it."""
    with pytest.raises(ExceptionGroup) as error:
        generate(dict.fromkeys("abcd", 4), share=0.2)
    ended = error.value.exceptions[0]
    assert isinstance(ended, RunError)
    assert str(ended) == (
        "reward.failed_share: the rewards of 9 of the last 40 answers failed, more than 0.2; the last one: status 500"
    )


def test_terms_are_described_and_do_not_make_an_answer_right(generate):
    schedule, generation = generate({})
    trajectories = [t for group in schedule.finished.values() for t in generation.take(group)]
    right = np.mean([t.reward == 5 for t in trajectories])
    for k, t in enumerate(trajectories):
        t.terms = {"length": 10.1 if k % 2 else -0.3} | ({"form": 0.7} if k == 0 else {})
        t.reward += sum(t.terms.values())
    assert 0 < right < 1 and describe(trajectories, 100)["accuracy"] == right
    trajectories[-1].failed = True
    known = trajectories[:-1]
    assert means_of_terms(trajectories) == {
        "reward_form_mean": pytest.approx(0.7 / len(known)),
        "reward_length_mean": pytest.approx(np.mean([t.terms["length"] for t in known])),
    }
    assert means_of_terms([trajectories[-1]]) == {}
