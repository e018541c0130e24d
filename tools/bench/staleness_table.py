"""From the results of tools/bench/staleness.py: the choice of the learning rate, tables and a plot. Pure functions."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from statistics import mean, stdev, variance
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from areal_megatron.observe.estimates import Estimate, estimate

OBJECTIVES = ("naive", "decoupled")
ETAS = (0, 1, 2, 4, 8, 16)
SEEDS = (1, 2, 3)
RATES = ("1e-5", "2.5e-5", "5e-5", "1e-4")
GRID_SEEDS = (11, 12, 13)
"""Disjoint from SEEDS: a rate that was lucky with one of those would favour η = 0."""
STUDENT = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228]
"""97.5% quantiles of Student's t with 1 to 10 degrees of freedom."""
COLORS = {"naive": "#ea580c", "decoupled": "#2563eb"}

Results = dict[str, Any]
"""`overrides` (common to all runs), and `cells`: name → figures of its run, or `failed` with the reason."""


def mean_over_seeds(values: Sequence[float]) -> Estimate:
    """Returns the mean of shares with Student's 95% interval, clipped to [0, 1]; for one value that is [0, 1]."""
    if len(values) < 2:
        return Estimate(mean(values), 0.0, 1.0)
    half = STUDENT[len(values) - 2] * stdev(values) / math.sqrt(len(values))
    return Estimate(mean(values), max(0.0, mean(values) - half), min(1.0, mean(values) + half))


def difference(values: Sequence[float], base: Sequence[float]) -> Estimate:
    """Returns mean of `values` − mean of `base`, with Student's 95% interval for equal variances; needs two of each."""
    freedom = len(values) + len(base) - 2
    pooled = ((len(values) - 1) * variance(values) + (len(base) - 1) * variance(base)) / freedom
    half = STUDENT[freedom - 1] * math.sqrt(pooled * (1 / len(values) + 1 / len(base)))
    value = mean(values) - mean(base)
    return Estimate(value, value - half, value + half)


def binomial(result: dict[str, Any]) -> Estimate:
    """Returns the accuracy of one run with the interval over its items."""
    correct = round(result["accuracy"] * result["items"])
    return estimate([1.0] * correct + [0.0] * (result["items"] - correct))


def of_rate(results: Results, rate: str) -> list[dict[str, Any]]:
    """Returns the figures of the successful runs of the grid with this rate."""
    return _ended(results, [f"grid-lr{rate}-seed{seed}" for seed in GRID_SEEDS], rate)


def of(results: Results, objective: str, eta: int) -> list[dict[str, Any]]:
    """Returns the figures of a cell's successful runs at the chosen rate, of all seeds."""
    return _ended(results, [f"{objective}-eta{eta}-seed{seed}" for seed in SEEDS], chosen_rate(results))


def _ended(results: Results, names: Sequence[str], rate: str | None) -> list[dict[str, Any]]:
    runs = [results["cells"].get(name, {}) for name in names]
    return [run for run in runs if run.get("rate") == rate and "accuracy" in run]


def accuracies(runs: Sequence[dict[str, Any]]) -> list[float]:
    return [run["accuracy"] for run in runs]


