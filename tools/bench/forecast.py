"""Simulated runs beside the AReaL paper's (arXiv 2505.24298), and how long simulations take.

    python -m tools.bench.forecast paper [--json FILE]
    python -m tools.bench.forecast programs [--json FILE]
    python -m tools.bench.forecast speed
    python -m tools.bench.forecast failures [--json FILE]
    python -m tools.bench.forecast scale [--gpus 8,32,…] [--models 1.5B,7B,…] [--processes N] [--json FILE] [--svg FILE]
    python -m tools.bench.forecast here [--runs PATTERN …] [--repetitions 1] [--json FILE] [--out FOLDER]

`paper`: Table 1 (hours of four models, synchronous and asynchronous), throughput over η (1.5B on 16 nodes, and Table 7
on one), interruption on four nodes, and the trainers' TFLOP/s, all with one set of efficiencies and one distribution of
lengths. As in the paper, η says when an answer may begin, and not also when it is trained at the latest; throughput on
16 nodes is also that of this project's rule. `programs`: Table 1's hours of 14B and 32B, which learned to write
programs, if their answers were longer. `speed`: 512 GPUs, 60 updates of 8,192 answers. `failures`: what 1,024 GPUs get
done although nodes fail, by checkpoint.every, and what Young and Daly's formula says is best. `here`: runs of this
machine (forecast_here.py).

`scale`: the fastest sizes on 8 to 4,096 GPUs, and what each asks of what a run has one of. For each model and number of
H100 they are searched as `areal plan --best` does it, with η up to 4. A batch has 16 answers a GPU, and 512 at least.
Beside the speed of the best sizes stand what the controller has to do (answers a second, and at a time), what trainers
have to send, and what a file system has to write.

The paper does not give lengths. Their mean is what its throughput at η = 8 makes of its hours (1.5B): 371,700 tokens/s
× 14.8 h over 250 updates of 8,192 answers. Their spread is assumed. The synchronous runs have all GPUs generate, then
train, without any cost for the change, and with all of a GPU's memory for either.
"""

from __future__ import annotations

import argparse
import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from statistics import NormalDist, fmean
from typing import NamedTuple

import numpy as np
from matplotlib import pyplot as plt

from areal_megatron.config import CheckpointConfig, Config, ConfigError, config_file
from areal_megatron.controller.schedule import Group, Schedule
from areal_megatron.model_check import trained_config
from areal_megatron.planning.forecast.accelerators import accelerator
from areal_megatron.planning.forecast.checkpoint_interval import checkpoint_interval, updates_between
from areal_megatron.planning.forecast.layouts import Cluster
from areal_megatron.planning.forecast.lengths import LognormalLengths
from areal_megatron.planning.forecast.search import Search, SearchBounds
from areal_megatron.planning.forecast.simulator import Circumstances, SimulatedRun, Simulator, Times
from areal_megatron.planning.forecast.times import times_of
from areal_megatron.planning.memory.trainer import checkpoint_bytes
from areal_megatron.planning.sizes import Sizes
from areal_megatron.process.files import write_atomically, write_json
from tools.bench import common, forecast_here, picture

MEAN, SIGMA = 371_700 * 14.8 * 3600 / (250 * 8192), 0.9
LONGEST = 27648


class Row(NamedTuple):
    """A row of Table 1."""

    nodes: int
    synchronous: float
    asynchronous: float
    """Hours."""
    tflops: float
    """TFLOP/s of a trainer's GPU with dynamic micro-batches; 0: not given."""


