"""What asynchrony pays: trained tokens/s at η = 4 over η = 0, and over a colocated synchronous loop.

    python tools/bench/asynchrony.py [--short | --update] [--repetitions 3] [--json FILE] [--out runs/bench-async-N]

The same model, batch and answers each time. Answer lengths are forced: lognormal, median 24, cap 256
(tools/bench/asynchrony.jsonl). η = 0 and η = 4 run the engine on one core and the trainer on the other; `colocated`
gives both cores to generation and then both to training, with two engines and two trainer ranks that take turns.

`--short`: answers of 12 to 24 tokens, 18 on average, 16 to a prompt and 128 a batch, one optimizer step a batch; η = 4
against `colocated` alone. With so little to compute per answer, what each process does for it counts: *_ms is processor
time per completion.

`--update`: what a weight update costs training and generation, at η = 4 with a model of 18 million parameters, 73 MB of
float32 weights. Mini-batches during which weights were sent are compared with all others of the same run; the trainer
rank has one core, for computing and for sending.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import NormalDist, mean, median

import psutil

from areal_megatron.config import config_file
from areal_megatron.observe.metrics import MetricsReader, read_metrics
from areal_megatron.observe.spans import overlap, read_spans, speeds_with_and_without, union
from areal_megatron.process.files import new_folder
from areal_megatron.run.folder import RunFolder
from tools.bench import common
from tools.bench.common import ROOT, Figure, cell, spread, spreads
from tools.make_arithmetic import save_model

PYTHONPATH = str(ROOT)
"""For the processes of the runs, which import their reward, tools.bench.asynchrony:score, from the checkout."""
WORKLOAD = Path(__file__).with_name("asynchrony.jsonl")
MEDIAN, SIGMA, CAP = 24, 1.0, 256
"""The lognormal distribution of answer lengths, in tokens."""
VARIANTS = {
    "eta0": ["rollout.max_staleness=0"],
    "eta4": ["rollout.max_staleness=4"],
    "colocated": ["rollout.max_staleness=0", "rollout.engines=2", "trainer.dp=2", "machine.slots=4"],
}
SHORT = [
    "updates=60",
    "batch_size=128",
    "ppo.minibatches=1",
    "rollout.group_size=16",
    "rollout.max_new_tokens=24",
    "rollout.max_running=128",
]
"""Settings of the runs with --short. More answers at once share what a step costs the engine whatever its size, but
each commit of weights prefills all of them again."""
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""The sizes of the model with --update."""
MINIBATCHES = 4
UPDATE = [
    "updates=30",
    "batch_size=32",
    "ppo.objective=naive",  # without proximal passes every mini-batch is the same work
    f"ppo.minibatches={MINIBATCHES}",
    "rollout.max_staleness=4",
]
"""Settings of the runs with --update. Only the first mini-batch of a batch overlaps with sending."""
PARTS = {
    "VLLM::EngineCore": "engine_core",
    "areal_megatron.engine.serving": "engine_server",
    "areal_megatron.controller.controller": "controller",
    "areal_megatron.train": "trainer",
}
"""Parts of a run by what the command lines of their processes contain."""
WARM_UP, COOL_DOWN = 6, 5
"""Updates that are not measured, at the beginning and at the end. At η = 4 the first ones wait for the weights of the
first versions, and the last ones train answers generated earlier while the engine has nothing left to do."""
TAIL = 0.25
"""Generation is in its tail when fewer answers than this share of a batch are running."""
RUN_TIMEOUT_S = 900


def workload(count: int = 512, seed: int = 0) -> str:
    """Returns the JSONL text: prompts of 12 to 24 characters with the forced length of their answers, in tokens.

    The lengths are the quantiles of the distribution in random order, so that the workload depends on no draw.
    """
    logarithm = NormalDist(math.log(MEDIAN), SIGMA)
    lengths = [min(CAP, max(1, round(math.exp(logarithm.inv_cdf((i + 0.5) / count))))) for i in range(count)]
    return prompts_of_lengths(lengths, random.Random(seed))


def short_workload(count: int = 520, seed: int = 0) -> str:
    """Returns the JSONL text with answers of 12 to 24 tokens, as many of each length."""
    return prompts_of_lengths([12 + i % 13 for i in range(count)], random.Random(seed))


def prompts_of_lengths(lengths: list[int], rng: random.Random) -> str:
    """Returns the JSONL text of prompts of 13 to 25 tokens with these lengths of answers, in random order."""
    rng.shuffle(lengths)
    lines = []
    for length in lengths:
        prompt = "".join(rng.choice("0123456789+") for _ in range(rng.randint(12, 24))) + "="
        lines.append(json.dumps({"prompt": prompt, "answer": "0", "response_tokens": length}) + "\n")
    return "".join(lines)


def score(prompt: str, response: str, answer: str) -> float:
    """Returns an arbitrary reward that costs nothing: every batch has gradients, and the model does not improve."""
    return float(len(response) % 2)


