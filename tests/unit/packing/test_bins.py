"""Bin packing against a search over all subsets, and the lower bound against its definition."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_megatron.packing import bins
from areal_megatron.packing.bins import fill_empty, lower_bound, pack

CAP = 60
SIZES = st.lists(st.integers(1, CAP), min_size=1, max_size=9).map(lambda sizes: np.array(sizes, dtype=np.int64))


def optimum(sizes: np.ndarray, cap: int) -> int:
    """Returns the fewest bins possible; for each subset of the sizes, `fewest` has (bins, least load of the last)."""

    @cache
    def fewest(subset: int) -> tuple[int, int]:
        found = (1, 0) if not subset else (len(sizes) + 1, 0)
        for i, size in enumerate(sizes.tolist()):
            if subset >> i & 1:
                count, last = fewest(subset & ~(1 << i))
                found = min(found, (count, last + size) if last + size <= cap else (count + 1, size))
        return found

    return fewest((1 << len(sizes)) - 1)[0]


def assert_packed(found: np.ndarray, sizes: np.ndarray, cap: int, count: int) -> None:
    assert found.shape == sizes.shape and found.min() >= 0 and found.max() < count
    assert np.bincount(found, sizes, count).max() <= cap
    assert len(set(found.tolist())) == min(count, len(sizes)), "a bin is empty that need not be"


@settings(max_examples=200, deadline=None)
@given(SIZES)
def test_the_bound_is_its_definition_and_never_above_the_optimum(sizes):
    def at(threshold):
        large = sizes[sizes > CAP - threshold]
        medium = sizes[(sizes <= CAP - threshold) & (sizes > CAP / 2)]
        small = sizes[(sizes <= CAP / 2) & (sizes >= threshold)]
        room = len(medium) * CAP - medium.sum()
        return len(large) + len(medium) + max(0, int(np.ceil((small.sum() - room) / CAP)))

    bound = lower_bound(sizes, CAP)
    assert bound == max(at(threshold) for threshold in range(CAP // 2 + 1))
    assert -(-sizes.sum() // CAP) <= bound <= optimum(sizes, CAP)


def test_the_bound_sees_what_the_sum_does_not():
    assert lower_bound(np.array([6, 6, 6]), 10) == 3  # two bins by the sum
    assert lower_bound(np.array([6, 6, 5, 5, 5]), 10) == 4  # three by the sum: no 5 fits beside a 6
    assert lower_bound(np.array([], dtype=np.int64), 10) == 0


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(1, 10))
def test_what_is_packed_holds_and_what_holds_easily_is_packed(sizes, count):
    found = pack(sizes, CAP, count)
    if found is not None:
        assert count >= lower_bound(sizes, CAP)
        assert_packed(found, sizes, CAP, count)
        assert np.array_equal(found, pack(sizes, CAP, count))
    else:
        assert count < len(sizes)


@pytest.mark.parametrize("low", [1, 10, 20])
def test_the_optimum_is_found(low):
    for seed in range(60):
        sizes = np.random.default_rng([low, seed]).integers(low, CAP // 2 + 10, 9)
        count = optimum(sizes, CAP)
        assert_packed(pack(sizes, CAP, count), sizes, CAP, count)


@pytest.mark.parametrize(("count", "free"), [(8, 20), (40, 5), (200, 1)])
def test_bins_that_were_filled_are_filled_again(count, free):
    """Each bin of 4096 cut into four to six sizes, with `free` tokens a bin left out."""
    random, cap = np.random.default_rng(count), 4096
    cuts = [np.sort(random.choice(cap - 1, random.integers(3, 6), replace=False) + 1) for _ in range(count)]
    sizes = random.permutation(np.concatenate([np.diff([0, *cut, cap]) for cut in cuts]))
    sizes[np.argsort(-sizes)[:count]] -= free
    assert lower_bound(sizes, cap) == count
    assert_packed(pack(sizes, cap, count), sizes, cap, count)


def test_exchanges_bring_bins_under_the_cap():
    sizes, cap = np.random.default_rng(0).lognormal(7, 0.3, 400).astype(np.int64), 4096
    count = lower_bound(sizes, cap) + 1
    start = bins.spread(sizes, count)
    before = start.copy()
    assert bins.excess(sizes, start, cap, count) > 0
    assert_packed(bins.repair(sizes, start, cap, count), sizes, cap, count)
    assert np.array_equal(start, before)
    assert bins.repair(sizes, start, cap - 50, count) is None  # less than there are tokens


def test_empty_bins_take_from_those_with_most():
    found = np.array([0, 0, 0, 3, 3])
    fill_empty(found, 6)
    assert sorted(np.bincount(found, minlength=6).tolist()) == [0, 1, 1, 1, 1, 1]
