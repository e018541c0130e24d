"""The factor of the learning rate against plain formulas, and in a world whose divergence is known."""

import json
import math
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
import torch

from areal_megatron.config.algorithms import LEAST_FACTOR
from areal_megatron.ppo import in_flight
from areal_megatron.ppo.in_flight import InFlight, Seen, restored


@pytest.mark.parametrize("pieces", [1, 5])
def test_sums_are_those_of_the_tokens_of_each_age_however_they_are_packed(pieces):
    random, n, eta = np.random.default_rng(pieces), 300, 3
    current, behaviour = random.normal(-3, 1, n), random.normal(-3, 1, n)
    entropy, staleness = random.exponential(1, n), random.integers(0, 6, n)
    fresh = (staleness == 0) & (random.random(n) < 0.7)  # the others attend to an older cache
    total = torch.zeros(eta + 2, 2, dtype=torch.float64)
    for part in [*np.array_split(np.arange(n), pieces), np.arange(0)]:
        columns = (torch.from_numpy(column[part]) for column in (current, behaviour, entropy, staleness, fresh))
        total += in_flight.sums(*columns, eta)
    away = np.clip(current - behaviour, -2, 2)
    divergence = np.exp(away) - 1 - away
    members = [fresh, staleness == 1, staleness == 2, staleness >= 3]
    expected = [[own.sum(), divergence[own].sum()] for own in members] + [[n, entropy.sum()]]
    np.testing.assert_allclose(total.numpy(), expected)
    seen = Seen.of(total)
    assert (seen.tokens, seen.fresh[0], len(seen.stale)) == (n, fresh.sum(), eta)


def test_the_factor_is_what_the_formula_says():
    """Two updates after one without stale tokens, in plain arithmetic."""
    target, eta = 0.05, 2
    known = InFlight().moved(3e-4, 1.0, eta)
    known, divergence = known.after(Seen((20.0, 0.2), ((80.0, 1.6), (0.0, 0.0)), 100.0, 30.0))
    assert divergence == pytest.approx((1.6 - 80 * 0.01) / 100)
    c = 0.008 / (0.8 * 3e-4**2)
    largest = math.sqrt(target * 0.3 / c / eta**2)  # as old as η allows, before η updates have been made
    assert known.factor(target, 1e-3, eta) == pytest.approx(largest / 1e-3)
    assert known.factor(target, largest, eta) == pytest.approx(1) and known.factor(target, largest / 2, eta) == 1

    known, divergence = known.moved(1e-4, 0.5, eta).after(Seen((0.0, 0.0), ((50.0, 1.0), (50.0, 3.0)), 100.0, 20.0))
    assert divergence == pytest.approx((4 - 100 * 0.01) / 100)
    paths = 0.8 * 0.8 * 3e-4**2 + 0.5 * 1e-4**2 + 0.5 * 4e-4**2
    c = (0.8 * 0.008 + 0.03) / paths
    age = (0.8 * 0.8 + 2.5) / 1.8
    entropy = (0.8 * 0.3 + 0.2) / 1.8
    assert known.factor(target, 1e-5, eta) == pytest.approx(1.5 ** (1 / math.sqrt(age)) * 0.5), "slowly"
    assert known.factor(target, 1e-3, eta) == pytest.approx(math.sqrt(target * entropy / c / age) / 1e-3)


def test_nothing_is_scaled_where_nothing_is_stale_or_the_policy_moves_slowly():
    fresh = Seen((100.0, 5.0), ((0.0, 0.0),) * 4, 100.0, 30.0)
    slow = Seen((10.0, 0.01), ((90.0, 0.0901), *((0.0, 0.0),) * 3), 100.0, 30.0)
    known, _ = InFlight().after(fresh)
    assert known.factor(1e-9, 1.0, 4) == 1.0
    known, _ = InFlight().moved(1e-5, 1.0, 4).after(slow)
    assert known.factor(0.01, 1e-5, 4) == 1.0 and known.factor(0.01, 0.0, 4) == 1.0
    less, divergence = InFlight().moved(1e-5, 1.0, 4).after(Seen((10.0, 0.1), slow.stale, 100.0, 30.0))
    assert divergence < 0 and less.factor(0.01, 1.0, 4) == 1.0, "fresh tokens differ by more"


