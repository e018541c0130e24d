"""What benchmarks share: their options, figures of several repetitions, and how these are printed and kept."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from areal_megatron.process.files import write_json

ROOT = Path(__file__).resolve().parent.parent.parent
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


def report(figures: Mapping[str, Figure], digits: int = 2) -> str:
    """Returns a line for each figure."""
    return "\n".join(line(name, figure, digits) for name, figure in figures.items())


def positive(text: str) -> int:
    """Returns the whole number that an option was given. Raises ValueError unless it is positive."""
    if int(text) <= 0:
        raise ValueError
    return int(text)


def parser(about: str, repetitions: int = 0, out: str = "") -> argparse.ArgumentParser:
    """Returns a parser with these options, described by the first line of `about`."""
    return options_of(argparse.ArgumentParser(description=about.split("\n")[0]), repetitions, out)


def options_of(made: argparse.ArgumentParser, repetitions: int = 0, out: str = "") -> argparse.ArgumentParser:
    """Adds --json; --repetitions, if their usual number is given; and --out, if the name of new folders is."""
    if repetitions:
        made.add_argument("--repetitions", type=positive, default=repetitions, help="default: %(default)s")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    if out:
        made.add_argument("--out", type=Path, help=f"new folder; default: runs/{out}-N")
    return made


def keep(path: Path | None, figures: object) -> None:
    """Writes the figures into the file of --json, if it was given."""
    if path:
        write_json(path, figures)


def end_when_told() -> None:
    """Makes SIGTERM end this program as Ctrl-C does, with the runs that it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
