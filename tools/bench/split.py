"""Whether a run that has engines come and go ends as fast as with the best number of them from the beginning.

    python tools/bench/split.py [--load LOAD …] [--updates 240] [--json FILE] [--out runs/bench-split-N]

Runs of configs/bench_asynchrony.yaml with η = 4 and 1, 2 and 3 engines; then one that begins with the slowest of these
numbers and has rollout.most_engines=3, and the fastest once more, since machines are not equally fast for half an hour.
The trainer rank has a core of this machine to itself with one engine, and shares it with further ones. Speeds are
trained tokens/s after the first quarter of the updates.

`few_answers`: an engine decodes 16 answers at once, a group, so that one engine alone leaves trainers waiting.
`many_answers`: an engine decodes as many as there are, so that further ones only take processor time from the trainer.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_megatron.files import new_folder, write_json
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.run import Run
from tools.bench.asynchrony import SHORT, run_to_its_end, short_workload

MOST = 3
COMMON = [*SHORT, "rollout.max_staleness=4", f"machine.slots={1 + MOST}"]
LOADS = {"few_answers": ["rollout.max_running=16"], "many_answers": []}


def run(folder: Path, settings: list[str]) -> list[dict[str, Any]]:
    """Runs with the settings and returns the update lines of its metrics."""
    run_to_its_end(folder, [*COMMON, f"data.train={folder.parent / 'short.jsonl'}", *settings])
    return [line for line in read_metrics(Run(folder)) if line["kind"] == "update"]


def tokens_per_s(updates: Sequence[dict[str, Any]]) -> float:
    """Returns the trained tokens/s after the first quarter of the updates."""
    begin = len(updates) // 4
    measured = updates[begin:]
    return sum(update["trained_tokens"] for update in measured) / (measured[-1]["time"] - updates[begin - 1]["time"])


def moves(updates: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """Returns the numbers of engines that served, each with the update at which they first did."""
    held: list[tuple[int, int]] = []
    for update in updates:
        if not held or held[-1][1] != update["engines_serving"]:
            held.append((update["version"], update["engines_serving"]))
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--load", nargs="+", choices=LOADS, default=list(LOADS), metavar="LOAD", help=" or ".join(LOADS)
    )
    parser.add_argument("--updates", type=int, default=240, help="updates of each run")
    parser.add_argument("--json", type=Path, help="write the same figures here")
    parser.add_argument("--out", type=Path, help="new folder for the runs; default: runs/bench-split-N")
    options = parser.parse_args()
    from tools.make_arithmetic import save_model

    out = new_folder("bench-split", options.out)
    save_model(out / "model", seed=1)
    (out / "short.jsonl").write_text(short_workload(), encoding="utf-8")
    report: dict[str, Any] = {}
    for load in options.load:
        settings, fixed = [*LOADS[load], f"updates={options.updates}"], {}
        for engines in range(1, MOST + 1):
            updates = run(out / f"{load}-{engines}", [*settings, f"rollout.engines={engines}"])
            fixed[engines] = tokens_per_s(updates)
            print(f"{load}: {engines} engines, {fixed[engines]:,.0f} trained tokens/s", flush=True)
        best, worst = max(fixed, key=fixed.get), min(fixed, key=fixed.get)
        updates = run(out / f"{load}-balanced", [*settings, f"rollout.engines={worst}", f"rollout.most_engines={MOST}"])
        speed, held = tokens_per_s(updates), moves(updates)
        again = tokens_per_s(run(out / f"{load}-{best}-again", [*settings, f"rollout.engines={best}"]))
        over_best = sorted(speed / each for each in (fixed[best], again))
        print(
            f"{load}: begun with {worst}, {speed:,.0f} trained tokens/s, {over_best[0]:.2f} to {over_best[1]:.2f} of "
            f"the best ({best} engines, {again:,.0f} once more); engines from update: "
            f"{', '.join(f'{count} from {version}' for version, count in held)}",
            flush=True,
        )
        report[load] = {"fixed": fixed, "again": again, "balanced": speed, "over_best": over_best, "held": held}
    if options.json:
        write_json(options.json, report)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends its runs too
    main()
