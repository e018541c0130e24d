"""What an asynchronous checkpoint costs training, against one that training waits for.

    python tools/bench/checkpoint.py [--repetitions 80] [--json FILE] [--out runs/bench-checkpoint-N]

One trainer rank (18 million parameters, float32: 286 MB with the optimizer) takes supervised steps on one thread. A
repetition is three runs of equally many steps, in rotating order: undisturbed, with a checkpoint in the background, and
with one that the steps wait for. The cost of a checkpoint is computed step by step, since a shared machine now and then
loses a second to something else: the median of the first steps of all repetitions minus that of the undisturbed first
steps, and so on, summed over the run. Intervals are 90% bootstrap intervals over repetitions. For comparison
megatron-core alone saves the same state, which training would wait for too.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing

from areal_megatron.config import Config, DataConfig, MachineConfig, ModelConfig, TrainerConfig
from areal_megatron.data.examples import Sample
from areal_megatron.launch.supervision.orders import ON_CPU
from areal_megatron.process.files import new_folder
from areal_megatron.run.folder import RunFolder
from areal_megatron.trainer import checkpoint, checkpoint_tensors
from areal_megatron.trainer.parallel import replicas
from areal_megatron.trainer.patches import cpu_passes_for_cuda
from areal_megatron.trainer.trainer import Trainer
from tools.bench import common
from tools.bench.asynchrony import SIZES
from tools.bench.common import Figure, bootstrapped, spread
from tools.make_arithmetic import save_model

STEPS = 3
"""Steps of a run. The checkpoint must be on the disk before the last one ends."""
SEQUENCES, TOKENS = 2, 32
KINDS = ("undisturbed", "asynchronous", "synchronous")
MEGATRON_SAVES = 5
Seconds = dict[str, np.ndarray]
"""The duration of each step by kind, [repetitions, STEPS]; the first includes the start of the checkpoint."""
Edges = dict[str, list[list[float]]]
"""By kind and repetition: when each step began and the last one ended, in seconds of time.monotonic."""


def measure(folder: Path, repetitions: int) -> tuple[Edges, list[float], list[float]]:
    """Returns the edges of all steps, how long checkpoints in the background delayed their first step, and how long
    megatron-core's own saves took, in seconds."""
    config = Config(
        name="run",
        runs_dir=str(folder),
        updates=10**6,
        batch_size=SEQUENCES,
        mode="sft",
        model=ModelConfig(str(folder / "model"), "float32"),
        data=DataConfig("none"),
        machine=MachineConfig(device="cpu"),
        trainer=TrainerConfig(microbatch_tokens=SEQUENCES * TOKENS),
    )
    run = RunFolder(folder / "run")
    run.create()
    edges: Edges = {kind: [] for kind in KINDS}
    stalls, of_megatron = [], []
    with Trainer(config, run, 0) as trainer:
        saver = checkpoint.Saver(trainer)
        random = np.random.default_rng(0)
        size = trainer.hf_config["vocab_size"]
        examples = [
            Sample(random.integers(0, size, TOKENS, dtype=np.int32), np.arange(8, TOKENS), TOKENS - 8)
            for _ in range(SEQUENCES)
        ]
        for kind in (KINDS[0], KINDS[2]):  # the first save lays the file out
            steps(trainer, saver, examples, kind, folder / "checkpoint")
        for repetition in range(repetitions):
            turn = repetition % len(KINDS)
            for kind in KINDS[turn:] + KINDS[:turn]:
                times, begun = steps(trainer, saver, examples, kind, folder / "checkpoint")
                edges[kind].append(times)
                stalls += [begun] if kind == "asynchronous" else []
            said = ", ".join(f"{kind} {edges[kind][-1][-1] - edges[kind][-1][0]:.3f} s" for kind in KINDS)
            print(f"repetition {repetition + 1}: {said}", flush=True)
        for _ in range(1 + MEGATRON_SAVES):  # last: it leaves a process behind; its first save also lays files out
            clear(folder / "checkpoint-of-megatron")
            start = time.monotonic()
            save_as_megatron_does(trainer, folder / "checkpoint-of-megatron")
            of_megatron.append(time.monotonic() - start)
    return edges, stalls, of_megatron[1:]


def steps(trainer, saver, examples, kind: str, path: Path) -> tuple[list[float], float]:
    """Takes STEPS steps with a checkpoint of this kind at their beginning.

    Returns when each step began and the last one ended, and the seconds until the first could begin.
    """
    clear(path)
    edges = [time.monotonic()]
    if kind != "undisturbed":
        saver.begin(path)
    if kind == "synchronous":
        saver.wait()
    begun = time.monotonic() - edges[0]
    for _ in range(STEPS):
        saver.done()
        trainer.supervised.step(examples, before_step=saver.wait_until_read)
        edges.append(time.monotonic())
    if not saver.done():
        raise RuntimeError(f"the checkpoint took longer than {STEPS} steps: the figures miss a part of its cost")
    return edges, begun


def clear(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    os.sync()  # so that what follows does not wait for earlier writes


def save_as_megatron_does(subject: Trainer, path: Path) -> None:
    """Saves model and optimizer into an empty folder; gathers the optimizer's states of all replicas. Collective."""
    metadata, states = checkpoint_tensors.METADATA | {"dp_cp_group": replicas()}, {}
    for name, learner in subject.learners.items():
        model = checkpoint_tensors.model_state(name, learner)
        with cpu_passes_for_cuda():
            optimizer = learner.optimizer.megatron.sharded_state_dict(model, False, metadata=metadata)
        states[name] = {"model": model, "optimizer": optimizer}
    dist_checkpointing.save(states.pop("policy") | states, str(path), content_metadata=checkpoint_tensors.METADATA)


def costs(seconds: Seconds, of_megatron: float) -> dict[str, Figure]:
    """Returns the seconds of an undisturbed run, those lost to each kind of checkpoint, and the ratios of these."""

    def figures(steps: Seconds) -> dict[str, Any]:
        runs = {kind: of_kind.sum(-1) for kind, of_kind in steps.items()}
        lost = {kind: runs[kind] - runs["undisturbed"] for kind in KINDS[1:]}
        over = {"synchronous": lost["synchronous"], "megatron_core": of_megatron}
        return {
            "undisturbed_s": runs["undisturbed"],
            **{f"lost_{kind}_s": value for kind, value in lost.items()},
            **{f"asynchronous_over_{name}": lost["asynchronous"] / value for name, value in over.items()},
        }

    return bootstrapped(seconds, figures)


def main() -> None:
    options = common.parser(__doc__, repetitions=80, out="bench-checkpoint").parse_args()
    if any(os.environ.get(name) != value for name, value in ON_CPU.items()):  # as launchers start trainer ranks
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ON_CPU)
    torch.set_num_threads(1)
    out = new_folder("bench-checkpoint", options.out)
    save_model(out / "model", 1, **SIZES)
    edges, stalls, of_megatron = measure(out, options.repetitions)
    report = costs({kind: np.diff(times) for kind, times in edges.items()}, median(of_megatron))
    megabytes = sum(file.stat().st_size for file in (out / "checkpoint-of-megatron").iterdir()) / 1e6
    print(f"{megabytes:.0f} MB a checkpoint; {options.repetitions} repetitions, medians and what 90% of draws give")
    print(common.report(report, digits=3))
    print("median (lowest – highest):")
    alone = {"stall_s": spread(stalls), "megatron_core_s": spread(of_megatron)}
    print(common.report(alone, digits=3))
    common.keep(options.json, report | alone | {"edges": edges})


if __name__ == "__main__":
    main()
