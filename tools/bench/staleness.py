"""Learning under staleness: a small version of the paper's Table 2 (AReaL, arXiv 2505.24298), on the demo's additions.

    python tools/bench/staleness.py [--out runs/sweep-staleness] [--cells 'PATTERN …'] [--list] [key=value …]

A cell is one PPO run from one warm-started model: naive or decoupled objective, η of 0 to 16, a seed, and an arm:
what else is different (staleness_table.py lists the arms). Each finished cell is kept in OUT/results.json with its
commit; the same command runs what is missing, failed or was interrupted. `--cells 'falling-*'` or `--cells '*-seed1'`
runs a part; `--list` shows what is finished. OUT/staleness.md and OUT/staleness.svg hold the tables and the plot of the
results so far. `key=value` overrides apply to every cell and cannot change within a folder. Exit code 0: all requested
cells are finished, 1: a cell failed, 2: wrong input, 130 or 143: interrupted.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from statistics import mean
from typing import Any

from areal_megatron.config import ConfigError, config_file
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.process.files import write_atomically, write_json
from areal_megatron.run.folder import RunFolder
from tools.bench import staleness_table
from tools.bench.common import ROOT, end_when_told
from tools.bench.staleness_table import ARMS, SEEDS, Arm, Results

EVALUATIONS = 2
"""Evaluations at the end of a run, whose mean is its accuracy."""
APART = 4
"""Updates between these."""
SETTINGS = [
    "batch_size=128",
    "optimizer.warmup_steps=0",
    "rollout.max_running=512",
    "eval.n=4",
    "eval.share=1",
]
"""What differs from configs/tiny_cpu.yaml in every cell. Evaluations are of one version."""
EQUAL = shlex.join([sys.executable, str(Path(__file__).with_name("equal_staleness.py"))])
"""How Python is called for the controller: every answer is trained η versions after its admission."""
BASE_SEED = 1
RUN_TIMEOUT_S = 1800
SHARES = ("effective_share", "kl_proximal", "clip_share", "capped_share", "masked_share")
"""Metrics of an update that are kept as means over the updates."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    arm: Arm
    objective: str
    eta: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm.name}-{self.objective}-eta{self.eta}-seed{self.seed}"

    @property
    def overrides(self) -> list[str]:
        return [
            *self.arm.overrides,
            f"updates={self.arm.updates}",
            f"eval.every={self.arm.updates - APART}",
            f"ppo.objective={self.objective}",
            f"rollout.max_staleness={self.eta}",
            f"seed={self.seed}",
        ]


def all_cells() -> list[Cell]:
    """Returns all cells seed by seed, so that the first seed already fills a table."""
    return [Cell(arm, objective, eta, seed) for seed in SEEDS for arm in ARMS for objective, eta in arm.cells]


def selected(cells: list[Cell], patterns: list[str]) -> list[Cell]:
    """Returns the cells whose name matches any of the patterns; all if there are none.

    Raises ConfigError for a pattern that matches no cell.
    """
    for pattern in patterns:
        if not any(fnmatch(cell.name, pattern) for cell in cells):
            raise ConfigError(f"--cells: {pattern!r} matches no cell; --list names all {len(cells)}")
    return [cell for cell in cells if not patterns or any(fnmatch(cell.name, pattern) for pattern in patterns)]


def missing(cells: list[Cell], results: Results) -> list[Cell]:
    """Returns the cells that have no result or failed."""
    return [cell for cell in cells if "accuracy" not in results["cells"].get(cell.name, {})]


