"""Estimates from a sample of answers: pass@k, and means over items with confidence intervals. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

CONFIDENCE = 0.95
_RESAMPLES = 10_000


@dataclass(frozen=True)
class Estimate:
    """A mean with its confidence interval."""

    value: float
    low: float
    high: float
    """`low` and `high` bound the 95% confidence interval."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns the unbiased estimate of pass@k from n answers of which c are correct: 1 − C(n − c, k) / C(n, k).

    The chance that at least one of k answers is correct, by Chen et al. 2021 (arXiv 2107.03374), Equation 1; computed
    in integers and rounded once. Raises ValueError unless 1 ≤ k ≤ n and 0 ≤ c ≤ n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@{k} of {n} answers, {c} correct")
    subsets = math.comb(n, k)
    return (subsets - math.comb(n - c, k)) / subsets


def all_of_k(n: int, c: int, k: int) -> float:
    """Returns the unbiased estimate of pass^k from n answers of which c are correct: C(c, k) / C(n, k).

    The chance that all of k answers are correct, as τ-bench counts (arXiv 2406.12045). Raises ValueError unless
    1 ≤ k ≤ n and 0 ≤ c ≤ n.
    """
    return 1 - pass_at_k(n, n - c, k)


class Graded(Protocol):
    """An answer to an item of an evaluation."""

    @property
    def item(self) -> int: ...
    @property
    def correct(self) -> bool: ...
    @property
    def truncated(self) -> bool: ...
    @property
    def tokens(self) -> int: ...


def item_values(answers: Sequence[Graded], n: int, ks: Sequence[int]) -> dict[str, dict[int, float]]:
    """Returns the value of each item in avg@n, and in pass@k and pass^k for each k, by the figure's name and the item,
    in order.

    n answers were asked for each item; an item with fewer counts with those that it has, in pass@k and pass^k if these
    are k or more. pass^1 is pass@1.
    """
    correct: dict[int, list[bool]] = {}
    for answer in answers:
        correct.setdefault(answer.item, []).append(answer.correct)
    items = {item: correct[item] for item in sorted(correct)}
    found = {f"avg@{n}": {item: sum(own) / len(own) for item, own in items.items()}}
    for k in ks:
        enough = {item: (len(own), sum(own)) for item, own in items.items() if len(own) >= k}
        found[f"pass@{k}"] = {item: pass_at_k(*counts, k) for item, counts in enough.items()}
        if k > 1:
            found[f"pass^{k}"] = {item: all_of_k(*counts, k) for item, counts in enough.items()}
    return {name: own for name, own in found.items() if own}


def figures(answers: Sequence[Graded], n: int, ks: Sequence[int]) -> dict[str, Any]:
    """Returns items, avg@n, pass@k and pass^k for each k, truncated_share and response_tokens_mean; items alone without
    answers.

    avg@n, pass@k and pass^k are {"value", "low", "high"}, of `item_values`.
    """
    found = item_values(answers, n, ks)
    result: dict[str, Any] = {"items": len(found.get(f"avg@{n}", ()))}
    if not answers:
        return result
    result |= {name: asdict(estimate([*own.values()])) for name, own in found.items()}
    return result | {
        "truncated_share": sum(answer.truncated for answer in answers) / len(answers),
        "response_tokens_mean": sum(answer.tokens for answer in answers) / len(answers),
    }


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean of the items' values, each in [0, 1], with its percentile bootstrap interval (Efron 1979).

    Items are resampled, not answers: the answers to one item are alike, and an interval over answers would be too
    narrow. The interval stays in [0, 1] and is skewed near the ends, unlike a normal one. If all values are 0 or all
    are 1, resampling has nothing to vary, and the interval is the exact binomial one (Clopper and Pearson 1934). The
    same values always give the same result.
    """
    items = np.asarray(values, np.float64)
    mean = float(items.mean())
    if mean in (0.0, 1.0):
        bound = _unseen(len(items))
        return Estimate(mean, 0.0, bound) if mean == 0 else Estimate(mean, 1 - bound, 1.0)
    return Estimate(mean, *_resampled(items))


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate:
    """Returns the mean over items of second − first, values in [0, 1] by item, with its interval; of the items in both,
    at least one.

    Items are paired: their differences are resampled, so that what an item's difficulty adds to both cancels out. If
    all differences are the same, the interval has room for as many other items as may not have been seen.
    """
    items = np.asarray([second[item] - first[item] for item in first if item in second], np.float64)
    mean = float(items.mean())
    if (items == items[0]).all():
        share = _unseen(len(items))
        return Estimate(mean, mean - share * (1 + mean), mean + share * (1 - mean))
    return Estimate(mean, *_resampled(items))


def _unseen(m: int) -> float:
    """The largest share of a kind of items of which there may be none among m, with 97.5% confidence."""
    return 1 - ((1 - CONFIDENCE) / 2) ** (1 / m)


def _resampled(items: np.ndarray) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean."""
    tail, m = (1 - CONFIDENCE) / 2, len(items)
    draw = np.random.default_rng(0)
    parts = [items[draw.integers(m, size=(_RESAMPLES // 10, m))].mean(axis=1) for _ in range(10)]
    low, high = np.quantile(np.concatenate(parts), [tail, 1 - tail])
    return float(low), float(high)
