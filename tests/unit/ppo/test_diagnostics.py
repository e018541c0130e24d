"""Metrics of weights, clipping and entropy against sums over tokens in numpy."""

import numpy as np
import pytest
import torch

from areal_megatron.ppo import diagnostics
from areal_megatron.ppo.loss import Bounds, Tokens, metric_sums

LOW, HIGH, N = 0.2, 0.3, 400
LEFT_OUT = 50
RANGES = {"0": (0, 0), "1": (1, 1), "2": (2, 2), "3-4": (3, 4), "5-8": (5, 8), "9-16": (9, 16), "17+": (17, 10**9)}


def columns(seed):
    """Makes log π_θ, log π_prox, log π_behav, advantages, entropies, right or wrong, staleness, sequences."""
    random = np.random.default_rng(seed)
    behaviour = random.normal(-3, 1, N)
    proximal = behaviour + random.normal(0, 0.5, N)
    sequences = np.sort(random.integers(0, 40, N))
    sequences = np.unique(sequences, return_inverse=True)[1]
    advantages = np.round(random.normal(0, 1, 40))[sequences]  # some are 0
    return (
        proximal + random.normal(0, 0.3, N),
        proximal,
        behaviour,
        advantages,
        random.exponential(1, N),
        (random.random(40) < 0.5)[sequences],
        random.choice([0, 1, 3, 4, 5, 9, 16, 17, 40], N),  # none is 2
        sequences,
    )


def found(given, pieces=1, whole=False):
    """Adds the sums of the micro-batches that the tokens are divided into, one of them empty, and returns metrics."""
    bounds, totals, maxima = Bounds(LOW, HIGH, {}, whole), {"left_out": LEFT_OUT * (len(given[0]) > 0)}, {}
    shares = np.array_split(np.unique(given[-1]), pieces)
    for part in [*(np.flatnonzero(np.isin(given[-1], own)) for own in shares), np.arange(0)]:
        current, proximal, behaviour, advantages, entropy, right, staleness, sequences = (
            torch.from_numpy(column[part]) for column in given
        )
        tokens = Tokens(current, proximal, behaviour, advantages, sequences, torch.ones(len(part), dtype=torch.bool))
        summed, largest, single = diagnostics.sums(tokens, entropy, right, staleness.double(), bounds)
        assert set(summed) == {*diagnostics.SUMS, *diagnostics.GROUP_SUMS} and set(largest) == {*diagnostics.MAXIMA}
        assert len(single["weight"]) == len(part)
        summed |= metric_sums(tokens, entropy, bounds) | {"tokens": torch.tensor(len(part))}
        for name, value in summed.items():
            totals[name] = totals.get(name, 0.0) + value.item()
        for name, value in largest.items():
            maxima[name] = max(maxima.get(name, 0.0), value.item())
    assert totals["clip_share"] == totals["clip_share_high"] + totals["clip_share_low"]
    return diagnostics.metrics(totals | maxima)


def expected(given):
    current, proximal, behaviour, advantages, entropy, right, staleness, sequences = given
    ratio, weight = np.exp(current - proximal), np.exp(proximal - behaviour)
    high, low = (advantages > 0) & (ratio > 1 + HIGH), (advantages < 0) & (ratio < 1 - LOW)
    result = {
        "clip_share_high": high.mean(),
        "clip_share_low": low.mean(),
        "zero_advantage_share": np.mean([*(advantages == 0), *[True] * LEFT_OUT]),
        "log_weight_mean": np.log(weight).mean(),
        "weight_mean": weight.mean(),
        "weight_max": weight.max(),
        "effective_share_answers": of_answers(np.bincount(sequences, proximal - behaviour)),
        "entropy_right": entropy[right].mean(),
        "entropy_wrong": entropy[~right].mean(),
    }
    groups = {f"staleness_{name}": (staleness >= a) & (staleness <= b) for name, (a, b) in RANGES.items()}
    groups |= {"advantage_above_0": advantages > 0, "advantage_below_0": advantages < 0}
    for name, own in groups.items():
        if own.any():
            result |= {
                f"token_share/{name}": own.mean(),
                f"weight_mean/{name}": weight[own].mean(),
                f"weight_max/{name}": weight[own].max(),
                f"log_weight_mean/{name}": np.log(weight[own]).mean(),
                f"effective_share/{name}": weight[own].sum() ** 2 / (own.sum() * (weight[own] ** 2).sum()),
                f"advantage_mean/{name}": advantages[own].mean(),
                f"advantage_std/{name}": advantages[own].std(),
                f"clip_share/{name}": (high | low)[own].mean(),
            }
    return result


def of_answers(logarithms):
    products = np.exp(np.clip(logarithms, -20, 20))
    return products.mean() ** 2 / (products**2).mean()


@pytest.mark.parametrize("pieces", [1, 7])
def test_metrics_are_means_and_maxima_over_their_tokens_however_they_are_packed(pieces):
    given = columns(pieces)
    assert found(given, pieces) == pytest.approx(expected(given))
    assert not any("staleness_2" in name for name in found(given)), "no token has that staleness"


def test_where_sequences_have_one_ratio_it_is_that_of_the_sequence():
    given = columns(3)
    current, proximal, behaviour, *others, sequences = given
    count = np.bincount(sequences)
    drift, lag = (
        (np.bincount(sequences, a - b) / count)[sequences] for a, b in ((current, proximal), (proximal, behaviour))
    )
    of_sequences = (behaviour + lag + drift, behaviour + lag, behaviour, *others, sequences)
    assert found(given, whole=True) == pytest.approx(expected(of_sequences))


def test_without_tokens_there_are_no_groups():
    metrics = found([column[:0] for column in columns(0)])
    assert not any("/" in name or "entropy" in name for name in metrics) and set(metrics.values()) == {0}


def test_a_token_whose_weight_is_no_number_shows_in_its_group_alone():
    given = columns(4)
    given[2][given[6] == 40] = np.nan
    metrics = found(given)
    assert np.isnan(metrics["weight_mean"]) and np.isnan(metrics["weight_mean/staleness_17+"])
    assert np.isfinite(metrics["weight_mean/staleness_9-16"])
