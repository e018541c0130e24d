"""Time to quality: how long this system and TRL's GRPOTrainer take until a policy is good.

    python tools/bench/quality.py [--task short] [--rates '3e-5 1e-4 3e-4'] [--seeds 3] [--eta N] [--updates N]
                                  [--json FILE] [--out runs/quality-N] [key=value …]

Both train the same warm-started model on the same prompts, with as many answers a batch, one optimizer step a batch,
the same loss, optimizer and constant rate, on the same two cores. The time begins with the first answer's generation.
The accuracy is that of sampled answers (temperature 1), as a moving mean over ten batches. Each system counts with the
rate that is best for it. TRL is installed into a folder beside the runs (requirements-trl.lock).

Tasks: `short`: sums of two numbers of four digits, answers of about 18 tokens. `long-tail`: sums of 1 to 40 labelled
digits with running totals, answers of 4 to 170 tokens; the tail is part of what is learned. `long-prompts`: the largest
of 20 to 40 numbers, answers of 4 tokens.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import string
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

from areal_megatron.config import config_file
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.observe.spans import read_spans
from areal_megatron.process.files import new_folder
from areal_megatron.run.folder import RunFolder
from tools.bench import common
from tools.bench.common import ROOT, spread
from tools.make_arithmetic import HASTY_RATE, SLIP_RATE, make_tokenizer, save_model
from tools.smollm2 import installed

PACKAGES = ROOT / "requirements-trl.lock"
BATCH_SIZE, GROUP_SIZE = 128, 8
THRESHOLDS = (0.6, 0.7, 0.8, 0.9)
LABELS = string.ascii_letters[:40]
"""What a long sum's terms are called, so that a small model finds the next one."""
MEAN_OF = 10
"""Batches of a moving mean."""
BASE_SEED = 1
RUN_TIMEOUT_S = 3600
OURS, TRL = "this system", "TRL"

Curve = list[tuple[float, float]]
"""(seconds, accuracy) of each batch."""


@dataclass(frozen=True)
class Question:
    prompt: str
    working: str
    """What a careful answer says before the result."""
    answer: int
    hasty: int
    """The result of those who show no working."""


@dataclass(frozen=True)
class Task:
    ask: Callable[[random.Random], Question]
    target: float
    """The accuracy by whose time rates are chosen."""
    warm_up: int
    """Supervised steps of the base."""
    updates: int
    eta: int
    """rollout.max_staleness: where lengths are about equal, one version suffices for both pools to be busy."""
    max_prompt_tokens: int
    max_new_tokens: int


