"""How the design scales: the fastest sizes on 8 to 4,096 GPUs, simulated, and what each asks of what a run has one of.

    python -m tools.bench.scale [--gpus 8,32,…] [--models 1.5B,7B,…] [--processes N] [--json FILE] [--svg FILE]

For each model and number of H100 the sizes are searched as `areal plan --best` does it, with η up to 4. A batch has
16 answers a GPU, and 512 at least; answers have the lengths of tools/bench/forecast.py. Beside the speed of the best
sizes stand what the controller has to do (answers a second, and at a time), what trainers have to send, and what a file
system has to write.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

from areal_megatron.config import CheckpointConfig, ConfigError, config_file
from areal_megatron.model_check import trained_config
from areal_megatron.planning.forecast.accelerators import accelerator
from areal_megatron.planning.forecast.layouts import Cluster
from areal_megatron.planning.forecast.lengths import LognormalLengths
from areal_megatron.planning.forecast.search import Search, SearchBounds
from areal_megatron.planning.memory.trainer import checkpoint_bytes
from areal_megatron.planning.sizes import Sizes
from areal_megatron.process.files import write_atomically, write_json
from tools.bench.forecast import LONGEST, MEDIAN, SIGMA

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


@dataclass(frozen=True)
class Best:
    """The best sizes that were found for a model on so many GPUs."""

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
    config = config_file.load(f"configs/{name}.yaml", [*own, "updates=1000", f"rollout.max_staleness={ETA}"])
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
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    return buffer.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", default=",".join(map(str, GPUS)), help="numbers of GPUs, multiples of 8")
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--svg", type=Path, help="draw them here")
    options = parser.parse_args()
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


if __name__ == "__main__":
    main()
