"""The arms of tools/bench/staleness.py, and tables and a plot of their results. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev, variance
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from areal_megatron.observe.estimates import Estimate
from tools.bench import picture

OBJECTIVES = ("naive", "decoupled")
ETAS = (0, 4, 8, 16)
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Arm:
    """Runs that differ in objective, η and seed only."""

    name: str
    says: str
    overrides: tuple[str, ...]
    objectives: tuple[str, ...] = OBJECTIVES
    updates: int = 64
    etas: tuple[int, ...] = (8, 16)
    """Above 0."""
    like: str = ""
    """The arm whose runs at η = 0 are also those of this arm, since what it adds does nothing there."""

    @property
    def cells(self) -> list[tuple[str, int]]:
        """(objective, η) of the runs. At η = 0 both objectives are one algorithm, which is run once."""
        stale = [(objective, eta) for eta in self.etas for objective in self.objectives]
        return stale if self.like else [("decoupled", 0), *stale]


_MASK = ("ppo.correction.sequence_mask_low=0.6667", "ppo.correction.sequence_mask_high=1.5")
_AS_SCHEDULED = "optimizer.staleness_kl=0"
_DEFAULT = ("optimizer.lr=2.5e-5", "optimizer.schedule=constant")
_CONSTANT, _FALLING = (*_DEFAULT, _AS_SCHEDULED), ("optimizer.lr=2.5e-5", "optimizer.schedule=linear", _AS_SCHEDULED)
_SLOW = ("optimizer.lr=8e-6", "optimizer.schedule=constant", _AS_SCHEDULED)
_SINGLE = ("ppo.minibatches=1", "optimizer.lr=1e-4", "optimizer.schedule=constant")
_PRODUCT = "ppo.correction.product_truncate=5"
ARMS = (
    Arm("falling", "rate 2.5e-5, falling linearly to 0", _FALLING),
    Arm("constant", "rate 2.5e-5, constant", _CONSTANT),
    Arm("masked", "constant, sequences masked", (*_CONSTANT, *_MASK), ("decoupled",), like="constant"),
    Arm("falling_masked", "falling, sequences masked", (*_FALLING, *_MASK), ("decoupled",), like="falling"),
    Arm("product", "constant, weights of sequences", (*_CONSTANT, _PRODUCT), ("decoupled",), like="constant"),
    Arm("slow", "rate 8e-6, constant, 192 updates", _SLOW, updates=192),
    Arm("scaled", "constant, scaled to what is in flight", _DEFAULT, ("decoupled",), like="constant"),
    Arm("single", "one mini-batch, rate 1e-4, constant", (*_SINGLE, _AS_SCHEDULED), ("decoupled",), etas=(4, 8)),
    Arm("single_scaled", "the same, scaled to what is in flight", _SINGLE, ("decoupled",), etas=(4, 8), like="single"),
)
STUDENT = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228]
"""97.5% quantiles of Student's t with 1 to 10 degrees of freedom."""
COLORS = dict(
    zip(
        (arm.name for arm in ARMS),
        ("#2563eb", "#dc2626", "#16a34a", "#9333ea", "#0891b2", "#ca8a04", "#db2777", "#64748b", "#0d9488"),
        strict=True,
    )
)
MARKERS = {"naive": "s", "decoupled": "o"}

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


def of(results: Results, arm: Arm, objective: str, eta: int) -> list[dict[str, Any]]:
    """Returns the figures of the successful runs of an arm with this objective and η, of all seeds."""
    name = arm.name if eta or not arm.like else arm.like
    objective = objective if eta else "decoupled"
    runs = [results["cells"].get(f"{name}-{objective}-eta{eta}-seed{seed}", {}) for seed in SEEDS]
    return [run for run in runs if "accuracy" in run]


def accuracies(runs: Sequence[dict[str, Any]]) -> list[float]:
    return [run["accuracy"] for run in runs]


