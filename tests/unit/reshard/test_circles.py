"""Whether messages, and the collectives between them, can wait for each other in a circle on GPUs with few queues."""

from functools import cache
from itertools import count, islice
from pathlib import Path

import pytest

from areal_megatron.config import config_file
from areal_megatron.models.architecture import read_config
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.run import gpu_settings
from tests.support.gpu_queues import Gpus, Thread
from tests.support.reshard_oracle import CONFIG

COLLECTIVES = 16
"""How many each tensor-parallel group has: about as many as a rank has messages in the small layouts."""
SIZES = {
    "tp2": MegatronSizes(tp=2),
    "tp2-pp2": MegatronSizes(tp=2, pp=2),
    "tp2-dp2": MegatronSizes(tp=2, dp=2),
}
QUEUES = [1, 8, 32]
CONNECTIONS = int(gpu_settings.SETTINGS["CUDA_DEVICE_MAX_CONNECTIONS"])
CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SHIPPED = sorted(
    path.stem
    for path in CONFIGS.glob("*.yaml")
    if all(section in path.read_text(encoding="utf-8") for section in ("\ntrainer: {", "\nrollout:"))
)
"""The configs for clusters."""
FEW_SENDERS = ["qwen3_14b", "r1_14b", "r1_32b"]
"""Those that are laid out in tenths of a second."""
MODELS = {"sea_235b": "Qwen3-235B-A22B-Thinking-2507"}
"""Config → its model, where the key has the folder of a run."""
HERE = {"send_after": "posted", "receive_after": "next", "takes_place": True}
"""The rule of carriers/nccl.py: a receive is posted once its sender has no other message to send first, and the message
is sent once its receive is posted and the rank sends fewer than eight."""
AT_ANY_NUMBER = HERE | {"send_after": "running"}
"""A rule that does with any number of queues: the message is sent once its receive runs. Then no message in a queue
waits for work that is in no queue yet."""


@cache
def layout(name):
    """Returns the planner of one of SIZES or SHIPPED, and the size of a tensor-parallel group of trainers."""
    if name in SIZES:
        return Planner(CONFIG, SIZES[name], EngineSizes(tp=2), bucket_elements=6000), 2
    config = config_file.load(CONFIGS / f"{name}.yaml", [])
    model = read_config(CONFIGS / "models" / MODELS.get(name, Path(config.model.path).name))
    trainers, engine = MegatronSizes.of(config.trainer), EngineSizes.of(config.rollout)
    # A message has all that a rank sends to another.
    return Planner(model, trainers, engine, bucket_elements=2**40, engines=config.rollout.engines), trainers.tp


@cache
def plans(name, engines):
    """Returns the first plans in which the first trainer rank sends."""
    planner, _ = layout(name)
    every = map(planner.plan, count())
    return list(islice(((number, plan) for number, plan in enumerate(every) if plan.sent_by(0)), engines))


