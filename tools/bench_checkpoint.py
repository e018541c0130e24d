"""What an asynchronous checkpoint costs training, against one that training waits for.

    python tools/bench_checkpoint.py [--repetitions 5] [--json FILE] [--out runs/bench-checkpoint-N]

One trainer rank (18 million parameters, float32: 212 MB with the optimizer) takes supervised steps on one thread. In
each repetition it saves once in the background and once while it waits; the time lost to a checkpoint is how much
longer the steps from its begin to its end took than as many undisturbed ones.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from bench_publish import SIZES
from figures import line, new_folder, spreads, write_json
from make_arithmetic import save_model

from areal_megatron.config import Config, Data, Machine, Model
from areal_megatron.config import Trainer as Sizes
from areal_megatron.run import Run

STEPS = 10
"""Undisturbed ones before each checkpoint."""
SEQUENCES, TOKENS = 8, 64


def measure(folder: Path, repetitions: int) -> list[dict[str, float]]:
    from areal_megatron.trainer.step import Trainer

    config = Config(name="run", runs_dir=str(folder), updates=10**6, batch_size=SEQUENCES, mode="sft",
                    model=Model(str(folder / "model"), "float32"), data=Data("none"), machine=Machine(device="cpu"),
                    trainer=Sizes(microbatch_tokens=SEQUENCES * TOKENS))  # fmt: skip
    run = Run(folder / "run")
    run.create()
    result = []
    with Trainer(config, run, 0) as trainer:
        random = np.random.default_rng(0)
        size = trainer.hf_config["vocab_size"]
        examples = [(random.integers(0, size, TOKENS, dtype=np.int32), 8) for _ in range(SEQUENCES)]
        for _ in range(3):
            trainer.sft_step(examples)
        save(trainer, folder / "warm-up", examples, wait=True)
        for repetition in range(repetitions):
            figures = {}
            for wait in (repetition % 2 == 0, repetition % 2 == 1):
                start = time.perf_counter()
                for _ in range(STEPS):
                    trainer.sft_step(examples)
                undisturbed = (time.perf_counter() - start) / STEPS
                seconds, steps, stall = save(trainer, folder / "checkpoint", examples, wait)
                figures["synchronous" if wait else "asynchronous"] = seconds - steps * undisturbed
                if not wait:
                    figures |= {"stall": stall, "until_saved": seconds, "step": undisturbed}
            result.append({f"{name}_s": value for name, value in figures.items()})
            result[-1]["lost_over_synchronous"] = figures["asynchronous"] / figures["synchronous"]
            print(f"repetition {repetition + 1}: {result[-1]['lost_over_synchronous']:.3f}", flush=True)
    return result


def save(trainer, path: Path, examples, wait: bool) -> tuple[float, int, float]:
    """Seconds from the begin until it is saved, steps taken meanwhile, and seconds before the first could begin."""
    from areal_megatron.trainer import checkpoint

    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    start, steps = time.perf_counter(), 0
    saving = checkpoint.Saving(trainer, path)
    stall = time.perf_counter() - start
    if wait:
        saving.wait()
    while not saving.done():
        trainer.sft_step(examples)
        steps += 1
    return time.perf_counter() - start, steps, stall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the same figures here")
    parser.add_argument("--out", type=Path, help="new folder; default: runs/bench-checkpoint-N")
    options = parser.parse_args()
    torch.set_num_threads(1)
    out = new_folder("bench-checkpoint", options.out)
    save_model(out / "model", 1, **SIZES)
    report = spreads(measure(out, options.repetitions))
    megabytes = sum(file.stat().st_size for file in (out / "checkpoint").iterdir()) / 1e6
    print(f"{megabytes:.0f} MB a checkpoint; median (lowest – highest) of {options.repetitions} repetitions")
    for key, figure in report.items():
        print(line(key, figure, digits=3) + ("   aim: at most 0.05" if key == "lost_over_synchronous" else ""))
    if options.json:
        write_json(options.json, report)


if __name__ == "__main__":
    main()
