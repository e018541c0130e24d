"""What replicas are told instead of a batch: all of them the same, each once."""

import asyncio

import numpy as np
import pytest
from msgspec.structs import replace

from areal_megatron.config import (
    Config,
    CorrectionConfig,
    DataConfig,
    MachineConfig,
    ModelConfig,
    PenaltyConfig,
    PPOConfig,
    RolloutConfig,
    TrainerConfig,
)
from areal_megatron.controller.batches import Batches, describe
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.schedule import Schedule
from areal_megatron.controller.service import Refusal
from areal_megatron.data.trajectory import BatchPart, Trajectory, decoder
from areal_megatron.protocol import EncodedBatch, NextBatch, NotYet, PublishAgain, Stop, Trained


def make(timeout_s, schedule=None, take=None, share_prompts=True, ppo=None):
    config = Config(
        name="t",
        updates=10,
        batch_size=4,
        model=ModelConfig("m"),
        data=DataConfig("d"),
        trainer=TrainerConfig(dp=2, share_prompts=share_prompts),
        ppo=ppo or PPOConfig(minibatches=1),
        rollout=RolloutConfig(group_size=2),
        machine=MachineConfig(peer_timeout_s=timeout_s),
    )
    schedule = schedule or Schedule(batch_size=4, group_size=2, max_staleness=1, updates=10)
    return Batches(config, schedule, take=take, flops=None)


@pytest.fixture
def batches():
    return make(timeout_s=0.4)


async def ask(batches, *replicas):
    return [type(await batches.next(NextBatch(replica, 0, 0))) for replica in replicas]


def test_every_replica_is_told_once_to_publish_again(batches):
    async def play():
        assert await ask(batches, 0) == [NotYet]
        assert batches.publish_again() and not batches.publish_again()
        assert await ask(batches, 1, 1, 0, 0, 1) == [PublishAgain, NotYet, PublishAgain, NotYet, NotYet]
        assert batches.publish_again()

    asyncio.run(play())


def test_all_publish_before_any_stops(batches):
    async def play():
        batches.publish_again()
        assert await ask(batches, 0) == [PublishAgain]
        batches.stop()
        assert await ask(batches, 0, 1, 0, 1) == [NotYet, PublishAgain, Stop, Stop]
        assert not batches.publish_again(), "a replica may have stopped"

    asyncio.run(play())


def trajectory(admission_version, versions, mask, reward, correct=False, uid=0):
    n = len(versions)
    return Trajectory(
        uid=uid,
        epoch=0,
        prompt_id=0,
        admission_version=admission_version,
        prompt=np.ones(2, np.int32),
        response=np.ones(n, np.int32),
        logprobs=np.zeros(n, np.float32),
        versions=np.array(versions, np.int32),
        loss_mask=np.array(mask, np.uint8),
        reward=reward,
        truncated=False,
        correct=correct,
    )


def test_replicas_wait_for_the_last_group_and_for_the_report_of_the_batch_before():
    schedule = Schedule(batch_size=4, group_size=2, max_staleness=1, updates=10)
    schedule.add_engine(0, 0)
    subject = make(60, schedule, take=lambda group: [trajectory(0, [0, 0], [1, 1], 1.0) for _ in range(2)])

    async def play():
        changed = Changed()
        forming = asyncio.create_task(subject.run(changed))
        groups = [schedule.admit(0, 0, prompt) for prompt in range(4)]
        for number in range(2):
            waiting = [asyncio.create_task(subject.next(NextBatch(replica, number, number))) for replica in range(2)]
            for group in groups[2 * number :][:2]:
                await asyncio.sleep(0.02)
                assert not any(task.done() for task in waiting)
                schedule.finish(group)
                changed.notify()
            async with asyncio.timeout(10):
                parts = await asyncio.gather(*waiting)
            assert [type(part) for part in parts] == [EncodedBatch] * 2
            ahead = asyncio.create_task(subject.next(NextBatch(1, number + 1, number + 1)))
            await asyncio.sleep(0.02)
            assert not ahead.done()
            subject.trained(Trained(number, number, True, {}))
            subject.stop() if number else ahead.cancel()
        async with asyncio.timeout(10):
            assert isinstance(await ahead, Stop)
        forming.cancel()

    asyncio.run(play())


