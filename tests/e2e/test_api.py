"""Runs from Python: the programs of the command, from a script."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import areal_megatron as areal
from areal_megatron.data.dumps import dumped
from areal_megatron.data.dumps import read as read_dump
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.programs.audit import audit
from areal_megatron.run.folder import RunError, RunFolder
from tests.e2e.test_run import small

AFTER = """
print(run.status.version, run.folder)
print(run.export(run.folder.parent / "exported"))
"""
"""What the script does after the example of docs/python.md."""


@pytest.fixture
def keys(world, tmp_path):
    return {
        "name": "sft",
        "runs_dir": tmp_path,
        "mode": "sft",
        "updates": 6,
        "model": {"path": world / "model"},
        "data": {"train": world / "sft.jsonl"},
    }


def test_the_script_of_the_docs_runs_what_it_has_written(world, tmp_path):
    held_out, runs = tmp_path / "few.jsonl", tmp_path / "runs"
    held_out.write_text("".join((world / "heldout.jsonl").read_text().splitlines(keepends=True)[:3]))
    changes = {
        "runs_dir": str(runs),
        "updates": 3,
        "batch_size": 32,
        "checkpoint": {"every": 2},
        "model": {"path": str(world / "model")},
        "data": {"train": str(world / "train.jsonl"), "eval": str(held_out)},
        "rollout": {"group_size": 4, "max_running": 32, "dump": True},
    }
    example = re.search(r"```python\n(.*?)```", Path("docs/python.md").read_text(), re.DOTALL)[1]
    script = tmp_path / "mine.py"
    script.write_text(example.replace("updates=20", f"**{changes!r}") + AFTER)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        timeout=500,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    run, tokenizer = RunFolder(runs / "short"), Tokenizer(world / "model")
    lines = [line for line in done.stdout.splitlines() if re.match(r"\d -", line)]
    updates = [line for line in read_metrics(run) if line["kind"] == "update"]
    values = [(line["version"], line["reward_mean"], line["response_tokens_mean"]) for line in updates]
    assert lines == [" ".join(map(str, each)) for each in values] and len(lines) == 3
    assert f"3 {run.folder}" in done.stdout and "'value': 0.0" in done.stdout
    trained = [t for path in dumped(run.trajectories).values() for t in read_dump(path).trajectories]
    lengths = [len(tokenizer.decode(t.response.tolist())) for t in trained if not t.truncated]  # what is cut is wrong
    # reward.wrong and reward.right, by default -5 and 5, stand for 0 and 1
    assert [t.reward for t in trained if not t.truncated] == [-10.0 * length - 5 for length in lengths]
    assert len(trained) == 3 * 32 and audit(run) == []
    assert (runs / "exported" / "model.safetensors").exists()


def test_python_and_the_command_run_the_same(keys, tmp_path):
    run = areal.Run("configs/tiny_sft.yaml", **keys)
    with pytest.raises(RunError, match="was not started by this object"):
        run.wait()
    run.start(quiet=True)
    assert run.wait().version == 6
    command = [sys.executable, "-m", "areal_megatron.launch.local", "configs/tiny_sft.yaml", "name=by-command"]
    own = [f"{key}={value}" for key, value in flat(keys).items() if key != "name"]
    subprocess.run([*command, *own], check=True, timeout=300, capture_output=True)
    one, other = (
        [line for line in read_metrics(RunFolder(folder)) if line["kind"] == "sft"]
        for folder in (run.folder, tmp_path / "by-command")
    )
    assert [line["loss"] for line in one] == [line["loss"] for line in other] and len(one) == 6
    assert [line["grad_norm"] for line in one] == [line["grad_norm"] for line in other]


def flat(keys):
    sections = {
        f"{key}.{name}": value for key, own in keys.items() if isinstance(own, dict) for name, value in own.items()
    }
    return {key: value for key, value in keys.items() if not isinstance(value, dict)} | sections


def test_what_is_wrong_is_an_exception_with_one_line(keys, world):
    with pytest.raises(areal.ConfigError, match=r"unknown key 'rollout\.max_stalenes', did you mean"):
        areal.Run("configs/tiny_cpu.yaml", rollout={"max_stalenes": 4})
    with pytest.raises(areal.ConfigError, match="data: must be a text, a number, a function or a section, is list"):
        areal.Run("configs/tiny_sft.yaml", **keys | {"data": [1]})
    with pytest.raises(areal.ConfigError, match=r"functions are given to areal_megatron\.Run"):
        areal.load("configs/tiny_cpu.yaml", reward={"function": flat})
    run = areal.Run("configs/tiny_sft.yaml", **keys | {"data": {"train": "missing.jsonl"}})
    with pytest.raises(areal.ConfigError, match=r"^missing\.jsonl: cannot read the dataset"):
        run.start(quiet=True)
    with pytest.raises(areal.ConfigError, match="has no checkpoint"):
        run.export("unused")
    with pytest.raises(RunError, match="is no run that has begun"):
        run.stop()
    config = areal.load("configs/tiny_sft.yaml", **keys)
    config.optimizer.ls = 5
    with pytest.raises(areal.ConfigError, match=r"unknown key 'optimizer\.ls', did you mean 'optimizer\.lr'"):
        areal.Run(config)
    config = areal.load("configs/tiny_sft.yaml", **keys)
    config.updates = "many"
    with pytest.raises(areal.ConfigError, match="many"):
        areal.Run(config)


def test_texts_stay_as_they_are_and_functions_may_stand_on_a_config(keys, tmp_path):
    said = {"path": 'a #b: "q" [x] @y\\ ä'}
    run = areal.Run("configs/tiny_sft.yaml", **keys | {"model": said, "batch_size": np.int64(3), "name": "a:b"})
    assert run.config.model.path == said["path"] and run.config.batch_size == 3
    config = areal.load("configs/tiny_cpu.yaml", name="mine", runs_dir=tmp_path)
    config.reward.function, config.rollout.workflow = small, small
    assert areal.Run(config).config.reward.function == "tests.e2e.test_run:small"
    assert config.reward.function is small


def test_a_run_is_killed_and_its_steps_are_seen(keys):
    run = areal.Run("configs/tiny_sft.yaml", **keys | {"updates": 100000})
    run.start(quiet=True)
    assert next(run.metrics())["kind"] == "sft"
    run.kill()
    with pytest.raises(areal.RunFailed):
        run.wait(timeout_s=1)
    assert not hasattr(areal, "nothing")
