"""What replicas are told instead of a batch: all of them the same, each once."""

import asyncio

import pytest

from areal_megatron.config import Config, Data, Machine, Model, Rollout, Trainer
from areal_megatron.rollout.batches import Batches
from areal_megatron.rollout.protocol import NextBatch, NotYet, PublishAgain, Stop
from areal_megatron.rollout.schedule import Schedule


@pytest.fixture
def batches():
    config = Config(name="t", updates=10, batch_size=4, model=Model("m"), data=Data("d"), trainer=Trainer(dp=2),
                    rollout=Rollout(group_size=2), machine=Machine(timeout_s=0.4))  # fmt: skip
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