TABLE_1 = {
    "1.5B": Row(16, 41.0, 14.8, 427),
    "7B": Row(24, 57.7, 25.4, 455),
    "14B": Row(32, 48.8, 21.9, 0),
    "32B": Row(48, 51.1, 31.1, 388),
}
THROUGHPUT = {0: 128.7, 1: 269.3, 2: 356.6, 4: 356.6, 8: 371.7, 16: 382.4}
"""η → thousand tokens/s, 1.5B (Figure 5c)."""
ONE_NODE = {0: 27.1, 1: 47.8, 2: 47.8, 4: 49.0, 8: 51.5, 16: 52.0}
"""The same on one node with a context of 8k and 64 prompts a batch (Table 7)."""
PROGRAMS = ("14B", "32B")
PROGRAM_MEANS = (12_000, 14_000, 16_000, 18_000, 20_000)
"""Mean lengths, in tokens, that are tried for them."""
INTERRUPTION = {"1.5B": 1.12, "7B": 1.17}
"""Throughput over that of engines which let answers end, on four nodes."""
MTBF_HOURS = (250, 1000, 6000)
"""Mean times between failures of a node, in hours. The last is about that of Llama 3's pre-training: 419 unexpected
interruptions in 54 days on 2,048 nodes (arXiv 2407.21783, Table 5)."""
EVERY = (1, 2, 5, 10, 20, 50, 100)
"""checkpoint.every."""
SEEDS = (0, 1, 2, 3)
TRAINER_NODES = 64
"""Nodes of the trainers of configs/deepseek_v3.yaml."""
LAYOUTS = {
    "1.5B": ["trainer.tp=2", "trainer.dp=16"],
    "7B": ["trainer.cp=1", "trainer.dp=24"],
    "14B": ["trainer.cp=1", "trainer.dp=16"],
    "32B": ["trainer.cp=1", "trainer.dp=12"],
}
"""Trainers with which rates were fitted to the paper's runs; its own are not published."""
NODE_7 = ["trainer.dp=1", "rollout.engines=6", "rollout.max_new_tokens=7168", "batch_size=1024"]
NODES_4 = {"1.5B": ["trainer.dp=4", "rollout.engines=24"], "7B": ["trainer.dp=4", "rollout.engines=12"]}

GPUS = (8, 32, 128, 512, 1024, 4096)
NODE = 8
MODELS = {
    "1.5B": ("r1_1.5b", "DeepSeek-R1-Distill-Qwen-1.5B"),
    "7B": ("r1_7b", "DeepSeek-R1-Distill-Qwen-7B"),
    "32B": ("r1_32b", "DeepSeek-R1-Distill-Qwen-32B"),
    "235B": ("qwen3_235b", "Qwen3-235B-A22B-Thinking-2507"),
    "671B": ("deepseek_v3", "DeepSeek-V3"),
}
"""Name → a config and a folder of configs/models."""
COLORS = ("#2563eb", "#0d9488", "#d97706", "#db2777", "#7c3aed")
ETA, ANSWERS_PER_GPU, FEWEST_ANSWERS = 4, 16, 512


class PaperSchedule(Schedule):
    """The paper's rules: an answer that has begun is trained, however late."""

    def late_without(self, batch: list[Group]) -> dict[int, int]:
        return {}


def median_of(mean: float, sigma: float, cap: int) -> float:
    """Returns the median of the lognormal distribution that has this mean once it is cut at the cap."""
    quantiles = [NormalDist().inv_cdf((i + 0.5) / 4000) for i in range(4000)]
    low, high = 1.0, float(cap)
    for _ in range(60):
        middle = math.sqrt(low * high)
        own = np.minimum(middle * np.exp(sigma * np.array(quantiles)), cap).mean()
        low, high = (middle, high) if own < mean else (low, middle)
    return low


MEDIAN = median_of(MEAN, SIGMA, LONGEST)


def load(model: str, *overrides: str) -> Config:
    path = f"model.path=configs/models/DeepSeek-R1-Distill-Qwen-{model}"
    return config_file.load(f"configs/r1_{model.lower()}.yaml", [path, *LAYOUTS[model], *overrides])


def simulated(
    config: Config,
    updates: int = 0,
    synchronous: bool = False,
    interruption: bool = True,
    median: float = MEDIAN,
    rules: type[Schedule] = PaperSchedule,
) -> SimulatedRun:
    begun = time.monotonic()
    gpus = config.trainer_ranks + config.rollout.engines * config.rollout.tp
    if synchronous:
        t, r = config.trainer, config.rollout
        t.dp, r.engines, r.max_staleness = gpus // (t.tp * t.pp), gpus // r.tp, 0
    config, times = times_of(config, accelerator("h800"))
    config.machine.shared = synchronous
    lengths = LognormalLengths(median, SIGMA, config.rollout.max_new_tokens)
    updates = min(updates or config.rollout.max_staleness + 8, config.updates)
    run = Simulator(config, times, lengths, Circumstances(interruption), rules).run(updates)
    print(f"{config.name}: {updates} updates in {time.monotonic() - begun:.0f} s", file=sys.stderr)
    return run


def hours(model: str, median: float = MEDIAN) -> tuple[float, float]:
    """Returns the hours of a model's run in Table 1, synchronous and asynchronous."""
    both = [simulated(load(model), 4, synchronous=True, median=median), simulated(load(model), median=median)]
    updates = load(model).updates
    return both[0].hours(updates), both[1].hours(updates)


