"""Whether messages, and the collectives between them, can wait for each other in a circle on GPUs with few queues."""

import itertools
import random

import pytest

from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.trainer_layout import MegatronSizes
from tests.support.gpu_queues import Thread, stuck
from tests.support.reshard_oracle import CONFIG

ENGINES, TP, COLLECTIVES = 2, 2, 4
SIZES = [MegatronSizes(tp=2), MegatronSizes(tp=2, pp=2), MegatronSizes(tp=2, dp=2)]
QUEUES = [1, 2, 4]


def threads(sizes, one_at_a_time):
    """Two engines of two ranks receive what trainers of two ranks send; both compute with collectives meanwhile.

    `one_at_a_time`: as transport.Link does it, with one stream for all messages of a rank's link. Otherwise all are
    posted at once, on a stream for each pair.
    """
    planner = Planner(CONFIG, sizes, EngineSizes(tp=TP), bucket_elements=6000)
    made = []
    for engine in range(ENGINES):
        plan = planner.plan(engine)

        def messages(buckets, end, engine=engine):
            return [
                (
                    ("link", engine, None if one_at_a_time else getattr(b, end)),
                    (engine, b.source, b.destination, b.number),
                )
                for b in buckets
            ]

        sent = [messages(plan.sent_by(rank), "destination") for rank in range(sizes.ranks)]
        received = [messages(plan.received_by(rank), "source") for rank in range(TP)]
        made += [Thread(("trainer", rank), work, one_at_a_time) for rank, work in enumerate(sent)]
        made += [Thread(("engine", engine, rank), work, one_at_a_time) for rank, work in enumerate(received)]
    groups = [[("trainer", rank + tp) for tp in range(2)] for rank in range(0, sizes.ranks, 2)]
    groups += [[("engine", engine, rank) for rank in range(TP)] for engine in range(ENGINES)]
    for group in groups:
        work = [("compute", (*group, number)) for number in range(COLLECTIVES)]
        made += [Thread(rank, work, one_at_a_time=False) for rank in group]
    return made


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_messages_one_at_a_time_never_wait_in_a_circle(sizes):
    taken = threads(sizes, one_at_a_time=True)
    for number, queues in zip(range(10_000 // len(SIZES) + 1), itertools.cycle(QUEUES), strict=False):
        assert not stuck(taken, queues, random.Random(number)), f"schedule {number} with {queues} queues"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_messages_all_at_once_do(sizes):
    """Otherwise the test above could not fail."""
    taken = threads(sizes, one_at_a_time=False)
    assert any(stuck(taken, queues, random.Random(number)) for number in range(50) for queues in QUEUES)


def test_two_senders_and_two_receivers_in_opposite_orders_are_a_circle():
    """The model itself: each waits for the one that the other posts later."""
    taken = [
        Thread("a", [("link", "a to c"), ("link", "a to d")], True),
        Thread("b", [("link", "b to d"), ("link", "b to c")], True),
        Thread("c", [("link", "b to c"), ("link", "a to c")], True),
        Thread("d", [("link", "a to d"), ("link", "b to d")], True),
    ]
    assert len(stuck(taken, 4, random.Random(0))) == 4
    assert not stuck(
        [*taken[:2], Thread("c", taken[2].work[::-1], True), Thread("d", taken[3].work[::-1], True)],
        1,
        random.Random(0),
    )
