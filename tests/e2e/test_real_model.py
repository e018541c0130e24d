"""Real weights, SmolLM2-135M-Instruct: three implementations agree, conversion keeps every bit, weights arrive in
flight, and the model learns what it could not do."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from areal_megatron.observe.metrics import read_metrics
from areal_megatron.run.folder import RunFolder
from tests.conftest import ROOT
from tools import demo, demo_llm

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]


def python(*arguments):
    subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, check=True, timeout=3600)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    if demo_llm.MODEL.exists():
        return demo_llm.MODEL
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    python("tools/smollm2.py", folder)
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sums") / "world"
    demo_llm.make_world(folder, seed=1)
    return folder


def test_engine_trainer_and_transformers_agree(model, tmp_path):
    figures = tmp_path / "figures.json"
    sizes = ["--prompts", 4, "--answers", 2, "--max-new-tokens", 64, "--microbatch-tokens", 1024]
    python("tools/bench/precision.py", model, "--dtypes", "float32", *sizes, "--json", figures, "--out", tmp_path / "o")
    (row,) = json.loads(figures.read_text())
    assert row["tokens"] > 100
    for pair in ("engine − trainer", "trainer − transformers", "engine − transformers"):
        assert row[pair]["max"] < 1e-3, pair


def test_conversion_keeps_every_bit(model, tmp_path):
    checkpoint, back = tmp_path / "checkpoint", tmp_path / "back"
    python("-m", "areal_megatron.programs.convert", "from-hf", model, checkpoint, "--dtype", "float32")
    python("-m", "areal_megatron.programs.convert", "to-hf", checkpoint, back, "--config", model, "--dtype", "float32")
    before, after = (
        {k: t for f in sorted(d.glob("*.safetensors")) for k, t in load_file(f).items()} for d in (model, back)
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("tp", [1, 3])
def test_new_weights_arrive_in_flight(model, world, tmp_path, tp):
    """The model has 9 query heads and 3 key heads, so a third of each goes to an engine rank of three."""
    python(
        "-m",
        "areal_megatron.launch.local",
        demo_llm.CONFIG,
        f"runs_dir={tmp_path}",
        "name=flight",
        f"model.path={model}",
        "model.dtype=float32",
        f"data.train={world / 'train.jsonl'}",
        "data.eval=''",
        "eval.every=0",
        f"machine.slots={1 + tp}",
        f"rollout.tp={tp}",
        "updates=4",
        "batch_size=16",
        "rollout.group_size=4",
        "reward.function=tests.support.rewards:short",  # four groups may have no right answer to learn from
    )
    updates = [line for line in read_metrics(RunFolder(tmp_path / "flight")) if line["kind"] == "update"]
    assert [line["version"] for line in updates] == [1, 2, 3, 4]
    assert all(line["update_size"] > 0 for line in updates)
    probes = [(line["mismatch_version"], line["mismatch_max"]) for line in updates if "mismatch_max" in line]
    print(probes)
    assert max(version for version, _ in probes) >= 2
    assert max(difference for _, difference in probes) < 1e-3


def test_an_evaluation_sees_what_the_chat_model_cannot_do(model, world, tmp_path):
    out = tmp_path / "evaluation"
    python(
        "-m",
        "areal_megatron.launch.evaluate",
        model,
        world / "heldout.jsonl",
        "--n",
        2,
        "--max-new-tokens",
        16,
        "--out",
        out,
    )
    result = json.loads((out / "result.json").read_text())
    assert 0 <= result["avg@2"]["value"] < 0.3


def test_a_run_goes_on_from_its_checkpoint(model, world, tmp_path):
    """Whose files are larger than what launchers read."""
    rows = [f"model.path={model}", f"data.train={world / 'train.jsonl'}", "data.eval="]
    keys = [f"runs_dir={tmp_path}", "name=run", "batch_size=32", "resume=auto", *rows]
    for updates in (1, 2):
        python("-m", "areal_megatron.launch.local", "configs/smollm2_cpu.yaml", f"updates={updates}", *keys)
    run = RunFolder(tmp_path / "run")
    assert [line["version"] for line in read_metrics(run) if line["kind"] == "update"] == [1, 2]
    assert [start.batches for start in run.starts()] == [0, 1]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_accuracy_rises_by_forty_points(model, tmp_path, seed):
    out = tmp_path / "demo"
    python("tools/demo_llm.py", f"--seed={seed}", f"--model={model}", f"--out={out}")
    before, after = demo.accuracy(out / "rl")
    print(f"seed {seed}: {before:.3f} → {after:.3f}")
    assert after - before >= 0.4