class Sweep:
    """A folder with results; a context manager that locks it. Raises ConfigError for a folder with other settings."""

    def __init__(self, out: Path, overrides: list[str]):
        self.out, self.results_file, self.base = out.absolute(), out / "results.json", out.absolute() / "base"
        config_file.load(ROOT / "configs" / "tiny_cpu.yaml", [*SETTINGS, *overrides])  # before anything is made
        self.results: Results = {"overrides": [*SETTINGS, *overrides], "cells": {}}
        if self.results_file.exists():
            there = json.loads(self.results_file.read_text(encoding="utf-8"))
            if there["overrides"] != self.results["overrides"]:
                raise ConfigError(f"{self.results_file} is of {' '.join(there['overrides'])}: choose another --out")
            self.results = there

    def __enter__(self) -> Sweep:
        self.out.mkdir(parents=True, exist_ok=True)
        self._lock = (self.out / "lock").open("a", encoding="utf-8")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ConfigError(f"{self.out}: a sweep, or a run that it has left, is still at work there") from None
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def make_base(self) -> None:
        """Makes the warm-started model from which every cell begins, and the data, unless they exist."""
        if (self.base / "done").exists():
            return
        shutil.rmtree(self.base, ignore_errors=True)
        world = self.base / "world"
        self._run("base", "tools/make_arithmetic.py", str(world), f"--seed={BASE_SEED}")
        self._run(
            "base",
            "-m",
            "areal_megatron.launch.local",
            "configs/tiny_sft.yaml",
            f"runs_dir={self.base}",
            "name=sft",
            f"seed={BASE_SEED}",
            f"model.path={world / 'model'}",
            f"data.train={world / 'sft.jsonl'}",
        )
        write_atomically(self.base / "done", commit() + "\n")

    def run(self, cell: Cell) -> dict[str, Any]:
        """Runs a cell from its start and returns its figures. Raises RunFailed."""
        folder, world, started = self.out / "runs" / cell.name, self.base / "world", time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        self._run(
            cell.name,
            "-m",
            "areal_megatron.launch.local",
            "configs/tiny_cpu.yaml",
            f"--python=controller={EQUAL}",
            f"runs_dir={folder.parent}",
            f"name={cell.name}",
            f"model.path={self.base / 'sft' / 'hf'}",
            f"data.train={world / 'train.jsonl'}",
            f"data.eval={world / 'heldout.jsonl'}",
            *self.results["overrides"],
            *cell.overrides,
        )
        figures = measure(folder) | {"commit": commit(), "seconds": time.monotonic() - started}
        shutil.rmtree(folder / "hf", ignore_errors=True)
        return figures

    def keep(self, cell: Cell, result: dict[str, Any]) -> None:
        self.results["cells"][cell.name] = result
        write_json(self.results_file, self.results)

    def _run(self, what: str, *arguments: str) -> None:
        """Runs Python with the lock inherited, so that the folder stays locked while a killed sweep's run is alive."""
        environment = dict(os.environ, PYTHONPATH=str(ROOT))
        try:
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=environment,
                timeout=RUN_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=[self._lock.fileno()],
                encoding="utf-8",
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            raise RunFailed(f"{what}: took more than {RUN_TIMEOUT_S} s") from None
        if done.returncode:
            last = (done.stdout.strip().splitlines() or ["no output"])[-1]
            raise RunFailed(f"{what}: exit code {done.returncode}: {last}")


class RunFailed(RuntimeError):
    """A run that is not counted, in one line."""


def measure(folder: Path) -> dict[str, Any]:
    """Returns the held-out accuracy of the last versions and figures of the training.

    Raises RunFailed if updates or evaluations are missing.
    """
    run = RunFolder(folder)
    config, lines = config_file.load(run.config), read_metrics(run)
    updates = [line for line in lines if line["kind"] == "update"]
    evaluations = sorted((line for line in lines if line["kind"] == "eval"), key=lambda line: line["version"])
    last = [line for line in evaluations if line["version"]][-EVALUATIONS:]
    if len(updates) != config.updates or len(last) != EVALUATIONS or last[-1]["version"] != config.updates:
        raise RunFailed(
            f"{config.name}: {len(updates)} of {config.updates} updates, {len(last)} of {EVALUATIONS} evaluations"
        )
    answers = _total(updates, "staleness_histogram")
    return {
        "accuracy": mean(evaluation["accuracy"] for evaluation in last),
        "accuracy_before": evaluations[0]["accuracy"],
        "updates": len(updates),
        "trained_answers": sum(answers.values()),
        "staleness_mean": _weighted_mean(answers),
        "staleness_max": max(answers),
        "token_staleness_mean": _weighted_mean(_total(updates, "token_staleness_histogram")),
        **{key: mean(update[key] for update in updates) for key in SHARES},
        "lr_factor": float(mean(update.get("lr_factor", 1.0) for update in updates)),
        "effective_share_min": min(update["effective_share"] for update in updates),
        "training_accuracy": [round(update["accuracy"], 4) for update in updates],
    }