def test_what_is_not_finite_tells_nothing():
    known, _ = InFlight().moved(1e-4, 1.0, 1).after(Seen((1.0, 0.0), ((9.0, 0.9),), 10.0, 5.0))
    for bad in (
        Seen((1.0, math.nan), ((9.0, 0.9),), 10.0, 5.0),
        Seen((1.0, 0.0), ((9.0, math.inf),), 10.0, 5.0),
        Seen((0.0, 0.0), ((0.0, 0.0),), 0.0, 0.0),
    ):
        assert known.after(bad) == (known, 0.0)


def run(rate, eta, ages, *, updates=100, c=4e5, numerics=3e-3, noise=0.3, seed=0, resume=None):
    """Trains in a world where a token that the policy has moved away from by `path` differs by c · path² and by
    `numerics`, a tenth as noisy; returns the sum of the rates of each update."""
    random, known, paths = np.random.default_rng(seed), InFlight(), []
    for update in range(updates):
        if update == resume:
            known = restored(json.loads(json.dumps(asdict(known))))
        old = [min(age, update) for age in ages]
        stale = [[0.0, 0.0] for _ in range(eta)]
        fresh = [100.0, 100 * numerics]
        for age in old:
            count = 1000.0 / len(ages)
            moved = c * sum(paths[update - age :]) ** 2 * math.exp(noise * random.normal())
            row = stale[age - 1] if age else fresh
            row[0] += count
            row[1] += count * (moved + numerics * (1 + noise / 10 * random.normal()))
        seen = Seen(tuple(fresh), tuple(map(tuple, stale)), 1100.0, 330.0)
        known, _ = known.after(seen)
        factor = known.factor(0.05, rate, eta)
        paths.append(rate * factor)
        known = known.moved(paths[-1], factor, eta)
    return paths


@pytest.mark.parametrize("ages", [[1], [2], [4], [8], [1, 2, 3, 8]])
@pytest.mark.parametrize("off", [10, 3, 0.1])
def test_it_settles_at_the_target_from_any_rate(ages, off):
    """After as many updates as answers are old, and a few; without noise exactly there, with it a little below."""
    eta = max(ages)
    share = 1000 / 1100
    best = math.sqrt(0.05 * 0.3 / (4e5 * share * np.mean(np.square(ages))))
    rate = off * best
    for noise, tolerance in ((0.0, 0.03), (0.3, 0.35)):
        paths = run(rate, eta, ages, noise=noise)
        assert max(paths) <= rate and paths[0] == rate
        expected = min(best, rate)
        late = paths[50:]
        assert np.mean(late) == pytest.approx(expected, rel=tolerance)
        assert max(late) <= expected * (1 + 2 * tolerance) and min(late) >= expected * (1 - 2 * tolerance)
        rise = 1.5 ** (1 / max(1, math.sqrt(share * np.mean(np.square(ages)))))
        assert all(after <= rise * before * 1.001 for before, after in pairwise(late))
        assert all(after <= 1.5 * before * 1.000001 for before, after in pairwise(paths))
        if off < 1:
            assert set(paths) == {rate}


def test_a_resumed_run_scales_as_if_it_had_gone_on():
    assert run(1e-3, 4, [1, 4], resume=17) == run(1e-3, 4, [1, 4])


def test_numerics_alone_scale_nothing_and_a_hopeless_target_stops_at_the_least_factor():
    assert set(run(1e-6, 4, [4], c=1.0, numerics=0.1, noise=0.0)) == {1e-6}
    paths = run(1.0, 4, [4], c=1e12, noise=0.0)
    assert min(paths) == LEAST_FACTOR
