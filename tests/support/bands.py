"""Bands in which learning curves are expected: what several seeds of a run have reached, in tests/e2e/bands.json.

python -m tests.support.bands NAME RUN_FOLDER …     measures the band of a run anew, from runs of several seeds
"""

import json
import sys
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

from areal_megatron.observe.metrics import read_metrics
from areal_megatron.run.folder import RunFolder

FILE = Path(__file__).parents[1] / "e2e" / "bands.json"
PARTS = 8
"""Equal parts of a run's updates. A curve is the mean accuracy of the answers trained in each."""
DEVIATIONS, LEAST = 4, 0.05
"""Half the width of a band: so many standard deviations over the seeds, and at least so much."""


def curve(folder: Path) -> list[float]:
    accuracies = [line["accuracy"] for line in read_metrics(RunFolder(folder)) if line["kind"] == "update"]
    edges = [round(part * len(accuracies) / PARTS) for part in range(PARTS + 1)]
    return [mean(accuracies[begin:end]) for begin, end in pairwise(edges)]


def band(curves: list[list[float]]) -> list[list[float]]:
    """Returns [lowest, highest] of each part, within 0 and 1."""
    found = []
    for values in zip(*curves, strict=True):
        half = max(LEAST, DEVIATIONS * stdev(values))
        found.append([round(max(0.0, mean(values) - half), 3), round(min(1.0, mean(values) + half), 3)])
    return found


def check(name: str, folder: Path) -> None:
    """Fails, with a picture in the run's folder, if a run's curve leaves the band of that name."""
    found, expected = curve(folder), json.loads(FILE.read_text())[name]
    left = [
        part for part, (value, (low, high)) in enumerate(zip(found, expected, strict=True)) if not low <= value <= high
    ]
    if left:
        picture = folder / "band.svg"
        draw(name, found, expected, picture)
        shown = [round(value, 3) for value in found]
        raise AssertionError(
            f"{name} leaves its band in part {left[0] + 1} of {PARTS}: {shown}, expected {expected}: {picture}"
        )


def draw(name: str, found: list[float], expected: list[list[float]], file: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    parts = range(1, PARTS + 1)
    axes.fill_between(parts, *zip(*expected, strict=True), color="#cbd5e1", label="expected")
    axes.plot(parts, found, "o-", color="#2563eb", label="this run")
    axes.set(title=name, xlabel=f"part of the updates, of {PARTS}", ylabel="accuracy of trained answers", ylim=(0, 1))
    axes.legend(frameon=False)
    figure.savefig(file)
    plt.close(figure)


def main() -> None:
    name, *folders = sys.argv[1:]
    bands = json.loads(FILE.read_text()) if FILE.exists() else {}
    bands[name] = band([curve(Path(folder)) for folder in folders])
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(bands.items()))
    FILE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