def in_second_quarter(runs: Sequence[dict[str, Any]]) -> list[float]:
    """Returns each run's share of right answers among those trained in that quarter: its progress while it learns."""
    trained = [run["training_accuracy"] for run in runs]
    return [mean(shares[len(shares) // 4 : len(shares) // 2]) for shares in trained]


def tables(results: Results) -> str:
    """Returns Markdown: accuracies and progress over η, and every run."""
    commits = sorted({result["commit"] for result in results["cells"].values() if "accuracy" in result})
    of_runs = ["arm", "objective", "η", "runs", "difference from η = 0", "staleness; of tokens"]
    of_tokens = [
        "effective_share",
        "its minimum",
        "kl_proximal",
        "clipped",
        "masked",
        "rate scaled by",
        "largest fall",
        "updates to 0.8; 0.9",
    ]
    rows = [_details(results, arm, *cell) for arm in ARMS for cell in arm.cells]
    lines = [
        _over_seeds(results, "held-out accuracy", accuracies),
        _over_seeds(results, "accuracy of trained answers, second quarter of the updates", in_second_quarter),
        _table([*of_runs, *of_tokens], [row for row in rows if row]),
        f"Commits: {', '.join(commits)}. Settings: `{' '.join(results['overrides'])}`.",
    ]
    return "\n\n".join(lines) + "\n"


def _over_seeds(results: Results, name: str, shares: Callable[[Sequence[dict[str, Any]]], list[float]]) -> str:
    def cell(arm: Arm, objective: str, eta: int) -> str:
        values = shares(of(results, arm, objective, eta))
        return _percent(mean_over_seeds(values), len(values) > 1) if values else "–"

    rows = [
        [f"{objective}, {arm.says}", *(cell(arm, objective, eta) for eta in ETAS)]
        for arm in ARMS
        for objective in arm.objectives
    ]
    return _table([name, *(f"η = {eta}" for eta in ETAS)], rows)


def gap(results: Results, arm: Arm, objective: str, eta: int) -> Estimate | None:
    """Returns the difference of held-out accuracy from η = 0; None without two runs of each."""
    runs, base = of(results, arm, objective, eta), of(results, arm, objective, 0)
    return difference(accuracies(runs), accuracies(base)) if min(len(runs), len(base)) > 1 else None


def _details(results: Results, arm: Arm, objective: str, eta: int) -> list[str]:
    """Returns a row of the last table; nothing for a cell without runs."""
    if not (runs := of(results, arm, objective, eta)):
        return []
    apart = gap(results, arm, objective, eta) if eta else None
    said = f"{100 * apart.value:+.1f} ({100 * apart.low:+.1f} to {100 * apart.high:+.1f})" if apart else "–"
    figures = {key: mean(run[key] for run in runs) for key in runs[0] if isinstance(runs[0][key], float)}
    return [
        arm.name,
        objective if eta else "both",
        str(eta),
        ", ".join(f"{100 * run['accuracy']:.1f}" for run in runs),
        said,
        f"{figures['staleness_mean']:.1f}; {figures['token_staleness_mean']:.1f}",
        *(f"{figures[key]:.3f}" for key in ("effective_share", "effective_share_min")),
        f"{figures['kl_proximal']:.4f}",
        *(f"{figures[key]:.1%}" for key in ("clip_share", "masked_share")),
        f"{figures['lr_factor']:.2f}" if "lr_factor" in figures else "–",
        f"{100 * max(largest_fall(run['training_accuracy']) for run in runs):.1f}",
        "; ".join(_mean_updates([updates_to(run["training_accuracy"], level) for run in runs]) for level in (0.8, 0.9)),
    ]


def _mean_updates(counts: Sequence[int | None]) -> str:
    known = [count for count in counts if count is not None]
    missing = f" (never in {len(counts) - len(known)})" if len(known) < len(counts) else ""
    return f"{mean(known):.0f}{missing}" if known else "never"


def ten_means(shares: Sequence[float]) -> list[float]:
    """Returns the mean of each ten updates that follow each other; of all, if they are fewer."""
    return [mean(shares[first : first + 10]) for first in range(max(len(shares) - 9, 1))]


def updates_to(shares: Sequence[float], level: float) -> int | None:
    """Returns after how many updates the mean of the last ten has reached `level`; None if it never does."""
    return next((first + 10 for first, value in enumerate(ten_means(shares)) if value >= level), None)


def largest_fall(shares: Sequence[float]) -> float:
    """Returns how far the mean of ten updates came to lie below an earlier one, in the second half of the run."""
    means = ten_means(shares)
    late = means[len(means) // 2 :]
    return max(earlier - later for place, earlier in enumerate(late) for later in late[place:])


def _percent(share: Estimate, interval: bool = True) -> str:
    bounds = f" ({100 * share.low:.1f} – {100 * share.high:.1f})" if interval else ""
    return f"{100 * share.value:.1f}{bounds}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def plot(results: Results) -> str:
    """Returns an SVG: on the left accuracy over η, as means with intervals over seeds; on the right the difference of
    each decoupled run from the mean at η = 0, over its effective_share (which is 1 in naive ones)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 4.6), layout="constrained")
    drawn = [(arm, objective) for arm in ARMS for objective in arm.objectives if _is_there(results, arm, objective)]
    for number, (arm, objective) in enumerate(drawn):
        _draw(left, right, results, arm, objective, 0.04 * (number - (len(drawn) - 1) / 2))
    left.yaxis.set_major_formatter(PercentFormatter(1))
    left.set_xticks(range(len(ETAS)), [str(eta) for eta in ETAS])
    left.set_xlabel("η")
    right.axhline(0, color="#94a3b8", linewidth=0.8)
    right.axhline(-2, color="#94a3b8", linewidth=0.8, linestyle=":")
    right.invert_xaxis()
    right.set_xlabel("effective_share, mean over the updates")
    titles = ("Held-out accuracy at the end", "Points from η = 0, each decoupled run")
    for axes, title in zip((left, right), titles, strict=True):
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e2e8f0", linewidth=0.8)
    if drawn:
        figure.legend(*left.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=3, fontsize=8)
    return picture.svg(figure)


def _is_there(results: Results, arm: Arm, objective: str) -> bool:
    return any(of(results, arm, objective, eta) for eta in ETAS if eta)


def _draw(left: Axes, right: Axes, results: Results, arm: Arm, objective: str, shift: float) -> None:
    style = {"color": COLORS[arm.name], "marker": MARKERS[objective]}
    by_eta = [(x + shift, accuracies(of(results, arm, objective, eta))) for x, eta in enumerate(ETAS)]
    there = [(x, values, mean_over_seeds(values)) for x, values in by_eta if values]
    line = "-" if objective == "decoupled" else "--"
    label = f"{objective}, {arm.says}"
    left.plot([x for x, _, _ in there], [e.value for _, _, e in there], line, label=label, markersize=4, **style)
    bars = [(x, e) for x, values, e in there if len(values) > 1]
    left.vlines([x for x, _ in bars], [e.low for _, e in bars], [e.high for _, e in bars], color=style["color"])
    base = accuracies(of(results, arm, objective, 0))
    stale = [run for eta in ETAS if eta for run in of(results, arm, objective, eta)]
    for run in stale if base and objective == "decoupled" else ():
        right.plot(run["effective_share"], 100 * (run["accuracy"] - mean(base)), linestyle="", **style)
