"""Runs on this machine beside what the simulator predicts of them, calibrated on other runs.

A part of tools/bench/forecast.py. Calibrated are the efficiencies (planning/forecast/calibration.py) on four runs
that differ in what is to be told apart: `crowded` and `alone` have answers of 8 to 72 tokens, as many of each length,
one at η = 3, the other at η = 0, where engine and trainer take turns; `spread` has answers of 4 to 229 tokens at η =
3, few of them long, and smaller micro-batches; `brief` has answers of 4 to 16 tokens at η = 0. They have room for
128, 48, 16 and 64 at once, by which a step of an engine is told from its answers' part in it. Predicted and measured
are the runs of tools/bench/asynchrony.py at η = 0, 1, 2, 4, 8 and `colocated`, and two other distributions of lengths
at η = 4: `short` (12 to 24 tokens) and `two_kinds` (half 8, half 96). In all of them whoever computes has a core for
itself, on a machine with two: the simulator knows no others. What is compared is trained tokens/s between the same
updates.

Each repetition calibrates anew before its runs, so that a machine that becomes slower for an hour does not count as an
error of the simulator. Printed are the median over the repetitions and the range.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from itertools import cycle
from pathlib import Path
from statistics import median

import numpy as np

from areal_megatron.config import Config, config_file
from areal_megatron.planning.calibrate import contents
from areal_megatron.planning.forecast.accelerators import CORE, Accelerator
from areal_megatron.planning.forecast.calibration import FinishedRun, calibrated
from areal_megatron.planning.forecast.lengths import AnswerLengths
from areal_megatron.planning.forecast.simulator import Circumstances, Simulator
from areal_megatron.planning.forecast.times import times_of
from areal_megatron.process.files import new_folder, write_json
from areal_megatron.run.folder import RunFolder
from tools.bench import common
from tools.bench.asynchrony import (
    COOL_DOWN,
    VARIANTS,
    WARM_UP,
    WORKLOAD,
    measure,
    prompts_of_lengths,
    run_to_its_end,
    short_workload,
)
from tools.make_arithmetic import save_model

UPDATES = 30
CALIBRATING = {
    "crowded": ("even", ["rollout.max_running=128", "rollout.max_staleness=3"]),
    "alone": ("even", ["rollout.max_running=48", "rollout.max_staleness=0"]),
    "spread": ("spread", ["rollout.max_running=16", "rollout.max_staleness=3", "trainer.microbatch_tokens=1024"]),
    "brief": ("brief", ["rollout.max_running=64", "rollout.max_staleness=0"]),
}
PREDICTED = {
    **{f"eta{eta}": ("long_tail", [f"rollout.max_staleness={eta}"]) for eta in (0, 1, 2, 4, 8)},
    "colocated": ("long_tail", VARIANTS["colocated"]),
    "short": ("short", ["rollout.max_staleness=4"]),
    "two_kinds": ("two_kinds", ["rollout.max_staleness=4"]),
}
"""Run → its workload and settings."""


def workloads() -> dict[str, str]:
    """Returns the JSONL text of each workload."""
    return {
        "long_tail": WORKLOAD.read_text(encoding="utf-8"),
        "short": short_workload(),
        "two_kinds": prompts_of_lengths([8, 96] * 256, random.Random(0)),
        "even": prompts_of_lengths([8 + i % 65 for i in range(520)], random.Random(1)),
        "spread": prompts_of_lengths([4 + (i % 16) ** 2 for i in range(520)], random.Random(3)),
        "brief": prompts_of_lengths([4 + i % 13 for i in range(520)], random.Random(2)),
    }


class InOrder(AnswerLengths):
    """The lengths of a workload's prompts and answers, one prompt after another as the run draws them on average."""

    def __init__(self, text: str):
        rows = [json.loads(line) for line in text.splitlines()]
        self._rows = cycle([(len(row["prompt"]), row["response_tokens"]) for row in rows])

    def group(self, rng: np.random.Generator, count: int) -> tuple[int, np.ndarray]:
        prompt, tokens = next(self._rows)
        return prompt, np.full(count, tokens, dtype=np.int64)


def predicted(config: Config, gpu: Accelerator, lengths: AnswerLengths) -> float:
    """Returns the trained tokens/s between the updates that asynchrony.measure looks at."""
    config, times = times_of(config, gpu)
    updates = Simulator(config, times, lengths, Circumstances()).run().updates
    measured = updates[WARM_UP:-COOL_DOWN]
    return sum(update.tokens for update in measured) / (measured[-1].end - updates[WARM_UP - 1].end)


def settings_of(out: Path, workload: str, settings: Sequence[str]) -> list[str]:
    return [f"data.train={out / workload}.jsonl", f"updates={UPDATES}", *settings]


def calibrate(out: Path, repetition: int) -> Accelerator:
    """Makes the calibrating runs and returns what they tell, which is also written into a file."""
    runs = []
    for name, (workload, own) in CALIBRATING.items():
        folder = out / f"calibrating-{name}-{repetition}"
        run_to_its_end(folder, settings_of(out, workload, [*own, "rollout.dump=true"]))
        runs.append(FinishedRun.of(RunFolder(folder)))
        print(f"calibrating run {name} is done", flush=True)
    gpu = calibrated(runs, CORE)
    write_json(out / f"calibration-{repetition}.json", contents(gpu))
    print(gpu.efficiencies, flush=True)
    return gpu


@dataclass
class Compared:
    """A run that was measured and predicted, once a repetition, in trained tokens/s."""

    measured: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)

    @property
    def errors(self) -> list[float]:
        """By how much more was predicted, in shares of what was measured, in ascending order."""
        return sorted(said / found - 1 for said, found in zip(self.predicted, self.measured, strict=True))

    def line(self, name: str) -> str:
        found, said, errors = median(self.measured), median(self.predicted), self.errors
        line = f"{name:<12}{found:>9,.0f} measured{said:>9,.0f} predicted{median(errors):>+7.0%}"
        return line + (f" ({errors[0]:+.0%} to {errors[-1]:+.0%})" if len(errors) > 1 else "")


def compare(options: argparse.Namespace) -> None:
    out = new_folder("bench-forecast", options.out)
    save_model(out / "model", seed=1)
    texts = workloads()
    for name, text in texts.items():
        (out / f"{name}.jsonl").write_text(text, encoding="utf-8")
    asked = [name for name in PREDICTED if any(fnmatch(name, pattern) for pattern in options.runs)]
    report = {name: Compared() for name in asked}
    for repetition in range(1, options.repetitions + 1):
        gpu = calibrate(out, repetition)
        for name in asked:
            workload, settings = PREDICTED[name]
            folder = out / f"{name}-{repetition}"
            run_to_its_end(folder, settings_of(out, workload, settings))
            report[name].measured.append(measure(folder)["tokens_per_s"])
            config = config_file.load(RunFolder(folder).config)
            report[name].predicted.append(predicted(config, gpu, InOrder(texts[workload])))
            print(report[name].line(name), flush=True)
        common.keep(options.json, {name: asdict(row) for name, row in report.items()})
    print("", *(row.line(name) for name, row in report.items()), sep="\n")
