"""Batches divided over replicas, mini-batches and micro-batches."""

import numpy as np
import packing_paper
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_megatron.data.packing import partition, split
from areal_megatron.data.trajectory import Trajectory

LENGTHS = st.lists(st.integers(1, 300), min_size=8, max_size=60)


def trajectory(uid: int, length: int) -> Trajectory:
    return Trajectory(
        uid=uid, epoch=0, prompt_id=0, admission_version=0, prompt=np.ones(1, np.int32),
        response=np.ones(length - 1, np.int32), logprobs=np.zeros(length - 1, np.float32),
        versions=np.zeros(length - 1, np.int32), loss_mask=np.ones(length - 1, np.uint8), reward=0.0, truncated=False,
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 2), st.integers(1, 4), st.integers(20, 200), st.integers(0, 5))
def test_partition_keeps_every_promise(lengths, replicas, minibatches, cap, seed):
    plan = partition(lengths, replicas, minibatches, cap, seed)
    flat = [i for replica in plan for minibatch in replica for microbatch in minibatch for i in microbatch]
    assert sorted(flat) == list(range(len(lengths)))
    assert len(plan) == replicas and all(len(replica) == minibatches for replica in plan)
    sizes = []
    for m in range(minibatches):
        shares = [replica[m] for replica in plan]
        assert len({len(share) for share in shares}) == 1, "replicas run different numbers of micro-batches"
        assert all(sum(len(bin_) for bin_ in share) for share in shares), "a replica has nothing to train"
        sizes.append(sum(len(bin_) for share in shares for bin_ in share))
        for bin_ in (bin_ for share in shares for bin_ in share):
            assert sum(lengths[i] for i in bin_) <= cap or len(bin_) == 1
        tokens = [sum(lengths[i] for bin_ in share for i in bin_) for share in shares]
        longest = max(lengths[i] for share in shares for bin_ in share for i in bin_)
        assert max(tokens) - min(tokens) <= longest
    assert max(sizes) - min(sizes) <= 1


def test_the_seed_shuffles_and_repeats():
    first, again, other = (partition([5] * 40, 2, 2, 50, seed) for seed in (1, 1, 2))
    assert first == again != other


def test_fewer_sequences_than_replicas_is_refused():
    with pytest.raises(ValueError, match="mini-batch of 1 sequences cannot be split over 2 replicas"):
        partition([3, 3], replicas=2, minibatches=2, cap=10, seed=0)


@pytest.mark.parametrize(
    ("sizes", "cap", "least", "expected"),
    [
        ([4, 3, 3, 2], 6, 1, [[0, 3], [1, 2]]),  # 4 | 3 | 3 joins 3 | 2 goes where the fewest are: to the 4
        ([4, 3, 3, 2], 100, 3, [[0, 3], [1], [2]]),  # three are opened first
        ([9, 2, 2], 5, 1, [[0], [1, 2]]),  # too long for the cap: alone
        ([], 5, 1, []),
    ],
)
def test_algorithm_1(sizes, cap, least, expected):
    assert packing_paper.allocate(np.array(sizes, dtype=np.int64), cap, least) == expected


def test_balance_on_a_long_tail():
    lengths = np.random.default_rng(0).lognormal(9, 0.6, 512).astype(int)
    loads = [lengths[group].sum() for group in packing_paper.balance(lengths, 8)]
    assert max(loads) < 1.01 * min(loads)


def test_parts_index_their_own_trajectories():
    lengths = np.random.default_rng(1).integers(2, 90, 24).tolist()
    trajectories = [trajectory(uid, length) for uid, length in enumerate(lengths)]
    parts = split(trajectories, version=3, replicas=2, minibatches=3, cap=120, seed=7)
    plan = partition(lengths, 2, 3, 120, 7)
    assert [part.version for part in parts] == [3, 3]
    for part, expected in zip(parts, plan, strict=True):
        uids = [[[part.trajectories[i].uid for i in bin_] for bin_ in minibatch] for minibatch in part.minibatches]
        assert uids == expected
        assert len(part.trajectories) == sum(len(bin_) for minibatch in expected for bin_ in minibatch)
