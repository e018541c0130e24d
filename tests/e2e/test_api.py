"""Runs from Python: the programs of the command, from a script and from notebooks, which Jupyter's kernel executes."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import nbclient
import nbformat
import numpy as np
import pytest

import areal_megatron as areal
from areal_megatron.data.dumps import dumped
from areal_megatron.data.dumps import read as read_dump
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.programs.audit import audit
from areal_megatron.run.folder import RunError, RunFolder
from tests.conftest import ROOT
from tests.e2e.test_run import small

AFTER = """
print(run.status.version, run.folder)
print(run.export(run.folder.parent / "exported"))
"""
"""What the script does after the example of docs/python.md."""
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.fixture
def keys(world, few_examples, tmp_path):
    return {
        "name": "sft",
        "runs_dir": tmp_path,
        "mode": "sft",
        "updates": 6,
        "model": {"path": world / "model"},
        "data": {"train": few_examples},
    }


@pytest.fixture(scope="module")
def documented(world, tmp_path_factory):
    """The example of docs/python.md, with a small run: what it has printed, and the folder of runs."""
    tmp_path = tmp_path_factory.mktemp("documented")
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
    return done.stdout, runs


def test_the_script_of_the_docs_runs_what_it_has_written(world, documented):
    printed, runs = documented
    run, tokenizer = RunFolder(runs / "short"), Tokenizer(world / "model")
    lines = [line for line in printed.splitlines() if re.match(r"\d -", line)]
    updates = [line for line in read_metrics(run) if line["kind"] == "update"]
    values = [(line["version"], line["reward_mean"], line["response_tokens_mean"]) for line in updates]
    assert lines == [" ".join(map(str, each)) for each in values] and len(lines) == 3
    assert f"3 {run.folder}" in printed and "'value': 0.0" in printed
    trained = [t for path in dumped(run.trajectories).values() for t in read_dump(path).trajectories]
    lengths = [len(tokenizer.decode(t.response.tolist())) for t in trained if not t.truncated]  # what is cut is wrong
    # reward.wrong and reward.right, by default -5 and 5, stand for 0 and 1
    assert [t.reward for t in trained if not t.truncated] == [-10.0 * length - 5 for length in lengths]
    assert len(trained) == 3 * 32 and audit(run) == []
    assert (runs / "exported" / "model.safetensors").exists()


def test_python_and_the_command_run_the_same(keys, tmp_path):
    run = areal.Run("configs/tiny_sft.yaml", **keys)
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


def test_a_run_that_was_not_started_is_not_waited_for(keys):
    run = areal.Run("configs/tiny_sft.yaml", **keys)
    with pytest.raises(RunError, match="was not started by this object"):
        run.wait()
    assert not hasattr(areal, "nothing")


def executed(notebook: nbformat.NotebookNode, folder: Path, **settings) -> list[nbformat.NotebookNode]:
    """Executes the cells in order in a fresh kernel, started in a folder as Jupyter does. Returns the outputs."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}, **settings)
    client.execute(env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def executed_with(name: str, folder: Path) -> list[nbformat.NotebookNode]:
    """Executes a notebook of examples/ with another folder in the one line that chooses it. Returns the outputs."""
    path = ROOT / "examples" / "notebooks" / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    chosen, found = f"folder = Path({str(folder)!r})", 0
    for cell in notebook.cells:
        cell.source, count = re.subn(r"^folder = .*", chosen, cell.source, flags=re.MULTILINE)
        found += count
    assert found == 1
    return executed(notebook, path.parent)


def text_of(outputs: list[nbformat.NotebookNode]) -> str:
    return "".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs_and_its_links_lead_somewhere(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell for cell in cells if cell.outputs or cell.execution_count is not None] == []
    links = re.findall(r"\]\((?!https?:)([^)#]+)", "".join(cell.source for cell in notebook.cells))
    assert links and [link for link in links if not (path.parent / link).exists()] == []


def test_a_notebook_looks_at_a_run(documented):
    _, runs = documented
    outputs = executed_with("look_at_a_run", runs / "short")
    printed = text_of(outputs)
    assert f"{runs / 'short'}: done, version 3 of 3" in printed and "reward_mean" in printed
    trained = [t for path in dumped(runs / "short" / "trajectories").values() for t in read_dump(path).trajectories]
    assert f"{trained[0].reward}" in printed and (runs / "short" / "report.html").exists()
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    assert [output for output in outputs if output.output_type == "stream" and output.name == "stderr"] == []


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_notebook_learns_the_demo_in_ten_minutes(tmp_path):
    started = time.monotonic()
    outputs = executed_with("first_curve", tmp_path / "first")
    [(before, after)] = re.findall(r"held-out accuracy (\S+) before, (\S+) after", text_of(outputs))
    assert float(before) < 0.6 and float(after) >= 0.9
    assert time.monotonic() - started < 600
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert audit(RunFolder(tmp_path / "first" / "rl")) == []


def test_what_is_wrong_in_a_cell_is_an_exception_with_one_line(keys, tmp_path):
    """A reward that cannot travel, and a run that is started twice in one process: by one object, and by another. The
    run goes on when a cell is interrupted, in the manner of Jupyter; its steps are seen, and it is killed."""
    given = {key: str(value) if isinstance(value, Path) else value for key, value in flat(keys).items()}
    sections = {"model": {"path": given.pop("model.path")}, "data": {"train": given.pop("data.train")}}
    again = f"areal.Run('configs/tiny_sft.yaml', **{given | sections | {'updates': 100000}!r})"
    cells = [
        "import areal_megatron as areal\n\n"
        "def shorter_than(limit):\n"
        "    def short(prompt, response, answer):\n"
        "        return float(len(response) < limit)\n"
        "    return short",
        "areal.Run('configs/tiny_cpu.yaml', reward={'function': shorter_than(3)})",
        f"run = {again}; run.start(quiet=True)",
        "run.start(quiet=True)",
        f"{again}.start(quiet=True)",
        "import os, signal, time; os.killpg(0, signal.SIGINT); time.sleep(60)",
        "time.sleep(3); assert run.is_running",
        "assert next(run.metrics())['kind'] == 'sft'; run.kill()",
        "run.wait(timeout_s=1)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    outputs = executed(notebook, ROOT, allow_errors=True)
    errors = [(output.ename, output.evalue) for output in outputs if output.output_type == "error"]
    folder = tmp_path / "sft"
    assert errors[:-1] == [
        ("ConfigError", "short uses 'limit' of the function around it: give it a default, limit=limit"),
        ("RunError", f"{folder} has been started by this object already, and is running"),
        (
            "ConfigError",
            f"{folder} exists: choose another name=…, continue it with resume=auto, or remove it once it has ended",
        ),
        ("KeyboardInterrupt", ""),
    ]
    assert errors[-1][0] == "RunFailed"