@pytest.mark.parametrize("share_prompts", [True, False])
def test_a_group_is_one_bundle_unless_the_config_forbids_it(share_prompts):
    schedule = Schedule(batch_size=4, group_size=2, max_staleness=1, updates=10)
    schedule.add_engine(0, 0)
    asked = {"schedule": schedule, "share_prompts": share_prompts}
    subject = make(60, take=lambda group: [trajectory(0, [0, 0], [1, 1], 1.0) for _ in range(2)], **asked)

    async def play():
        for prompt in range(2):
            schedule.finish(schedule.admit(0, 0, prompt))
        async with asyncio.timeout(10):
            parts = await asyncio.gather(*(subject.next(NextBatch(replica, 0, 0)) for replica in range(2)))
        bundles = [decoder(BatchPart).decode(part.part).minibatches for part in parts]
        assert bundles == [[[[[0, 1]]]] if share_prompts else [[[[0], [1]]]]] * 2

    asyncio.run(play())


@pytest.mark.parametrize(
    ("settings", "apart"),
    [
        ({"algorithm": "grpo"}, True),
        ({"algorithm": "ppo"}, False),
        ({"algorithm": "grpo", "penalty": PenaltyConfig(entropy=0.1)}, False),
        ({"algorithm": "grpo", "correction": CorrectionConfig(m2po=0.03)}, False),
    ],
    ids=["grpo", "ppo", "penalty", "m2po"],
)
def test_answers_without_a_gradient_have_rows_of_their_own_unless_all_tokens_count(settings, apart):
    schedule = Schedule(batch_size=4, group_size=2, max_staleness=1, updates=10)
    schedule.add_engine(0, 0)

    def take(group):
        prompt = group.prompt_id
        rewards = [[0.5, 0.5], [0.0, 1.0]][prompt]
        answers = [trajectory(0, [0, 0], [1, 1], reward, uid=2 * prompt + i) for i, reward in enumerate(rewards)]
        return [replace(answer, prompt_id=prompt) for answer in answers]

    subject = make(60, schedule, take, ppo=PPOConfig(minibatches=1, **settings))

    async def play():
        for prompt in range(2):
            schedule.finish(schedule.admit(0, 0, prompt))
        async with asyncio.timeout(10):
            parts = await asyncio.gather(*(subject.next(NextBatch(replica, 0, 0)) for replica in range(2)))
        rows = [decoder(BatchPart).decode(part.part).members[0] for part in parts]
        assert [len(own) for own in rows] == [1 + apart] * 2

    asyncio.run(play())


def test_requests_for_another_batch_are_refused(batches):
    async def play():
        for request, reason in (
            (NextBatch(0, 2, 1), "batch 2 of version 1 is not next: that is batch 0 of version 0"),
            (NextBatch(2, 0, 0), "there is no replica 2, trainer.dp is 2"),
        ):
            with pytest.raises(Refusal, match=reason):
                await batches.next(request)
        with pytest.raises(Refusal, match="batch 0 of version 0 is not in training"):
            batches.trained(Trained(0, 0, True, {}))

    asyncio.run(play())


def test_staleness_of_answers_and_of_their_trained_tokens():
    found = describe(
        [
            trajectory(3, [3, 3, 4, 5], [1, 1, 1, 1], 4.5, correct=True),
            trajectory(5, [5, 5], [0, 1], -5.0, uid=1),
            trajectory(4, [4], [0], -5.0, uid=2),
        ],
        version=5,
    )
    assert (found["response_tokens_right"], found["response_tokens_wrong"]) == (4, 1.5)
    assert "response_tokens_right" not in describe([trajectory(5, [5], [1], -5.0)], version=5)
    assert found["staleness_histogram"] == {"0": 1, "1": 1, "2": 1}
    assert found["token_staleness_histogram"] == {"0": 2, "1": 1, "2": 2}
    assert found["trained_tokens"] == 5 and found["accuracy"] == pytest.approx(1 / 3)