def _total(updates: list[dict[str, Any]], key: str) -> dict[int, int]:
    """Returns staleness → count, summed over all updates."""
    total: dict[int, int] = {}
    for update in updates:
        for staleness, count in update[key].items():
            total[int(staleness)] = total.get(int(staleness), 0) + count
    return total


def _weighted_mean(counts: dict[int, int]) -> float:
    return sum(staleness * count for staleness, count in counts.items()) / sum(counts.values())


def commit() -> str:
    """Returns the commit of this checkout, marked if tracked files differ from it; `unknown` outside of git."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, encoding="utf-8", errors="replace"
    )
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def carry_out(sweep: Sweep, cells: list[Cell]) -> Iterator[str]:
    """Runs cells one after the other; yields a line for each."""
    sweep.make_base()
    for number, cell in enumerate(cells, 1):
        try:
            result = sweep.run(cell)
            said = "accuracy {accuracy:.3f}, staleness of tokens {token_staleness_mean:.2f}, {seconds:.0f} s"
            line = f"{cell.name}: {said.format(**result)}"
        except RunFailed as e:
            result, line = {"failed": str(e), "commit": commit()}, f"failed: {e}"
        sweep.keep(cell, result)
        yield f"{number} of {len(cells)}: {line}"


def listing(cells: list[Cell], results: Results) -> str:
    left = {cell.name for cell in missing(cells, results)}
    failed = {name: result["failed"] for name, result in results["cells"].items() if "failed" in result}
    lines = [f"{cell.name:<40}{failed.get(cell.name, 'missing') if cell.name in left else 'done'}" for cell in cells]
    return "\n".join([*lines, f"{len(cells) - len(left)} of {len(cells)} cells are there"])


def write_outcome(out: Path, results: Results) -> str:
    """Writes table and plot; the table, empty as long as no cell has ended well."""
    if not any("accuracy" in result for result in results["cells"].values()):
        return ""
    tables = staleness_table.tables(results)
    write_atomically(out / "staleness.md", tables)
    write_atomically(out / "staleness.svg", staleness_table.plot(results))
    return tables


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key in every cell")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "sweep-staleness", help="folder of the sweep, new or existing"
    )
    parser.add_argument(
        "--cells", default="", metavar="PATTERNS", help="only cells that match one, such as 'falling-* *-seed1'"
    )
    parser.add_argument("--list", action="store_true", help="show which cells are finished and run nothing")
    options = parser.parse_intermixed_args()
    try:
        cells = selected(all_cells(), options.cells.split())
        sweep = Sweep(options.out, options.overrides)
        if options.list:
            print(listing(cells, sweep.results))
            return 0
        with sweep:
            for line in carry_out(sweep, missing(cells, sweep.results)):
                print(line, flush=True)
                write_outcome(sweep.out, sweep.results)
            print(write_outcome(sweep.out, sweep.results))
    except (ConfigError, RunFailed) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    left = missing(cells, sweep.results)
    if left:
        print(f"failed, and run again by the same command: {', '.join(cell.name for cell in left)}")
    return 1 if left else 0


if __name__ == "__main__":
    end_when_told()
    sys.exit(main())