def tflops(config: Config) -> float:
    """Returns the TFLOP/s of a trainer's GPU over one update: of all passes, those for log-probabilities too."""
    config, times = times_of(config, accelerator("h800"))
    lengths, rng = LognormalLengths(MEDIAN, SIGMA, config.rollout.max_new_tokens), np.random.default_rng(0)
    groups = [lengths.group(rng, config.rollout.group_size) for _ in range(config.groups_per_batch)]
    answers = np.concatenate([answers for _, answers in groups])
    prompts = np.full(len(answers), groups[0][0])
    scored = 1 + (config.ppo.minibatches - 1) / config.ppo.minibatches / 3
    flops = scored * times.trainer.model_flops(prompts + answers, answers)
    return flops / times.trainer.update(prompts, answers) / config.trainer_ranks / 1e12


def beside(found: float, published: float) -> str:
    return f"{found:9.2f}{published:9.2f}{found / published - 1:+8.0%}"


def paper() -> dict[str, object]:
    print(f"answers: lognormal, mean {MEAN:,.0f}, median {MEDIAN:,.0f}, sigma {SIGMA}, at most 27,648 tokens; H800")
    print(f"\n{'':<34}{'here':>9}{'paper':>9}{'':>8}")
    found: dict[str, object] = {}

    def row(name: str, here: float, published: float) -> None:
        found[name] = {"here": here, "paper": published}
        print(f"{name:<34}{beside(here, published)}", flush=True)

    for model, published in TABLE_1.items():
        synchronous, asynchronous = hours(model)
        row(f"{model}, hours, synchronous", synchronous, published.synchronous)
        row(f"{model}, hours, asynchronous", asynchronous, published.asynchronous)
        row(f"{model}, ratio of the two", synchronous / asynchronous, published.synchronous / published.asynchronous)
        if published.tflops:
            row(f"{model}, TFLOP/s of a trainer", tflops(load(model)), published.tflops)
    for name, table, sizes in (("16 nodes", THROUGHPUT, ()), ("one node", ONE_NODE, NODE_7)):
        first = 0.0
        for eta, published in table.items():
            here = simulated(load("1.5B", f"rollout.max_staleness={eta}", *sizes)).tokens_per_s / 1e3
            first = first or here
            row(f"1.5B, {name}, η = {eta}, k tokens/s", here, published)
            if eta:
                row(f"1.5B, {name}, η = {eta}, over η = 0", here / first, published / table[0])
            if not sizes:
                own = simulated(load("1.5B", f"rollout.max_staleness={eta}"), rules=Schedule).tokens_per_s / 1e3
                row(f"1.5B, {name}, η = {eta}, this project's rule", own, published)
    for model, published in INTERRUPTION.items():
        runs = [simulated(load(model, *NODES_4[model]), interruption=interrupts) for interrupts in (True, False)]
        row(f"{model}, interruption", runs[0].tokens_per_s / runs[1].tokens_per_s, published)
    return found


def programs() -> dict[str, object]:
    found: dict[str, object] = {}
    print(f"{'mean':>6}{'':>5}{'synchronous, paper':>26}{'asynchronous, paper':>26}{'ratio, paper':>26}")
    for mean in PROGRAM_MEANS:
        for model in PROGRAMS:
            here = hours(model, median_of(mean, SIGMA, LONGEST))
            published = TABLE_1[model].synchronous, TABLE_1[model].asynchronous
            found[f"{mean:.0f}, {model}"] = here
            pairs = (here[0], published[0]), (here[1], published[1]), (here[0] / here[1], published[0] / published[1])
            print(f"{mean:6,.0f}{model:>5}" + "".join(beside(*pair) for pair in pairs), flush=True)
    return found


