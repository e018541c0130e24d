"""Batches split over replicas, mini-batches and micro-batches."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_megatron.data.trajectory import Trajectory
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.packing.balance import Shares
from areal_megatron.packing.bins import lower_bound
from areal_megatron.packing.partition import partition, split
from tools.bench import packing

LENGTHS = st.lists(st.integers(1, 300), min_size=8, max_size=60)


def trajectory(uid: int, length: int) -> Trajectory:
    return Trajectory(
        uid=uid,
        epoch=0,
        prompt_id=uid,
        admission_version=0,
        prompt=np.ones(1, np.int32),
        response=np.ones(length - 1, np.int32),
        logprobs=np.zeros(length - 1, np.float32),
        versions=np.zeros(length - 1, np.int32),
        loss_mask=np.ones(length - 1, np.uint8),
        reward=0.0,
        truncated=False,
    )


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


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(20, 400), st.randoms())
def test_sequences_without_a_gradient_are_kept_apart(lengths, replicas, minibatches, multiple, cap, random):
    idle = [random.random() < 0.5 for _ in lengths]
    plan = partition(lengths, replicas, minibatches, cap, 0, multiple=multiple, idle=idle)
    flat = [i for replica in plan for minibatch in replica for microbatch in minibatch for i in microbatch]
    assert sorted(flat) == list(range(len(lengths)))
    for shares in zip(*plan, strict=True):
        chosen = [i for share in shares for microbatch in share for i in microbatch]
        without = [i for i in chosen if idle[i]]
        apart = min(len(without), len(chosen) - len(without)) >= replicas
        kinds = [[{idle[i] for i in microbatch} for microbatch in share] for share in shares]
        assert all(len(kind) < 2 for share in kinds for kind in share) or not apart
        for share, own in zip(kinds, shares, strict=True):
            assert len(share) == len(kinds[0]) and len(share) % multiple == 0
            assert all(sum(lengths[i] for i in microbatch) <= cap or len(microbatch) == 1 for microbatch in own)
            if apart:  # those with a gradient come first, on every replica as many
                firsts = [min((j for j, kind in enumerate(each) if kind == {True}), default=0) for each in kinds]
                assert len(set(firsts)) == 1 and {False} not in share[firsts[0] :]


@pytest.mark.parametrize(
    ("rewards", "idle"), [([1, 1, 1, 0], [0, 1]), ([1, 1, 0, 0], [0, 1, 2, 3]), ([1, 0, 1, 0], [])]
)
def test_groups_with_equal_rewards_are_without_a_gradient(rewards, idle):
    """Answers without trained tokens say nothing of their group."""
    trajectories = [trajectory(uid, 10) for uid in range(5)]
    trajectories[4].loss_mask[:] = 0
    for t, group, reward in zip(trajectories, (0, 0, 1, 1, 1), (*rewards, 0.5), strict=True):
        t.prompt_id, t.reward = group, reward
    [part] = split(trajectories, version=0, replicas=1, minibatches=1, cap=60, seed=0, within_group=True)
    kinds = [{part.trajectories[i].uid for i in members} for members in part.members[0]]
    expected = [set(range(5)) - set(idle), set(idle)] if idle == [0, 1] else [set(range(5))]
    assert kinds == expected


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
    assert packing.allocate(np.array(sizes, dtype=np.int64), cap, least) == expected


def test_balance_on_a_long_tail():
    lengths = np.random.default_rng(0).lognormal(9, 0.6, 512).astype(int)
    loads = [lengths[group].sum() for group in packing.balance(lengths, 8)]
    assert max(loads) < 1.01 * min(loads)


def test_parts_index_their_own_trajectories():
    lengths = np.random.default_rng(1).integers(2, 90, 24).tolist()
    trajectories = [trajectory(uid, length) for uid, length in enumerate(lengths)]
    parts = split(trajectories, version=3, replicas=2, minibatches=3, cap=120, seed=7)
    plan = partition(lengths, 2, 3, 120, 7)
    assert [part.version for part in parts] == [3, 3]
    for part, expected in zip(parts, plan, strict=True):
        uids = [[[part.trajectories[i].uid for i in bin_] for bin_ in minibatch] for minibatch in part.members]
        assert uids == expected
        assert len(part.trajectories) == sum(len(bin_) for minibatch in expected for bin_ in minibatch)


def test_trajectories_cost_what_flops_says():
    """Only the trained tokens differ: a replica gets one long and one short share of them."""
    trajectories = [trajectory(uid, 50) for uid in range(4)]
    for t in trajectories[2:]:
        t.loss_mask = np.zeros(49, np.uint8)
    flops = SequenceFlops(token=1.0, trained=10.0, pair=0.0)
    for seed in range(8):
        parts = split(trajectories, version=0, replicas=2, minibatches=1, cap=100, seed=seed, flops=flops)
        assert [sum(int(t.loss_mask.sum()) for t in part.trajectories) for part in parts] == [49, 49]


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 2), st.integers(1, 3), st.integers(100, 400))
def test_costs_and_multiples_keep_the_promises_too(lengths, replicas, minibatches, multiple, cap):
    costs = np.array(lengths) * 100.0 + np.square(lengths)
    plan = partition(lengths, replicas, minibatches, cap, 0, costs, multiple)
    assert plan == partition(lengths, replicas, minibatches, cap, 0, costs, multiple)
    flat = [i for replica in plan for minibatch in replica for microbatch in minibatch for i in microbatch]
    assert sorted(flat) == list(range(len(lengths)))
    for shares in zip(*plan, strict=True):
        [count] = {len(share) for share in shares}
        assert count % multiple == 0
        members = [i for share in shares for microbatch in share for i in microbatch]
        assert replicas * count >= lower_bound(np.minimum(np.array(lengths)[members], cap), cap)
        for share in shares:
            spent = [costs[microbatch].sum() for microbatch in share]
            assert spent == sorted(spent, reverse=True) and spent[0] > 0
            assert all(sum(lengths[i] for i in microbatch) <= cap or len(microbatch) == 1 for microbatch in share)


@pytest.mark.parametrize("seed", range(20))
def test_few_sequences_are_about_as_level_as_any_choice_of_the_same_bins(seed):
    """Compares with all ways to put seven sequences into two bins under the cap on each of two replicas."""
    random = np.random.default_rng(seed)
    sizes = random.integers(5, 40, 7)
    costs, cap, bins = sizes * 50.0 + sizes**2, 70, np.array([0, 0, 1, 1, 2, 2, 3])
    cap = max(cap, int(np.bincount(bins, sizes).max()))
    choices = np.array(list(product(range(4), repeat=7)))
    loads = np.stack([(sizes * (choices == number)).sum(1) for number in range(4)])
    first = (costs * (choices < 2)).sum(1)
    fewest = np.maximum(first, costs.sum() - first)[(loads <= cap).all(0)].min()
    shares = Shares(sizes, costs, bins, cap, 4, 2)
    shares.level()
    assert shares.loads.max() <= cap and np.bincount(shares.owners).tolist() == [2, 2]
    np.testing.assert_allclose(shares.totals.sum(), costs.sum())
    assert fewest <= shares.totals.max() + 1e-9 <= 1.1 * fewest


@pytest.mark.parametrize(("name", "seed"), list(product(packing.DISTRIBUTIONS, range(3))))
def test_generated_lengths_reach_the_bound_and_the_balance(name, seed):
    lengths, task = packing.generate(name, seed), packing.Task()
    figures = packing.judge(packing.ours(lengths, task), lengths, task)
    assert figures["bins"] == figures["aligned L2"] and figures["over the cap"] == 0
    assert figures["FLOP imbalance"] <= 1e-3


def test_one_more_microbatch_where_full_ones_leave_nothing_to_shift():
    """200 tokens fill one micro-batch of each replica, but then costs are 60² + 4 · 10² and 40² + 6 · 10²."""
    lengths = [60, 40, *[10] * 10]
    costs = np.square(lengths).astype(np.float64)
    plan = partition(lengths, 2, 1, 100, 0, costs)
    assert [len(minibatch) for [minibatch] in plan] == [2, 2]
    spent = [sum(costs[i] for microbatch in minibatch for i in microbatch) for [minibatch] in plan]
    assert sorted(spent) == [2600, 3600]
    level = partition([60, 60, 40, 40], 2, 1, 100, 0, np.array([36.0, 36.0, 16.0, 16.0]))
    assert [len(minibatch) for [minibatch] in level] == [1, 1]
