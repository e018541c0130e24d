"""The speed of generation while trainers save a checkpoint.

    python tools/bench/generation.py [--repetitions 80] [--json FILE] [--out runs/bench-generation-N]

An engine on one core samples answers without a pause while checkpoint.py trains and saves on another. The tokens that
came during steps with a checkpoint in the background are compared with those during the undisturbed steps next to them.
No weights are sent; reshard.py measures the cost of updates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from areal_megatron.files import new_folder, write_json
from areal_megatron.launch.processes import Children
from tools.bench.checkpoint import KINDS, Edges
from tools.bench.figures import Figure, bootstrapped, line
from tools.bench.publish import SIZES
from tools.bench.reshard_pools import PROMPT_TOKENS, START_TIMEOUT_S, Engine, prepare

CHECKPOINTS = Path(__file__).with_name("checkpoint.py")
TIMEOUT_S = 1800.0
VOCABULARY = 512


async def generate(engine: Engine, times: list[float]) -> None:
    """Samples one answer after another, forever; appends the time of each token to `times`."""
    while True:
        await engine.stream(
            random.choices(range(3, VOCABULARY), k=PROMPT_TOKENS), lambda _: times.append(time.monotonic())
        )


async def measure(out: Path, repetitions: int) -> tuple[Edges, np.ndarray]:
    """Returns when the trainer began and ended its steps, and when tokens came."""
    first, *_, last = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [first])
    run, config = prepare(out, SIZES | {"vocab_size": VOCABULARY}, core_each=True, staging="full")
    times: list[float] = []
    with Children() as children:
        engine = Engine(run, config, 0, children, [first])
        try:
            await engine.ready(START_TIMEOUT_S)
            generating = asyncio.create_task(generate(engine, times))
            edges = await train_and_save(out, repetitions, last)
            if generating.done():
                raise RuntimeError(f"the answers ended: {generating.exception()}")
            generating.cancel()
        finally:
            await engine.close()
    return edges, np.array(times)


async def train_and_save(out: Path, repetitions: int, core: int) -> Edges:
    figures = out / "checkpoints.json"
    command = [str(CHECKPOINTS), "--repetitions", str(repetitions), "--json", str(figures)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--out", str(out / "checkpoints"), preexec_fn=partial(os.sched_setaffinity, 0, [core])
    )
    try:
        if await asyncio.wait_for(process.wait(), TIMEOUT_S):
            raise RuntimeError("checkpoint.py failed")
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    return json.loads(figures.read_text(encoding="utf-8"))["edges"]


def rates(edges: Edges, times: np.ndarray) -> dict[str, np.ndarray]:
    """Returns tokens/s of the engine in each run of trainer steps, by kind."""

    def rate(run: list[float]) -> float:
        begin, end = np.searchsorted(times, [run[0], run[-1]])
        return (end - begin) / (run[-1] - run[0])

    return {kind: np.array([rate(run) for run in runs]) for kind, runs in edges.items()}


def losses(rates: dict[str, np.ndarray]) -> dict[str, Figure]:
    """Returns undisturbed tokens/s, and the share of them that is left while a checkpoint is written."""

    def figures(rates: dict[str, np.ndarray]) -> dict[str, Any]:
        undisturbed = rates[KINDS[0]]
        return {
            "undisturbed_tokens_per_s": undisturbed,
            **{f"{kind}_over_undisturbed": rates[kind] / undisturbed for kind in KINDS[1:]},
        }

    return bootstrapped(rates, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=80)
    parser.add_argument("--json", type=Path, help="write the same figures here")
    parser.add_argument("--out", type=Path, help="new folder; default: runs/bench-generation-N")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("an engine and a trainer rank need a core each; this process may use one")
    report = losses(rates(*asyncio.run(measure(new_folder("bench-generation", options.out), options.repetitions))))
    print(f"tokens/s of the engine, {options.repetitions} repetitions: medians and 90% bootstrap intervals")
    for key, figure in report.items():
        print(line(key, figure, digits=3))
    if options.json:
        write_json(options.json, report)


if __name__ == "__main__":
    main()