def threads(name, engines, one_at_a_time=True, send_after="", receive_after="", takes_place=False):
    """Returns the threads that send and receive in a layout, and those that compute with collectives meanwhile.

    `one_at_a_time`: as carriers/nccl.py has it, with one stream for all messages of a rank's link. Otherwise all are
    posted at once, on a stream for each pair.
    """
    planner, tp = layout(name)
    trainers, of_engine = len(planner.sources), len(planner.destinations)
    made = []
    for engine, plan in plans(name, engines):

        def messages(buckets, end, engine=engine):
            return [
                (
                    ("link", engine, None if one_at_a_time else getattr(b, end)),
                    (engine, b.source, b.destination, b.number),
                )
                for b in buckets
            ]

        for rank in range(trainers):
            work = messages(plan.sent_by(rank), "destination")
            made.append(Thread(("trainer", rank), work, one_at_a_time, send_after, takes_place))
        for rank in range(of_engine):
            work = messages(plan.received_by(rank), "source")
            made.append(Thread(("engine", engine, rank), work, one_at_a_time, receive_after))
            work = [("tensor", ("of engine", engine, number)) for number in range(COLLECTIVES)]
            made.append(Thread(("engine", engine, rank), work, one_at_a_time=False))
    for rank in range(trainers):
        work = [("tensor", ("of trainers", rank // tp, number)) for number in range(COLLECTIVES)]
        work.insert(COLLECTIVES // 2, ("data", "all gradients"))
        made.append(Thread(("trainer", rank), work, one_at_a_time=False))
    return made


def circles(name, schedules, queues=CONNECTIONS, trainers=None, engines=2, nccl_waits=True, **rule):
    """Returns how many random schedules get stuck with `queues` on a GPU, or `trainers` of them on a trainer's."""

    def count_of(rank):
        return trainers if trainers and rank[0] == "trainer" else queues

    return Gpus(threads(name, engines, **rule), count_of, nccl_waits).circles(schedules)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("queues", [1, 2, 4])
def test_messages_one_at_a_time_never_wait_in_a_circle_by_themselves(name, queues):
    assert not circles(name, 200, queues, nccl_waits=False)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("engines", "schedules"), [(2, 10_000), (8, 5000), (24, 2000)])
def test_messages_whose_ends_wait_for_each_other_hardly_ever_wait_in_a_circle(name, engines, schedules):
    """It takes a message behind a collective and one before it on either side. 24 links on a rank of the trainers are
    those of configs/qwen3_235b.yaml on 36 nodes."""
    assert circles(name, schedules, engines=engines, **HERE) <= 1


@pytest.mark.parametrize("name", [*SIZES, *FEW_SENDERS])
@pytest.mark.parametrize("queues", QUEUES)
def test_never_with_any_number_of_queues_if_messages_wait_for_receives_that_run(name, queues):
    assert not circles(name, 500, queues, **AT_ANY_NUMBER)


@pytest.mark.soak
@pytest.mark.parametrize("name", [*SIZES, *SHIPPED])
def test_hardly_ever_in_ten_thousand_of_each_layout(name):
    """A schedule of DeepSeek-V3 takes a fifth of a second."""
    schedules = 1000 if name == "deepseek_v3" else 10_000
    assert circles(name, schedules, **HERE) <= 10


@pytest.mark.soak
@pytest.mark.parametrize("name", [*SIZES, *SHIPPED])
@pytest.mark.parametrize("queues", QUEUES)
def test_nor_in_a_thousand_of_each_layout(name, queues):
    assert not circles(name, 1000, queues, **AT_ANY_NUMBER)


def test_where_ranks_receive_from_many_they_may_if_receives_do_not_wait_for_their_senders():
    """A sender may turn to another rank first, whose receive waits behind a collective of both."""
    assert circles("qwen3_14b", 2000, send_after="posted")
    assert not circles("qwen3_14b", 2000, **HERE)


@pytest.mark.parametrize("name", SIZES)
def test_with_fewer_queues_they_do(name):
    """So processes with fewer are refused: a receive that is posted may not run, behind a collective of its engine."""
    assert circles(name, 100, 1, **HERE) > 50
    assert 0 < circles(name, 10_000, 8, **HERE) < 100


@pytest.mark.parametrize("name", ["tp2-pp2", "tp2-dp2"])
def test_sent_before_that_they_do(name):
    """The waits that NCCL puts behind messages hold up collectives: the more links, the more of them."""
    assert circles(name, 100, engines=16) > 5
    assert circles(name, 100, trainers=1) > 75


@pytest.mark.parametrize("name", SIZES)
def test_messages_all_at_once_do(name):
    """Otherwise the tests above could not fail."""
    assert any(circles(name, 50, queues, one_at_a_time=False, nccl_waits=False) for queues in (1, 2, 4))


def test_two_senders_and_two_receivers_in_opposite_orders_are_a_circle():
    """The model itself: each waits for the one that the other posts later."""
    taken = [
        Thread("a", [("link", "a to c"), ("link", "a to d")], True),
        Thread("b", [("link", "b to d"), ("link", "b to c")], True),
        Thread("c", [("link", "b to c"), ("link", "a to c")], True),
        Thread("d", [("link", "a to d"), ("link", "b to d")], True),
    ]
    assert len(Gpus(taken, lambda rank: 4).stuck(0)) == 4
    reversed_ends = [Thread(thread.rank, thread.work[::-1], True) for thread in taken[2:]]
    assert not Gpus([*taken[:2], *reversed_ends], lambda rank: 1).stuck(0)


@pytest.mark.parametrize(("send_after", "receive_after"), [("posted", ""), ("running", ""), ("running", "next")])
def test_a_receive_whose_sender_turns_to_another_first_holds_up_its_engine(send_after, receive_after):
    """Its collective then waits behind the receive, and the other rank's receive behind this collective."""
    taken = [
        Thread("trainer", [("link", "to b"), ("link", "to a")], True, send_after),
        Thread("a", [("link", "to a")], True, receive_after),
        Thread("b", [("link", "to b")], True, receive_after),
        *(Thread(rank, [("tensor", "of a and b")], False) for rank in "ab"),
    ]
    gpus = Gpus(taken, lambda rank: 1)
    assert bool(gpus.circles(50)) == (not receive_after)
