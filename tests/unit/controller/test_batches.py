"""What replicas are told instead of a batch: all of them the same, each once."""

import asyncio

import numpy as np
import pytest

from areal_megatron.config import Config, DataConfig, MachineConfig, ModelConfig, RolloutConfig, TrainerConfig
from areal_megatron.controller.batches import Batches, describe
from areal_megatron.controller.schedule import Schedule
from areal_megatron.data.trajectory import Trajectory
from areal_megatron.protocol import NextBatch, NotYet, PublishAgain, Stop


@pytest.fixture
def batches():
    config = Config(
        name="t",
        updates=10,
        batch_size=4,
        model=ModelConfig("m"),
        data=DataConfig("d"),
        trainer=TrainerConfig(dp=2),
        rollout=RolloutConfig(group_size=2),
        machine=MachineConfig(peer_timeout_s=0.4),
    )
    schedule = Schedule(batch_size=4, group_size=2, max_staleness=1, updates=10)
    return Batches(config, schedule, generation=None, flops=None)


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


def trajectory(admission_version, versions, mask, reward):
    n = len(versions)
    return Trajectory(
        uid=0,
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
    )


def test_staleness_of_answers_and_of_their_trained_tokens():
    found = describe(
        [
            trajectory(3, [3, 3, 4, 5], [1, 1, 1, 1], 5.0),
            trajectory(5, [5, 5], [0, 1], -5.0),
            trajectory(4, [4], [0], -5.0),
        ],
        version=5,
        correct=5.0,
    )
    assert found["staleness_histogram"] == {"0": 1, "1": 1, "2": 1}
    assert found["token_staleness_histogram"] == {"0": 2, "1": 1, "2": 2}
    assert found["trained_tokens"] == 5 and found["accuracy"] == pytest.approx(1 / 3)
