"""The cost of a weight update: the slowdown of training while sending, the transfer, and the engine's pause.

    python tools/bench/publish.py [--repetitions 3] [--json FILE] [--out runs/bench-publish-N]

An 18-million-parameter model (73 MB of float32 weights per update) trains by PPO while its engine generates on another
core. Mini-batches during which weights were sent are compared with all others of the same run. The trainer rank has one
core, for computing and for sending.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median

from areal_megatron.observe.metrics import read_metrics
from areal_megatron.observe.spans import read_spans, speeds_with_and_without
from areal_megatron.process.files import new_folder, write_json
from areal_megatron.run.folder import Run
from tools.bench.common import line, spreads
from tools.make_arithmetic import save_model

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHONPATH = str(ROOT)
"""For the processes of the runs, which import their reward, tools.bench.asynchrony:score, from the checkout."""
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
# Without proximal passes every mini-batch is the same work; only the first overlaps with sending.
MINIBATCHES = 4
KEYS = [
    "updates=30",
    "batch_size=32",
    "ppo.objective=naive",
    f"ppo.minibatches={MINIBATCHES}",
    "rollout.max_staleness=4",
]


def measure(out: Path, repetition: int) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "areal_megatron.launch.local",
        "configs/bench_asynchrony.yaml",
        f"runs_dir={out}",
        f"name=run-{repetition}",
        f"model.path={out / 'model'}",
        *KEYS,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=PYTHONPATH),
        timeout=900,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        sys.exit(f"{done.stdout[-3000:]}\nerror: the run ended with exit code {done.returncode}; see {out}")
    return figures(Run(out / f"run-{repetition}"))


def figures(run: Run) -> dict[str, float]:
    """Returns the figures of the updates after the first five."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the same figures here")
    parser.add_argument("--out", type=Path, help="new folder for the runs; default: runs/bench-publish-N")
    options = parser.parse_args()
    out = new_folder("bench-publish", options.out)
    save_model(out / "model", 1, **SIZES)
    runs = [measure(out, repetition) for repetition in range(1, options.repetitions + 1)]
    report = spreads(runs)
    print(f"median (lowest – highest) of {len(runs)} repetitions")
    for key, figure in report.items():
        print(line(key, figure))
    if options.json:
        write_json(options.json, report)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends its runs too
    main()