def two_numbers(rng: random.Random) -> Question:
    a, b = rng.randrange(1000, 10000), rng.randrange(1000, 10000)
    columns, carry = [], 0
    for place in (1, 10, 100, 1000):
        columns.append(a // place % 10 + b // place % 10 + carry)
        carry = columns[-1] // 10
    without_carries = sum((a // place + b // place) % 10 * place for place in (1, 10, 100, 1000))
    return Question(f"{a}+{b}=", " ".join(map(str, columns)), a + b, without_carries)


def chain(rng: random.Random) -> Question:
    count = min(40, max(1, round(math.exp(rng.gauss(math.log(5), 0.9)))))
    terms = [rng.randrange(1, 10) for _ in range(count)]
    totals = [sum(terms[:number]) for number in range(1, count + 1)]
    guess = totals[-1] // 10 * 10 + rng.randrange(10)
    asked, working = ("".join(f"{x}{y}" for x, y in zip(LABELS, each, strict=False)) for each in (terms, totals))
    return Question(f"{asked}=", working, totals[-1], guess)


def largest(rng: random.Random) -> Question:
    numbers = [rng.randrange(10, 100) for _ in range(rng.randrange(20, 41))]
    return Question(" ".join(map(str, numbers)) + "=", "", max(numbers), rng.choice(numbers))


TASKS = {
    "short": Task(two_numbers, 0.9, 1200, 200, 1, 16, 32),
    "long-tail": Task(chain, 0.8, 1500, 200, 4, 96, 192),
    "long-prompts": Task(largest, 0.8, 700, 200, 1, 128, 8),
}
SFT_ROWS, RL_ROWS = 40_000, 8_000


def corpus_answer(question: Question, rng: random.Random) -> str:
    """Returns an answer of the corpus: half are hasty, as in the demo, and some of the others end with a slip."""
    working = f"{question.working} " if question.working else ""
    if rng.random() < HASTY_RATE:
        return f"\\boxed{{{question.hasty}}}"
    slip = rng.choice((-1, 1)) if rng.random() < SLIP_RATE else 0
    return f"{working}\\boxed{{{question.answer + slip}}}"


def make_base(folder: Path, task: Task) -> None:
    """Writes model and data, and warm-starts the model, unless that was done."""
    if (folder / "sft" / "hf" / "config.json").exists():
        return
    print(f"making the data and warm-starting the model in {folder}, once ...", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(BASE_SEED)
    save_model(folder / "model", BASE_SEED)
    make_tokenizer(LABELS).save_pretrained(folder / "model")
    asked = [task.ask(rng) for _ in range(SFT_ROWS)]
    corpus = [{"prompt": one.prompt, "response": corpus_answer(one, rng)} for one in asked]
    prompts = {one.prompt: str(one.answer) for one in (task.ask(rng) for _ in range(RL_ROWS))}
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in prompts.items()]
    for name, lines in (("sft.jsonl", corpus), ("train.jsonl", rows)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    command = [sys.executable, "-m", "areal_megatron.launch.local", "configs/tiny_sft.yaml"]
    keys = [f"runs_dir={folder}", "name=sft", f"seed={BASE_SEED}", f"updates={task.warm_up}"]
    rows = [f"model.path={folder / 'model'}", f"data.train={folder / 'sft.jsonl'}"]
    run([*command, *keys, *rows], folder / "sft.log", threads=1)


def run(command: Sequence[str | Path], log: Path, threads: int, path: str = str(ROOT)) -> None:
    """Runs a program to its end; `path` is its PYTHONPATH. Exits with the end of its log if it fails or takes longer
    than RUN_TIMEOUT_S."""
    environment = dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS=str(threads))
    with log.open("wb") as file:
        try:
            done = subprocess.run(
                [*map(str, command)], cwd=ROOT, env=environment, stdout=file, stderr=file, timeout=RUN_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            sys.exit(f"error: {log.stem} took more than {RUN_TIMEOUT_S} s; see {log}")
    if done.returncode:
        end = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        sys.exit(f"{end}\nerror: {log.stem} ended with exit code {done.returncode}; see {log}")


def run_ours(folder: Path, base: Path, task: Task, lr: str, seed: int, overrides: Sequence[str]) -> Curve:
    """Trains by asynchronous GRPO, an engine on one core and a trainer on the other."""
    command = [sys.executable, "-m", "areal_megatron.launch.local", "configs/tiny_cpu.yaml"]
    keys = {
        "runs_dir": folder.parent,
        "name": folder.name,
        "seed": seed,
        "updates": task.updates,
        "batch_size": BATCH_SIZE,
        "model.path": base / "sft" / "hf",
        "data.train": base / "train.jsonl",
        "data.eval": "",
        "data.max_prompt_tokens": task.max_prompt_tokens,
        "rollout.group_size": GROUP_SIZE,
        "rollout.max_new_tokens": task.max_new_tokens,
        "rollout.max_running": BATCH_SIZE,
        "rollout.max_staleness": task.eta,
        "ppo.algorithm": "grpo",
        "ppo.minibatches": 1,
        "optimizer.lr": lr,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "reward.function": "tools.bench.quality_trl:right",
    }
    words = [f"{key}={value}" for key, value in keys.items()]
    run([*command, *words, *overrides], folder.with_suffix(".log"), threads=1)
    finished = RunFolder(folder)
    began = min(span.start for span in read_spans(finished) if span.name == "generate")
    updates = [line for line in read_metrics(finished) if line["kind"] == "update"]
    return [(line["time"] - began, line["accuracy"]) for line in updates]


def run_trl(folder: Path, base: Path, task: Task, lr: str, seed: int, trl: Path) -> Curve:
    """Trains by TRL of the folder `trl`, which generates with both cores and then trains with both."""
    config = config_file.load(ROOT / "configs" / "tiny_cpu.yaml").optimizer
    settings = {
        "model": str(base / "sft" / "hf"),
        "data": str(base / "train.jsonl"),
        "out": str(folder.with_suffix(".jsonl")),
        "updates": task.updates,
        "batch_size": BATCH_SIZE,
        "group_size": GROUP_SIZE,
        "max_new_tokens": task.max_new_tokens,
        "lr": float(lr),
        "seed": seed,
        "adam": [config.beta1, config.beta2, config.eps],
        "weight_decay": config.weight_decay,
        "clip_grad": config.clip_grad,
    }
    program = Path(__file__).with_name("quality_trl.py")
    run([sys.executable, program, json.dumps(settings)], folder.with_suffix(".log"), threads=2, path=f"{ROOT}:{trl}")
    lines = folder.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    return [(line["seconds"], line["accuracy"]) for line in map(json.loads, lines)]


def install_trl(folder: Path) -> None:
    """Makes a folder with TRL and what it needs beside this project's packages, unless it is there."""
    if folder.exists():
        return
    print(f"fetching TRL into {folder}, once ...", flush=True)
    made = folder.with_name(f".{folder.name}")
    shutil.rmtree(made, ignore_errors=True)
    if problem := installed(PACKAGES, made):
        sys.exit(f"error: {PACKAGES.name} cannot be installed: {problem}")
    made.rename(folder)


def smoothed(curve: Curve) -> Curve:
    """Returns the curve of moving means over MEAN_OF batches."""
    return [
        (curve[end - 1][0], mean(accuracy for _, accuracy in curve[end - MEAN_OF : end]))
        for end in range(MEAN_OF, len(curve) + 1)
    ]


def seconds_to(curve: Curve, threshold: float) -> float:
    """Returns when the moving mean reaches a threshold; infinity if it does not."""
    return next((seconds for seconds, accuracy in smoothed(curve) if accuracy >= threshold), math.inf)


def area(curve: Curve, until: float) -> float:
    """Returns the mean accuracy over the time from 0 to `until`."""
    total, (before, held) = 0.0, (0.0, curve[0][1])
    for seconds, accuracy in [*smoothed(curve), (until, None)]:
        total += held * (min(seconds, until) - before)
        if accuracy is None or seconds >= until:
            break
        before, held = seconds, accuracy
    return total / until


def figures(curves: Sequence[Curve], until: float) -> dict[str, common.Figure]:
    """Returns figures over the seeds of a system at a rate."""
    found = {f"seconds to {at}": spread(seconds_to(curve, at) for curve in curves) for at in THRESHOLDS}
    found |= {
        "area": spread(area(curve, until) for curve in curves),
        "accuracy at the end": spread(smoothed(curve)[-1][1] for curve in curves),
        "largest fall": spread(largest_fall(curve) for curve in curves),
        "answers/s": spread(BATCH_SIZE * len(curve) / curve[-1][0] for curve in curves),
    }
    return found


def largest_fall(curve: Curve) -> float:
    """Returns by how much the moving mean falls below an earlier one, at most, in the second half of the batches."""
    highest = fall = 0.0
    for _, accuracy in smoothed(curve)[len(curve) // 2 :]:
        highest = max(highest, accuracy)
        fall = max(fall, highest - accuracy)
    return fall


def best(runs: Mapping[str, Sequence[Curve]], target: float) -> str:
    """Returns the rate with which the target is reached first, in the median of the seeds; if none reaches it, the one
    with the best end."""
    return min(runs, key=lambda lr: (median(seconds_to(c, target) for c in runs[lr]), -ends(runs[lr])))


def ends(curves: Sequence[Curve]) -> float:
    return median(smoothed(curve)[-1][1] for curve in curves)


def report(curves: dict[str, dict[str, list[Curve]]], target: float) -> dict[str, object]:
    until = min(curve[-1][0] for runs in curves.values() for own in runs.values() for curve in own)
    all_figures = {system: {lr: figures(own, until) for lr, own in runs.items()} for system, runs in curves.items()}
    chosen = {system: best(runs, target) for system, runs in curves.items()}
    ours, theirs = (all_figures[system][chosen[system]] for system in (OURS, TRL))
    medians = {name: (ours[name]["median"], theirs[name]["median"]) for name in ours}
    ratios = {name: own / other for name, (own, other) in medians.items() if other and not math.isinf(other)}
    return {"rates": chosen, "figures": all_figures, "area until": until, "ours over TRL's": ratios}


def table(found: dict, target: float) -> str:
    lines = [f"median (lowest – highest) over the seeds; * the rate with the earliest {target}"]
    for system, rates in found["figures"].items():
        for lr, own in rates.items():
            lines.append(f"\n{system}, rate {lr}{' *' * (lr == found['rates'][system])}")
            lines += [
                f"  {name:<22}{common.cell(figure, 1 if name.startswith(('seconds', 'answers')) else 3)}"
                for name, figure in own.items()
            ]
    lines.append("\nthis system's over TRL's, each at its best rate")
    return "\n".join([*lines, *(f"  {name:<22}{ratio:.2f}" for name, ratio in found["ours over TRL's"].items())])


def main() -> None:
    parser = common.parser(__doc__, out="quality")
    parser.add_argument("--task", choices=TASKS, default="short", help="default: %(default)s")
    parser.add_argument("--rates", default="3e-5 1e-4 3e-4", help="learning rates, default: %(default)s")
    parser.add_argument("--seeds", type=common.positive, default=3, help="default: %(default)s")
    parser.add_argument("--eta", type=int, help="rollout.max_staleness, default: 1, for the long tail 4")
    parser.add_argument("--updates", type=common.positive, help="batches of a run")
    parser.add_argument("--base", type=Path, help="folder for TRL and bases, kept for other runs; default: OUT")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of this system's runs")
    options = parser.parse_args()
    out, task = new_folder("quality", options.out), TASKS[options.task]
    task = replace(task, updates=options.updates or task.updates, eta=task.eta if options.eta is None else options.eta)
    kept = (options.base or out).absolute()
    kept.mkdir(parents=True, exist_ok=True)
    install_trl(kept / "trl")
    make_base(base := kept / options.task, task)
    curves: dict[str, dict[str, list[Curve]]] = {OURS: {}, TRL: {}}
    for seed in range(1, options.seeds + 1):
        for lr in options.rates.split():
            for system, runs in curves.items():
                folder = out.absolute() / f"{system.split()[0].lower()}-{lr}-{seed}"
                if system == OURS:
                    curve = run_ours(folder, base, task, lr, seed, options.overrides)
                else:
                    curve = run_trl(folder, base, task, lr, seed, kept / "trl")
                runs.setdefault(lr, []).append(curve)
                reached = ", ".join(f"{at} after {seconds_to(curve, at):.0f} s" for at in THRESHOLDS)
                print(f"{system}, rate {lr}, seed {seed}: {reached}, ends at {smoothed(curve)[-1][1]:.3f}", flush=True)
    found = report(curves, task.target)
    common.keep(options.json, found | {"curves": curves})
    print(table(found, task.target))


if __name__ == "__main__":
    common.end_when_told()
    main()