def speed() -> dict[str, float]:
    begun, used = time.monotonic(), time.process_time()
    run = simulated(load("1.5B", "updates=60", "trainer.dp=64", "rollout.engines=384"), 60, rules=Schedule)
    found = {
        "seconds": time.monotonic() - begun,
        "processor_s": time.process_time() - used,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    said = "{seconds:.1f} s, of which {processor_s:.1f} of a processor; peak memory {peak_gib:.2f} GiB"
    print(f"{run.gpus} GPUs, {len(run.updates)} updates of 8,192 answers: {said.format(**found)}")
    return found


def failures() -> dict[str, object]:
    """1,000 updates of configs/deepseek_v3.yaml in batches of 256, simulated with each of SEEDS."""
    found: dict[str, object] = {}
    with ProcessPoolExecutor() as pool:
        calm = list(pool.map(long_run, repeat(0), repeat(math.inf), SEEDS))
        whole_s, update_s = [run.seconds for run, _ in calm], fmean(run.update_s for run, _ in calm)
        print(f"nothing fails, no checkpoints: {fmean(whole_s) / 3600:.2f} h", flush=True)
        for mtbf in MTBF_HOURS:
            for every in EVERY:
                runs, times = zip(*pool.map(long_run, repeat(every), repeat(3600 * mtbf), SEEDS), strict=True)
                done = [calm_s / run.seconds for calm_s, run in zip(whole_s, runs, strict=True)]
                pause_s, between_s = times[0].weights.checkpoint, 3600 * mtbf / TRAINER_NODES
                formula = 1 / (1 + pause_s / (every * update_s) + (every * update_s / 2 + 300) / between_s)
                failed = sum((run.failures for run in runs), Counter())
                found[f"{mtbf} h, every {every}"] = {"done": done, "formula": formula, "failed": failed}
                print(
                    f"{mtbf:,} h, every {every}: {fmean(done):.1%} of what is done where nothing fails "
                    f"({min(done):.1%} to {max(done):.1%}); formula {formula:.1%}; "
                    f"{', '.join(f'{kind} {count / len(runs):.1f}' for kind, count in sorted(failed.items()))} a run",
                    flush=True,
                )
            best = updates_between(checkpoint_interval(pause_s, between_s), update_s)
            print(f"{mtbf:,} h: best by the formula: every {best} updates of {update_s:.0f} s", flush=True)
    return found


def long_run(every: int, mtbf_s: float, seed: int) -> tuple[SimulatedRun, Times]:
    """Returns one of these runs, whose nodes fail `mtbf_s` apart on average each, and what everything in it takes."""
    own = ["batch_size=256", "updates=1000", f"checkpoint.every={every}", "checkpoint.hf_every=0"]
    config = config_file.load("configs/deepseek_v3.yaml", ["model.path=configs/models/DeepSeek-V3", *own])
    config, times = times_of(config, accelerator("h100"))
    assert config.trainer_ranks == 8 * TRAINER_NODES
    lengths = LognormalLengths(MEDIAN, SIGMA, config.rollout.max_new_tokens)
    return Simulator(config, times, lengths, Circumstances(node_mtbf_s=mtbf_s, seed=seed)).run(), times


@dataclass(frozen=True)
class Best:
    """The best sizes that were found for a model on a number of GPUs."""

    model: str
    gpus: int
    batch: int
    trainer: str
    engines: int
    engine_tp: int
    tokens_per_s: float
    update_s: float
    binds: str
    answers_per_s: float
    """Which the controller takes, has scored and gives to trainers."""
    in_flight: int
    """Answers at a time, at most."""
    transfer_s: float
    """From an optimizer step until all engines have its weights."""
    checkpoint_gb: float
    gb_per_s: float
    """What a file system has to write so that a checkpoint is written before the next one, by default."""


def best(model: str, gpus: int) -> Best | str:
    """Returns the best sizes, or why there are none."""
    name, folder = MODELS[model]
    batch = max(FEWEST_ANSWERS, ANSWERS_PER_GPU * gpus)
    own = [f"model.path=configs/models/{folder}", f"batch_size={batch}", f"rollout.max_new_tokens={LONGEST}"]
    own += ["updates=1000", f"rollout.max_staleness={ETA}", "optimizer.on_host=false"]
    config = config_file.load(f"configs/{name}.yaml", own)
    gpu = accelerator("h100")
    cluster = Cluster(gpus // NODE, NODE, gpu.gib)
    nodes = Sizes(gpus // NODE, NODE, cluster.gib).place(config)
    lengths = LognormalLengths(MEDIAN, SIGMA, LONGEST)
    begun = time.monotonic()
    try:
        found = Search(config, nodes, cluster, gpu, lengths, SearchBounds(ETA)).best(1).proposals[0]
    except ConfigError as e:
        return str(e)
    finally:
        print(f"{model} on {gpus:,} GPUs: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    t, r, saved = found.config.trainer, found.config.rollout, checkpoint_bytes(config, trained_config(config))
    layout = " ".join(f"{key}{getattr(t, key)}" for key in ("tp", "cp", "pp", "ep", "dp") if getattr(t, key) > 1)
    return Best(
        model=model,
        gpus=gpus,
        batch=batch,
        trainer=f"{found.config.trainer_ranks}: {layout or 'one rank'}",
        engines=r.engines,
        engine_tp=r.tp,
        tokens_per_s=found.run.tokens_per_s,
        update_s=found.update_s,
        binds=found.binds,
        answers_per_s=batch / found.update_s,
        in_flight=min(r.engines * r.max_running, (r.max_staleness + 1) * batch),
        transfer_s=found.candidate.times.weights.transfer,
        checkpoint_gb=saved / 1e9,
        gb_per_s=saved / 1e9 / (CheckpointConfig().every * found.update_s),
    )


def table(rows: Sequence[Best]) -> str:
    """Returns a table in Markdown."""
    smallest: dict[str, Best] = {}
    lines = [
        "| model | GPUs | trainers | engines | thousand tokens/s | per GPU | an update, s | binds | answers/s "
        "| at a time | weights, s | checkpoint, GB/s |",
        "|" + "---|" * 12,
    ]
    for row in rows:
        first = smallest.setdefault(row.model, row)
        per_gpu = row.tokens_per_s / row.gpus / (first.tokens_per_s / first.gpus)
        lines.append(
            f"| {row.model} | {row.gpus:,} | {row.trainer} | {row.engines} × {row.engine_tp} "
            f"| {row.tokens_per_s / 1e3:,.1f} | {per_gpu:.2f} | {row.update_s:,.0f} | {row.binds} "
            f"| {row.answers_per_s:,.1f} | {row.in_flight:,} | {row.transfer_s:.2f} | {row.gb_per_s:.2f} |"
        )
    return "\n".join(lines)


def plot(rows: Sequence[Best]) -> str:
    """Returns an SVG: on the left tokens/s over GPUs, with lines of equal speed per GPU; on the right what the
    controller does."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 4.4), layout="constrained")
    for color, model in zip(COLORS, dict.fromkeys(row.model for row in rows), strict=False):
        own = [row for row in rows if row.model == model]
        gpus = [row.gpus for row in own]
        left.plot(gpus, [row.tokens_per_s for row in own], color=color, marker="o", markersize=4, label=model)
        left.plot(
            gpus, [own[0].tokens_per_s * n / own[0].gpus for n in gpus], color=color, linewidth=0.8, linestyle=":"
        )
        right.plot(gpus, [row.in_flight for row in own], color=color, marker="o", markersize=4)
        right.plot(gpus, [row.answers_per_s for row in own], color=color, marker="s", markersize=4, linestyle="--")
    titles = ("Trained tokens/s (dotted: as fast per GPU)", "Answers at a time (—), and a second (- -)")
    for axes, title in zip((left, right), titles, strict=True):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(GPUS, [f"{n:,}" for n in GPUS], fontsize=8)
        axes.set_xlabel("H100")
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e2e8f0", linewidth=0.8)
    left.legend(frameon=False, fontsize=8)
    return picture.svg(figure)


def scale(options: argparse.Namespace) -> None:
    asked = [(model, int(gpus)) for model in options.models.split(",") for gpus in options.gpus.split(",")]
    found: list[Best | str] = []
    rows: list[Best] = []
    with ProcessPoolExecutor(options.processes) as pool:
        for each in pool.map(best, *zip(*asked, strict=True)):
            found.append(each)
            rows += [each] if isinstance(each, Best) else []
            if options.json:  # each time: a search on thousands of GPUs takes minutes
                write_json(options.json, [asdict(row) for row in rows])
    print(table(rows))
    for (model, gpus), each in zip(asked, found, strict=True):
        if isinstance(each, str):
            print(f"{model} on {gpus:,} GPUs: {each}")
    if options.svg:
        write_atomically(options.svg, plot(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="what", required=True)
    for command, about in (
        ("paper", "the paper's tables"),
        ("programs", "Table 1's models that write programs, by lengths"),
        ("failures", "what is done although nodes fail"),
        ("speed", "how long a simulation takes"),
    ):
        common.options_of(commands.add_parser(command, help=about))
    sizes = common.options_of(commands.add_parser("scale", help="the fastest sizes on 8 to 4,096 GPUs"))
    sizes.add_argument("--gpus", default=",".join(map(str, GPUS)), help="numbers of GPUs, multiples of 8")
    sizes.add_argument("--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)}")
    sizes.add_argument("--processes", type=int, default=1)
    sizes.add_argument("--svg", type=Path, help="draw the figures here")
    here = commands.add_parser("here", help="runs of this machine")
    common.options_of(here, repetitions=1, out="bench-forecast")
    here.add_argument("--runs", nargs="+", default=["*"], metavar="PATTERN", help="some of the runs, such as 'eta*'")
    options = parser.parse_args()
    if options.what == "scale":
        scale(options)
    elif options.what == "here":
        forecast_here.compare(options)
    else:
        common.keep(
            options.json, {"paper": paper, "programs": programs, "failures": failures, "speed": speed}[options.what]()
        )


if __name__ == "__main__":
    common.end_when_told()
    main()