def in_second_quarter(runs: Sequence[dict[str, Any]]) -> list[float]:
    """Returns each run's share of right answers among those trained in that quarter: its progress while it learns."""
    trained = [run["training_accuracy"] for run in runs]
    return [mean(shares[len(shares) // 4 : len(shares) // 2]) for shares in trained]


def chosen_rate(results: Results) -> str | None:
    """Returns the rate of the grid with the best mean, or None until the whole grid is finished."""
    runs = {rate: accuracies(of_rate(results, rate)) for rate in RATES}
    if any(len(values) < len(GRID_SEEDS) for values in runs.values()):
        return None
    return max(RATES, key=lambda rate: mean(runs[rate]))


def tables(results: Results) -> str:
    """Returns Markdown: the grid, the tables in the paper's form, and every run."""
    commits = sorted({result["commit"] for result in results["cells"].values() if "accuracy" in result})
    lines = [
        _rates(results),
        _over_seeds(results, "held-out accuracy", accuracies),
        _over_seeds(results, "accuracy of trained answers, second quarter of the updates", in_second_quarter),
        _table(
            [
                "objective",
                "η",
                "runs, with their binomial interval",
                "difference from η = 0",
                "staleness mean, max; of tokens",
                "clipped",
                "capped",
            ],
            [_details(results, objective, eta) for objective in OBJECTIVES for eta in ETAS],
        ),
        f"Commits: {', '.join(commits)}. Settings: `{' '.join(results['overrides'])}`.",
    ]
    return "\n\n".join(lines) + "\n"


def _rates(results: Results) -> str:
    rows = []
    for rate in RATES:
        runs = accuracies(of_rate(results, rate))
        cells = (
            [_percent(mean_over_seeds(runs), len(runs) > 1), ", ".join(f"{100 * run:.1f}" for run in runs)]
            if runs
            else ["–", "–"]
        )
        rows.append([rate + (" (chosen)" if rate == chosen_rate(results) else ""), *cells])
    return _table(["learning rate, η = 0", "held-out accuracy", "runs"], rows)


def _over_seeds(results: Results, name: str, shares: Callable[[Sequence[dict[str, Any]]], list[float]]) -> str:
    def cell(objective: str, eta: int) -> str:
        values = shares(of(results, objective, eta))
        return _percent(mean_over_seeds(values), len(values) > 1) if values else "–"

    rows = [[objective, *(cell(objective, eta) for eta in ETAS)] for objective in OBJECTIVES]
    return _table([name, *(f"η = {eta}" for eta in ETAS)], rows)


def _details(results: Results, objective: str, eta: int) -> list[str]:
    runs, base = of(results, objective, eta), of(results, objective, 0)
    if not runs:
        return [objective, str(eta), *"–––––"]
    apart = "–"
    if eta and len(runs) > 1 and len(base) > 1:
        gap = difference(accuracies(runs), accuracies(base))
        apart = f"{100 * gap.value:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f})"
    shares = [f"{100 * mean(run[key] for run in runs):.1f}%" for key in ("clip_share", "capped_share")]
    stale, of_tokens = (mean(run[key] for run in runs) for key in ("staleness_mean", "token_staleness_mean"))
    stale = f"{stale:.1f}, {max(run['staleness_max'] for run in runs)}; {of_tokens:.1f}"
    return [objective, str(eta), ", ".join(_percent(binomial(run)) for run in runs), apart, stale, *shares]


def _percent(share: Estimate, interval: bool = True) -> str:
    bounds = f" ({100 * share.low:.1f} – {100 * share.high:.1f})" if interval else ""
    return f"{100 * share.value:.1f}{bounds}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def plot(results: Results) -> str:
    """Returns an SVG: on the left accuracy over η, of each run and as means with intervals over seeds; on the right the
    staleness that was trained."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 3.8), layout="constrained", width_ratios=[3, 2])
    for shift, objective in zip((-0.09, 0.09), OBJECTIVES, strict=True):
        there = [(x, runs) for x, eta in enumerate(ETAS) if (runs := of(results, objective, eta))]
        _draw_accuracy(left, objective, [(x + shift, accuracies(runs)) for x, runs in there])
        stale = [mean(run["staleness_mean"] for run in runs) for _, runs in there]
        right.plot([x + shift for x, _ in there], stale, "o-", color=COLORS[objective], label=objective)
    right.plot(range(len(ETAS)), ETAS, "_", color="#94a3b8", markersize=16, label="bound η")
    left.yaxis.set_major_formatter(PercentFormatter(1))
    for axes, title in (
        (left, "Held-out accuracy after the last update"),
        (right, "Mean staleness of trained answers"),
    ):
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axes.set_xticks(range(len(ETAS)), [str(eta) for eta in ETAS])
        axes.set_xlabel("η")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e2e8f0", linewidth=0.8)
        axes.legend(frameon=False, loc="best")
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    return buffer.getvalue()


def _draw_accuracy(axes: Axes, objective: str, points: list[tuple[float, list[float]]]) -> None:
    color, estimates = COLORS[objective], [mean_over_seeds(values) for _, values in points]
    bars = [(x, e) for (x, values), e in zip(points, estimates, strict=True) if len(values) > 1]
    axes.plot([x for x, _ in points], [e.value for e in estimates], "-", color=color, linewidth=1.8, label=objective)
    axes.vlines([x for x, _ in bars], [e.low for _, e in bars], [e.high for _, e in bars], color=color, linewidth=1.4)
    runs = [(x, value) for x, values in points for value in values]
    axes.plot([x for x, _ in runs], [value for _, value in runs], "o", color=color, markersize=4, alpha=0.6)