def run_variant(name: str, out: Path, repetition: int, settings: list[str]) -> dict[str, float]:
    """Runs the variant and returns its figures. Exits with the launcher's output if it fails."""
    folder = out / f"{name}-{repetition}"
    spent = run_to_its_end(folder, [*settings, *VARIANTS[name]])
    return measure(folder) | spent


def run_to_its_end(folder: Path, settings: list[str]) -> dict[str, float]:
    """Runs configs/bench_asynchrony.yaml in the folder, whose parent has the model, and returns what `watch` does.
    Exits with the launcher's output if it fails."""
    name, out = folder.name, folder.parent
    command = [
        sys.executable,
        "-m",
        "areal_megatron.launch.local",
        "configs/bench_asynchrony.yaml",
        f"runs_dir={out}",
        f"name={name}",
        f"model.path={out / 'model'}",
        *settings,
    ]
    log = out / f"{name}.log"
    with log.open("wb") as file:
        environment = dict(os.environ, PYTHONPATH=PYTHONPATH)
        run = psutil.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        spent = watch(run, folder)
        run.wait()
    except TimeoutError:
        sys.exit(f"error: {name} took more than {RUN_TIMEOUT_S} s; see the logs in {out}")
    finally:
        if run.is_running():
            run.kill()  # its guardian ends the others
    if run.returncode:
        sys.exit(
            f"{log.read_text(encoding='utf-8')[-3000:]}\nerror: {name} ended with exit code {run.returncode}; see {out}"
        )
    return spent


def watch(run: psutil.Popen, folder: Path) -> dict[str, float]:
    """Returns when the run has ended, with the processor time in ms per completion between warm-up and cool-down, of
    the processes of each of PARTS, of the others and of all. Raises TimeoutError after RUN_TIMEOUT_S."""
    reader, updates, deadline = MetricsReader(RunFolder(folder)), 0, time.monotonic() + RUN_TIMEOUT_S
    marks: list[tuple[int, dict[str, float]]] = []
    config = None
    while run.poll() is None:
        updates += sum(record["kind"] == "update" for record in reader.new())
        if updates and config is None:
            config = config_file.load(RunFolder(folder).config)
        if config and len(marks) < 2 and updates >= (WARM_UP, config.updates - COOL_DOWN)[len(marks)]:
            marks.append((updates, processor_s(run)))
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.1)
    return {} if len(marks) < 2 else per_completion(*marks, config.batch_size)


def processor_s(run: psutil.Process) -> dict[str, float]:
    """Returns the processor time so far, in seconds, of each of PARTS and of the run's other processes."""
    spent = dict.fromkeys([*PARTS.values(), "others"], 0.0)
    for process in [run, *run.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            part = next((part for text, part in PARTS.items() if text in line), "others")
            times = process.cpu_times()
            spent[part] += times.user + times.system
    return spent


def per_completion(
    begin: tuple[int, dict[str, float]], end: tuple[int, dict[str, float]], batch_size: int
) -> dict[str, float]:
    """Returns what was spent between two (updates, processor_s), in ms per completion, and the sum as `all_ms`."""
    completions = (end[0] - begin[0]) * batch_size
    spent = {f"{part}_ms": 1000 * (seconds - begin[1][part]) / completions for part, seconds in end[1].items()}
    return spent | {"all_ms": sum(spent.values())}


def measure(folder: Path) -> dict[str, float]:
    """Returns the figures of the updates between warm-up and cool-down."""
    run = RunFolder(folder)
    updates = [line for line in read_metrics(run) if line["kind"] == "update"]
    begin, measured = updates[WARM_UP - 1]["time"], updates[WARM_UP:-COOL_DOWN]
    end = measured[-1]["time"]
    spans = read_spans(run)
    answering = [(s.start, s.end, s.args["answers"]) for s in spans if s.name == "generate"]
    training = union([(s.start, s.end) for s in spans if s.name in ("train", "proximal")])
    batch_size = config_file.load(run.config).batch_size
    generation, tail = generation_seconds(answering, begin, end, TAIL * batch_size)
    return {
        "completions_per_s": len(measured) * batch_size / (end - begin),
        "tokens_per_s": sum(u["trained_tokens"] for u in measured) / (end - begin),
        "update_s": (end - begin) / len(measured),
        "generation_s": generation / len(measured),
        "training_s": overlap(training, begin, end) / len(measured),
        "tail_share": tail / generation,
        "straggler_wait_s": mean(u["straggler_wait_s"] for u in measured),
        "staleness_mean": mean(u["staleness_mean"] for u in measured),
        "staleness_max": max(u["staleness_max"] for u in measured),
    }


def generation_seconds(
    answering: list[tuple[float, float, int]], begin: float, end: float, few: float
) -> tuple[float, float]:
    """Returns the seconds of [begin, end] in which any answer was running, and those in which fewer than `few` were.

    `answering` holds (start, end, answers) of each request.
    """
    clipped = [(max(start, begin), min(stop, end), answers) for start, stop, answers in answering]
    inside = [(start, stop, answers) for start, stop, answers in clipped if start < stop]
    changes = sorted(change for start, stop, n in inside for change in ((start, n), (stop, -n)))
    busy = tail = 0.0
    running, since = 0, begin
    for when, change in changes:
        if running:
            busy += when - since
            tail += (when - since) * (running < few)
        running, since = running + change, when
    return busy, tail


def summary(results: dict[str, list[dict[str, float]]]) -> dict[str, object]:
    """Returns what --json writes: medians and spreads of every figure, and the speedups, paired by repetition."""
    report: dict[str, object] = {}
    for base in _bases(results):
        ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(results["eta4"], results[base], strict=True)]
        name = "speedup_eta4_over_" + base
        figure = spread(ratios)
        report[name], report[f"{name}_spread"] = figure["median"], figure
    report["repetitions"] = len(results["eta4"])
    report["variants"] = {name: spreads(runs) for name, runs in results.items()}
    return report


