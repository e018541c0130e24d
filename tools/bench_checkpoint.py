"""What an asynchronous checkpoint costs training, against one that training waits for.

    python tools/bench_checkpoint.py [--repetitions 25] [--json FILE] [--out runs/bench-checkpoint-N]

One trainer rank (18 million parameters, float32: 286 MB with the optimizer) takes supervised steps on one thread. A
repetition is three runs of equally many steps, in turning order: undisturbed, with a checkpoint in the background, and
with one that the steps wait for. The time lost to a checkpoint is how much longer its run took than the undisturbed one
beside it; since shared machines are noisy, the medians of many short runs are compared.
"""

from __future__ import annotations

import argparse
import os
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

STEPS = 4
"""Of a run; the file is on the disk before the last."""
SEQUENCES, TOKENS = 2, 32
KINDS = ("undisturbed", "asynchronous", "synchronous")


def measure(folder: Path, repetitions: int) -> list[dict[str, float]]:
    from areal_megatron.trainer import checkpoint
    from areal_megatron.trainer.step import Trainer

    config = Config(name="run", runs_dir=str(folder), updates=10**6, batch_size=SEQUENCES, mode="sft",
                    model=Model(str(folder / "model"), "float32"), data=Data("none"), machine=Machine(device="cpu"),
                    trainer=Sizes(microbatch_tokens=SEQUENCES * TOKENS))  # fmt: skip
    run = Run(folder / "run")
    run.create()
    result = []
    with Trainer(config, run, 0) as trainer:
        saver = checkpoint.Saver(trainer)
        random = np.random.default_rng(0)
        size = trainer.hf_config["vocab_size"]
        examples = [(random.integers(0, size, TOKENS, dtype=np.int32), 8) for _ in range(SEQUENCES)]
        for kind in KINDS:  # the first save lays the file out
            steps(trainer, saver, examples, kind, folder / "checkpoint")
        for repetition in range(repetitions):
            turn = repetition % len(KINDS)
            figures = {}
            for kind in KINDS[turn:] + KINDS[:turn]:
                seconds, begun = steps(trainer, saver, examples, kind, folder / "checkpoint")
                figures[f"{kind}_s"] = seconds
                if kind == "asynchronous":
                    figures["stall_s"] = begun
            for kind in KINDS[1:]:
                figures[f"lost_{kind}_s"] = figures[f"{kind}_s"] - figures["undisturbed_s"]
            result.append(figures)
            print("repetition {}: lost {lost_asynchronous_s:.3f} s, synchronous {lost_synchronous_s:.3f} s"
                  .format(repetition + 1, **figures), flush=True)  # fmt: skip
    return result


def steps(trainer, saver, examples, kind: str, path: Path) -> tuple[float, float]:
    """Seconds of STEPS steps with a checkpoint of that kind, and until the first could begin."""
    if kind != "undisturbed":
        shutil.rmtree(path, ignore_errors=True)
    os.sync()  # what was written before is not to be paid for here
    start = time.perf_counter()
    if kind != "undisturbed":
        saver.begin(path)
    if kind == "synchronous":
        saver.wait()
    begun = time.perf_counter() - start
    for _ in range(STEPS):
        saver.done()
        trainer.sft_step(examples, before_step=saver.wait_until_read)
    seconds = time.perf_counter() - start
    if not saver.done():
        raise RuntimeError(f"the checkpoint took longer than {STEPS} steps: the figures miss a part of its cost")
    return seconds, begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=25)
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
        print(line(key, figure, digits=3))
    share = report["lost_asynchronous_s"]["median"] / report["lost_synchronous_s"]["median"]
    print(f"{'lost_over_synchronous, of the medians':<50}{share:>10.3f}   aim: at most 0.05")
    if options.json:
        write_json(options.json, report | {"lost_over_synchronous": share})


if __name__ == "__main__":
    main()
