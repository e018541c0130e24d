"""Learning, not luck: three seeds of the demo, and the same run with rewards that say nothing. One slot is enough."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.support.controls import MARK
from tools import demo


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_accuracy_rises_with_true_rewards_only(tmp_path, seed):
    out = tmp_path / "demo"
    subprocess.run(
        [sys.executable, "tools/demo.py", f"--seed={seed}", f"--out={out}"], cwd=ROOT, check=True, timeout=900
    )
    before, after = demo.accuracy(out / "rl")
    prompts = [json.loads(line) for line in (out / "world" / "train.jsonl").read_text().splitlines()]
    control = out / "control.jsonl"
    control.write_text("".join(json.dumps(line | {"answer": MARK}) + "\n" for line in prompts))
    subprocess.run(
        [
            sys.executable,
            "-m",
            "launch.local",
            "configs/tiny_cpu.yaml",
            f"runs_dir={out}",
            "name=control",
            f"seed={seed}",
            f"model.path={out / 'sft' / 'hf'}",
            f"data.train={control}",
            f"data.eval={out / 'world' / 'heldout.jsonl'}",
            "reward.function=tests.support.controls:shuffled",
        ],
        cwd=ROOT,
        check=True,
        timeout=600,
    )
    control_before, control_after = demo.accuracy(out / "control")
    print(f"seed {seed}: {before:.3f} → {after:.3f}; shuffled rewards: {control_before:.3f} → {control_after:.3f}")
    assert before < 0.6 and after >= 0.9
    assert control_after - control_before < 0.05


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_accuracy_rises_with_both_pools_on_one_slot(tmp_path):
    out = tmp_path / "demo"
    shared = ["machine.shared=true", "machine.slots=1"]
    subprocess.run([sys.executable, "tools/demo.py", f"--out={out}", *shared], cwd=ROOT, check=True, timeout=1500)
    before, after = demo.accuracy(out / "rl")
    print(f"both pools on one slot: {before:.3f} → {after:.3f}")
    assert before < 0.6 and after >= 0.9
