"""What a finite sample of answers says of a model: pass@k, means over items, and how sure they are. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
_RESAMPLES = 10_000


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float
    """Bounds of the 95% confidence interval."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate, from n answers of which c are correct, of the chance that one of k is: 1 − C(n−c, k) / C(n,
    k).

    Chen et al. 2021 (arXiv 2107.03374), Eq. 1; computed in whole numbers and rounded once. Raises ValueError unless
    1 ≤ k ≤ n and 0 ≤ c ≤ n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@{k} of {n} answers, {c} correct")
    subsets = math.comb(n, k)
    return (subsets - math.comb(n - c, k)) / subsets


def estimate(values: Sequence[float]) -> Estimate:
    """Mean over items, of values in [0, 1], with the percentile bootstrap interval over items (Efron 1979).

    Items are what is drawn anew: the answers to one item are alike, and would make an interval over answers too narrow.
    It stays in [0, 1] and is skewed near its ends, where a normal interval is not. If every item has 0, or every item
    1, resampling has nothing to vary: then the exact binomial interval (Clopper and Pearson 1934). Always the same for
    the same values.
    """
    items, tail = np.asarray(values, np.float64), (1 - CONFIDENCE) / 2
    mean, m = float(items.mean()), len(items)
    if mean in (0.0, 1.0):
        bound = 1 - tail ** (1 / m)
        return Estimate(mean, 0.0, bound) if mean == 0 else Estimate(mean, 1 - bound, 1.0)
    draw = np.random.default_rng(0)
    parts = [items[draw.integers(m, size=(_RESAMPLES // 10, m))].mean(axis=1) for _ in range(10)]
    low, high = np.quantile(np.concatenate(parts), [tail, 1 - tail])
    return Estimate(mean, float(low), float(high))
