"""A hundred faults of every kind in one run, which learns like runs that nobody disturbed."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from areal_megatron.observe.metrics import read_metrics
from areal_megatron.run.folder import RunFolder
from tests.conftest import ROOT
from tests.support.chaos import FAULTS

UPDATES = 800


def overrides(world: Path, model: Path, seed: int) -> list[str]:
    keys = {
        "seed": seed,
        "model.path": model,
        "data.train": world / "train.jsonl",
        "data.eval": world / "heldout.jsonl",
        "updates": UPDATES,
        "batch_size": 64,
        "eval.every": UPDATES // 20,
        "optimizer.schedule": "constant",
        "optimizer.lr": 1e-4,
        "ppo.minibatches": 1,
        "rollout.engines": 2,
        "trainer.pp": 2,
        "machine.slots": 4,
        "checkpoint.every": 10,
    }
    return [f"{key}={value}" for key, value in keys.items()]


def run(*command: object, timeout_s: float) -> None:
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True, timeout=timeout_s)


def accuracies(folder: Path) -> dict[int, float]:
    """Returns version → accuracy; of an evaluation that was made again, the last one's. A fault costs the evaluation
    that was under way if a checkpoint of a later version was complete: the run goes on from there."""
    return {line["version"]: line["accuracy"] for line in read_metrics(RunFolder(folder)) if line["kind"] == "eval"}


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_a_hundred_faults_change_nothing_that_is_learned(tmp_path, world):
    sft = [f"model.path={world / 'model'}", f"data.train={world / 'sft.jsonl'}", f"runs_dir={tmp_path}", "name=sft"]
    run("-m", "areal_megatron.launch.local", "configs/tiny_sft.yaml", *sft, timeout_s=900)
    model, disturbed = tmp_path / "sft" / "hf", tmp_path / "disturbed"
    start = ["configs/tiny_cpu.yaml", *overrides(world, model, 1)]
    start.append("reward.function=http://127.0.0.1:4712/")
    service = f"--service={sys.executable} -m tests.support.reward_service 4712"
    run("-m", "tests.support.chaos", disturbed, "--faults=100", "--seed=1", service, *start, timeout_s=3 * 3600)
    faults = [json.loads(line) for line in (disturbed / "chaos.jsonl").read_text().splitlines()]
    assert len(faults) == 100 and {fault["kind"] for fault in faults} == set(FAULTS)
    quiet = []
    for seed in (1, 2, 3):
        own = [f"runs_dir={tmp_path}", f"name=quiet-{seed}", *overrides(world, model, seed)]
        run("-m", "areal_megatron.launch.local", "configs/tiny_cpu.yaml", *own, timeout_s=3600)
        quiet.append(accuracies(tmp_path / f"quiet-{seed}"))
    found = accuracies(disturbed)
    print("disturbed", found, "quiet", *quiet, sep="\n")
    assert UPDATES in found and len(found) > len(quiet[0]) / 2 and found.keys() <= quiet[0].keys()
    reached = sorted(mean(curve[version] for version in found) for curve in quiet)
    print(
        f"mean of {len(found)} evaluations: {mean(found.values()):.3f} disturbed,", *(f"{each:.3f}" for each in reached)
    )
    spread = max(reached[-1] - reached[0], 0.01)  # of a thousand prompts an evaluation's own error is about as large
    assert reached[0] - spread <= mean(found.values()) <= reached[-1] + spread
