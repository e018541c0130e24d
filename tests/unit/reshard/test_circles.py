"""Whether messages, and the collectives between them, can wait for each other in a circle on GPUs with few queues."""

import random

import pytest

from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.run import gpu_settings
from tests.support.gpu_queues import Thread, stuck
from tests.support.reshard_oracle import CONFIG

TP, COLLECTIVES = 2, 4
SIZES = [MegatronSizes(tp=2), MegatronSizes(tp=2, pp=2), MegatronSizes(tp=2, dp=2)]
QUEUES = [1, 2, 4]
CONNECTIONS = int(gpu_settings.SETTINGS["CUDA_DEVICE_MAX_CONNECTIONS"])


def threads(sizes, one_at_a_time=True, after_receiver=True, engines=2):
    """Engines of two ranks receive what trainers of two ranks send; both compute with collectives meanwhile.

    `one_at_a_time`, `after_receiver`: as carriers/nccl.py has it, with one stream for all messages of a rank's link,
    each posted once its receive is. Otherwise all are posted at once, on a stream for each pair, or before that.
    """
    planner = Planner(CONFIG, sizes, EngineSizes(tp=TP), bucket_elements=6000)
    made = []
    for engine in range(engines):
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
        made += [Thread(("trainer", rank), work, one_at_a_time, after_receiver) for rank, work in enumerate(sent)]
        made += [Thread(("engine", engine, rank), work, one_at_a_time) for rank, work in enumerate(received)]
    groups = [[("trainer", rank + tp) for tp in range(2)] for rank in range(0, sizes.ranks, 2)]
    groups += [[("engine", engine, rank) for rank in range(TP)] for engine in range(engines)]
    for group in groups:
        work = [("compute", (*group, number)) for number in range(COLLECTIVES)]
        made += [Thread(rank, work, one_at_a_time=False) for rank in group]
    return made


def circles(taken, schedules, trainers=CONNECTIONS, engines=CONNECTIONS, **options):
    """Returns how many random schedules get stuck with so many queues on a GPU."""

    def queues(rank):
        return trainers if rank[0] == "trainer" else engines

    return sum(bool(stuck(taken, queues, random.Random(number), **options)) for number in range(schedules))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("queues", QUEUES)
def test_messages_one_at_a_time_never_wait_in_a_circle_by_themselves(sizes, queues):
    taken = threads(sizes, after_receiver=False)
    assert not circles(taken, 200, queues, queues, nccl_waits=False)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("engines", "schedules"), [(2, 300), (8, 30)])
def test_messages_that_are_sent_after_their_receives_are_posted_never_wait_in_a_circle(sizes, engines, schedules):
    assert not circles(threads(sizes, engines=engines), schedules)


@pytest.mark.soak
@pytest.mark.parametrize(("engines", "schedules"), [(2, 10_000), (8, 10_000), (24, 2000)])
def test_nor_in_ten_thousand_schedules(engines, schedules):
    """24 links on a rank of the trainers are those of configs/qwen3_235b.yaml on 36 nodes."""
    assert not circles(threads(MegatronSizes(tp=2, pp=2), engines=engines), schedules)


@pytest.mark.soak
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_nor_in_more_schedules_of_each_layout(sizes):
    for queues in QUEUES:
        assert not circles(threads(sizes, after_receiver=False), 10_000 // 9 + 1, queues, queues, nccl_waits=False)
    for engines, schedules in ((2, 1500), (8, 150)):
        assert not circles(threads(sizes, engines=engines), schedules)


@pytest.mark.parametrize("sizes", SIZES[1:], ids=str)
def test_sent_before_that_they_do(sizes):
    """The waits that NCCL puts behind messages hold up collectives: the more links, the more of them."""
    assert circles(threads(sizes, after_receiver=False, engines=16), 20) > 1
    assert circles(threads(sizes, after_receiver=False), 100, trainers=1) > 75


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_messages_all_at_once_do(sizes):
    """Otherwise the tests above could not fail."""
    taken = threads(sizes, one_at_a_time=False, after_receiver=False)
    assert any(circles(taken, 50, queues, queues, nccl_waits=False) for queues in QUEUES)


def test_two_senders_and_two_receivers_in_opposite_orders_are_a_circle():
    """The model itself: each waits for the one that the other posts later."""
    taken = [
        Thread("a", [("link", "a to c"), ("link", "a to d")], True),
        Thread("b", [("link", "b to d"), ("link", "b to c")], True),
        Thread("c", [("link", "b to c"), ("link", "a to c")], True),
        Thread("d", [("link", "a to d"), ("link", "b to d")], True),
    ]
    assert len(stuck(taken, lambda rank: 4, random.Random(0))) == 4
    assert not stuck(
        [*taken[:2], Thread("c", taken[2].work[::-1], True), Thread("d", taken[3].work[::-1], True)],
        lambda rank: 1,
        random.Random(0),
    )
