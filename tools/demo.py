"""The demo: makes a tiny model, teaches it additions by a supervised warm start, then trains it by asynchronous PPO.

    python tools/demo.py [--seed 1] [--family qwen3] [--out runs/demo-1] [key=value …]

Ends by printing held-out accuracy before and after and the path of the report. `key=value` overrides, as
rollout.max_staleness=0, apply to the PPO run only, but machine.device to both. Where this machine has one GPU or core,
trainers and engines share it. Exit code 0 if everything ran, 2 for wrong input, otherwise that of the step that failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from areal_megatron.config import ConfigError, config_file
from areal_megatron.launch import local
from areal_megatron.launch.supervision import gpus
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.process.shown import speak_utf8
from areal_megatron.run import versions
from areal_megatron.run.folder import RunFolder
from tools.make_arithmetic import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/tiny_cpu.yaml"
"""The config of the PPO run."""


def main() -> int:
    speak_utf8()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--family", choices=FAMILIES, default="qwen3", help="what the tiny model is like")
    options, out, overrides = given(parser, "demo", CONFIG)
    world, seed = out / "world", f"seed={options.seed}"
    started = time.monotonic()
    try:
        making = ["tools/make_arithmetic.py", world, "--seed", options.seed, "--family", options.family]
        run_step("making a tiny model and its data", *making)
        run_step(
            "supervised warm start",
            "-m",
            "areal_megatron.command",
            "train",
            "configs/tiny_sft.yaml",
            f"runs_dir={out}",
            "name=sft",
            seed,
            f"model.path={world / 'model'}",
            f"data.train={world / 'sft.jsonl'}",
            *(override for override in overrides if override.startswith("machine.device=")),
        )
        run_step(
            "asynchronous PPO",
            "-m",
            "areal_megatron.command",
            "train",
            CONFIG,
            f"runs_dir={out}",
            "name=rl",
            seed,
            f"model.path={out / 'sft' / 'hf'}",
            f"data.train={world / 'train.jsonl'}",
            f"data.eval={world / 'heldout.jsonl'}",
            *overrides,
        )
        run_step("report", "-m", "areal_megatron.command", "report", out / "rl")
    except subprocess.CalledProcessError as failed:
        return failed.returncode
    except KeyboardInterrupt:
        return 130
    before, after = accuracy(out / "rl")
    print(f"\nheld-out accuracy, sampled at temperature 1: {before:.3f} before, {after:.3f} after PPO")
    print(f"took {(time.monotonic() - started) / 60:.1f} minutes; report: {out / 'rl' / 'report.html'}")
    return 0


def given(parser: argparse.ArgumentParser, name: str, file: str) -> tuple[argparse.Namespace, Path, list[str]]:
    """Returns the options, the new folder, and what the run overrides of its config `file`. Ends this program with one
    line if they are wrong."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the PPO run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help=f"new folder for everything; default: runs/{name}-N")
    options = parser.parse_args()
    out = (options.out or unused(name)).absolute()
    try:
        if out.exists():
            raise ConfigError(f"{out} exists: choose another --out or remove it")
        return options, out, machine_keys(file, options.overrides) + options.overrides
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)


def machine_keys(file: str, overrides: Sequence[str]) -> list[str]:
    """Returns the overrides that a run needs on this machine beside these: the device, where the installed packages are
    for CPUs though there is a GPU, and that both pools share its only slot. What the overrides decide is left to them.
    Raises ConfigError for overrides that cannot be."""
    config = config_file.load(ROOT / file, list(overrides))
    decided, found = {override.partition("=")[0] for override in overrides}, []
    device = "cpu" if versions.is_for_cpu() and "machine.device" not in decided else local.device_of(config)
    if device == "cpu" and "machine.device" not in decided and gpus.visible():
        print("the packages in .venv are for the CPU, and so the GPU is left alone, machine.device=cpu", flush=True)
        found.append("machine.device=cpu")
    config.machine.device = device
    if "machine.shared" not in decided and len(local.this_node(config).slots) == 1:
        print(f"one slot ({device}): trainers and engines share it, machine.shared=true", flush=True)
        found.append("machine.shared=true")
    return found


def accuracy(run: Path) -> tuple[float, float]:
    """Returns the held-out accuracy of a run's first and last version."""
    evaluations = {line["version"]: line["accuracy"] for line in read_metrics(RunFolder(run)) if line["kind"] == "eval"}
    return evaluations[min(evaluations)], evaluations[max(evaluations)]


def run_step(title: str, *arguments: object) -> None:
    """Runs python with these arguments in the repository's folder. Raises CalledProcessError if it fails."""
    print(f"── {title}", flush=True)
    subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, check=True, env=dict(os.environ, PYTHONPATH=str(ROOT))
    )


def unused(name: str) -> Path:
    """Returns the first of runs/NAME-1, runs/NAME-2, … that is not there."""
    return next(path for n in range(1, 10**6) if not (path := ROOT / "runs" / f"{name}-{n}").exists())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends its runs too
    sys.exit(main())