def _bases(variants: Iterable[str]) -> list[str]:
    return [name for name in variants if name != "eta4"]


def table(report: dict) -> str:
    variants = report["variants"]
    lines = [
        f"median (lowest – highest) of {report['repetitions']} repetitions; seconds are per update, ms per completion",
        "",
    ]
    lines.append(f"{'':<18}" + "".join(f"{name:>28}" for name in variants))
    for key in next(iter(variants.values())):
        lines.append(f"{key:<18}" + "".join(f"{_cell(variants[name][key]):>28}" for name in variants))
    lines.append("")
    for base in _bases(variants):
        name = "speedup_eta4_over_" + base
        lines.append(f"{name:<32}{_cell(report[f'{name}_spread'])}")
    return "\n".join(lines)


def _cell(figure: Figure) -> str:
    return cell(figure, digits=0 if figure["median"] >= 100 else 2)


def cost_of_updates(run: RunFolder) -> dict[str, float]:
    """Returns the figures of the updates after the first five of a run with UPDATE."""
    spans = [span for span in read_spans(run) if span.process == "trainer-0"]
    steps = [span for span in spans if span.name == "train"][5 * MINIBATCHES :]
    speeds = speeds_with_and_without(steps, [span for span in spans if span.name == "publish"])
    if speeds is None:
        sys.exit(f"error: too few mini-batches met a publish in {run.folder}")
    updates = [line for line in read_metrics(run) if line["kind"] == "update"][5:]
    return {
        "tokens_per_s_of_minibatches_that_met_a_publish": speeds[0],
        "tokens_per_s_of_the_others": speeds[1],
        "speed_ratio": speeds[0] / speeds[1],
        "seconds_of_a_minibatch": median(span.duration for span in steps),
        "publish_ms": 1e3 * median(u["publish_s"] for u in updates),
        "commit_ms": 1e3 * median(u["commit_s"] for u in updates),
        "megabytes": updates[-1]["weights_bytes"] / 1e6,
    }


def measure_updates(out: Path, repetitions: int) -> dict[str, Figure]:
    runs = [out / f"update-{repetition}" for repetition in range(1, repetitions + 1)]
    for run in runs:
        run_to_its_end(run, UPDATE)
    return spreads([cost_of_updates(RunFolder(run)) for run in runs])


def compare(out: Path, repetitions: int, short: bool) -> dict[str, object]:
    """Runs every variant in turn and returns their `summary`."""
    names, settings = list(VARIANTS), []
    if short:
        names.remove("eta0")
        (out / "short.jsonl").write_text(short_workload(), encoding="utf-8")
        settings = [*SHORT, f"data.train={out / 'short.jsonl'}"]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for repetition in range(1, repetitions + 1):
        for name, runs in results.items():
            runs.append(run_variant(name, out, repetition, settings))
            rates = "{tokens_per_s:,.0f} trained tokens/s, {completions_per_s:,.0f} completions/s".format(**runs[-1])
            print(f"{name}, repetition {repetition}: {rates}", flush=True)
    return summary(results)


def main() -> None:
    parser = common.parser(__doc__, repetitions=3, out="bench-async")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--short", action="store_true", help="short answers: completions/s, and what they cost")
    which.add_argument("--update", action="store_true", help="what a weight update costs")
    options = parser.parse_args()
    out = new_folder("bench-async", options.out)
    save_model(out / "model", 1, **(SIZES if options.update else {}))
    if options.update:
        report = measure_updates(out, options.repetitions)
        print(common.report(report))
    else:
        report = compare(out, options.repetitions, options.short)
        print("\n" + table(report))
    common.keep(options.json, report)


if __name__ == "__main__":
    common.end_when_told()
    main()
