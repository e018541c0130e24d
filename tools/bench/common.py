"""Figures of several repetitions, and how benchmarks print them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

import numpy as np

RESAMPLES = 2000

Figure = dict[str, float]
"""Keys `median`, `min` and `max`, over repetitions."""


def spread(values: Iterable[float]) -> Figure:
    values = list(values)
    return {"median": median(values), "min": min(values), "max": max(values)}


def spreads(repetitions: list[dict[str, float]]) -> dict[str, Figure]:
    """Returns a figure for each key of the repetitions, which all have the same keys."""
    return {key: spread(repetition[key] for repetition in repetitions) for key in repetitions[0]}


def bootstrapped(
    repetitions: Mapping[str, np.ndarray], figures: Callable[[dict[str, np.ndarray]], dict[str, Any]]
) -> dict[str, Figure]:
    """Returns `figures` of the medians over repetitions, with 90% bootstrap intervals as `min` and `max`.

    Repetitions are the first axis of the arrays. `figures` must also accept medians with the resamples as first axis.
    """
    count = len(next(iter(repetitions.values())))
    drawn = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
    whole = figures({kind: np.median(values, axis=0) for kind, values in repetitions.items()})
    draws = figures({kind: np.median(values[drawn], axis=1) for kind, values in repetitions.items()})
    edges = {key: np.quantile(values, [0.05, 0.95]) for key, values in draws.items()}
    return {
        key: {"median": float(value), "min": float(edges[key][0]), "max": float(edges[key][1])}
        for key, value in whole.items()
    }


def cell(figure: Figure, digits: int = 2, width: int = 0) -> str:
    """Returns `median (lowest – highest)`, the median right-aligned in `width` characters."""
    return "{median:>{w},.{d}f} ({min:,.{d}f} – {max:,.{d}f})".format(w=width, d=digits, **figure)


def line(name: str, figure: Figure, digits: int = 2) -> str:
    return f"{name:<50}{cell(figure, digits, width=10)}"
