"""The tutorials work as they are written: their files are saved and their lines run, in order, in an empty folder.

Within seconds each run is started with `--dry-run` alone; the soak test starts them.
"""

import os
import re
import shutil

import pytest

from areal_megatron.checkpoint.hf_folder import hf_tensors, safetensors_header
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.run.folder import RunFolder
from tests.conftest import ROOT
from tests.support.areal import Shell
from tests.unit.test_shell_lines import FENCE

TUTORIALS = ROOT / "docs" / "tutorials"
STARTS = ("areal train ", "areal submit ")
READS_NOTHING_OF_A_RUN = (*STARTS, "areal plan ", "python try_")


def steps(name):
    """The parts of a tutorial after its section Install: (file name, content) and ("", command)."""
    text = re.sub(r"^## Install\n.*?(?=^## )", "", (TUTORIALS / f"{name}.md").read_text(), flags=re.M | re.S)
    for language, block in FENCE.findall(text):
        if language in ("python", "yaml"):
            file, content = re.match(r"# ([\w.]+)\n(.*)", block, re.DOTALL).groups()
            yield file, content
        elif language == "sh":
            for line in block.splitlines():
                yield "", re.sub(r"\s+#.*$", "", line)


@pytest.fixture
def shell(tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "areal").symlink_to(ROOT)
    return Shell(tmp_path / "bin", tmp_path / "first")


def follow(shell, name, runs=lambda command: True, changed=lambda command: command, timeout_s=60):
    """Does what the tutorial says; commands for which `runs` is false are left out. Returns what was printed."""
    printed, count = "", 0
    for file, content in steps(name):
        if file:
            (shell.folder / file).write_text(content)
        elif runs(content):
            done = shell.run(changed(content), timeout_s)
            assert done.returncode == 0, f"{content}\n{done.stdout}{done.stderr}"
            printed, count = printed + done.stdout, count + 1
    assert count
    return printed


def dry(command):
    """Also of a run that an earlier line has made, under another name."""
    start = command.startswith(STARTS) and "--dry-run" not in command
    return f"{command} name=another --dry-run" if start else command


@pytest.fixture
def first(shell, world, few_examples):
    """The folder of the first tutorial after its supervised run, which had few examples."""
    (shell.folder / "world").mkdir()
    for path in world.iterdir():
        (shell.folder / "world" / path.name).symlink_to(few_examples if path.name == "sft.jsonl" else path)
    (shell.folder / "runs" / "sft").mkdir(parents=True)
    (shell.folder / "runs" / "sft" / "hf").symlink_to(world / "model")
    for file, content in steps("laptop"):
        if file:
            (shell.folder / file).write_text(content)
    return shell


@pytest.mark.parametrize("name", ["laptop", "reward", "workflow"])
def test_runs_of_the_first_folder_would_start(first, name):
    shown = follow(first, name, lambda command: command.startswith(READS_NOTHING_OF_A_RUN), dry)
    assert "engine-0" in shown and "would start" in shown
    assert sorted(path.name for path in (first.folder / "runs").iterdir()) == ["sft"]


def test_a_run_on_a_cluster_would_be_submitted(shell, world):
    model, data = shell.folder / "models" / "Qwen3-8B", shell.folder / "data"
    shutil.copytree(ROOT / "configs" / "models" / "Qwen3-8B", model)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(world / "model" / file, model)
    tensors = hf_tensors(architecture(read_config(model)).canonical, lambda pattern: "bfloat16")
    header = safetensors_header((t.name, "BF16", t.shape, t.nbytes) for t in tensors)
    (model / "model.safetensors").write_bytes(header)
    os.truncate(model / "model.safetensors", len(header) + sum(t.nbytes for t in tensors))  # it takes no room
    data.mkdir()
    for name in ("train", "heldout"):
        shutil.copy(world / f"{name}.jsonl", data)
    shown = follow(shell, "slurm", lambda command: command.startswith(READS_NOTHING_OF_A_RUN), dry)
    assert "4 nodes: 8 trainer ranks, 12 engines of 2" in shown and "#SBATCH --partition=gpu\n" in shown
    assert "would start" in shown and not (shell.folder / "runs").exists()


def test_a_family_has_the_tensors_that_transformers_has(shell):
    assert "291 tensors, as transformers has them" in follow(shell, "model_family")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_first_folder_from_nothing_to_the_curve(shell):
    """All lines of three tutorials as they are; the figures are those that they promise."""
    for name in ("laptop", "reward", "workflow"):
        print(printed := follow(shell, name, timeout_s=1800))
        assert "warning" not in printed
    promised = re.search(
        r"accuracy (\d+)% \(version 0\) → (\d+)% \(version 160\)", (TUTORIALS / "laptop.md").read_text()
    )
    lines = read_metrics(RunFolder(shell.folder / "runs" / "ppo"))
    reached = [line["accuracy"] for line in lines if line["kind"] == "eval"]
    assert [reached[0], reached[-1]] == pytest.approx([int(promised[1]) / 100, int(promised[2]) / 100], abs=0.06)
    assert (shell.folder / "runs" / "ppo" / "report.html").exists() and (shell.folder / "evaluation").exists()
