"""Dry runs on clusters that are not at hand: what each launcher would start there, with nothing started or written."""

import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from areal_megatron.config import ConfigError, config_file
from areal_megatron.launch import mpi, slurm, submit
from areal_megatron.planning import plan
from areal_megatron.planning.sizes import Sizes, read_header
from areal_megatron.run.folder import RunFolder
from tests.conftest import ROOT

LAUNCHERS = {"slurm": slurm.main, "mpi": mpi.main, "submit": submit.main}


@pytest.fixture
def arguments(world, tmp_path):
    """A run of 8 trainer ranks and 4 engines of 2; its run folder is tmp_path/runs/x."""
    keys = [f"model.path={world / 'model'}", f"data.train={world / 'train.jsonl'}", f"data.eval={world}/heldout.jsonl"]
    keys += [f"runs_dir={tmp_path / 'runs'}", "name=x", "trainer.dp=8", "rollout.engines=4", "rollout.tp=2"]
    return [str(ROOT / "configs" / "tiny_cpu.yaml"), *keys, "machine.host=ib0"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_shows_what_the_plan_shows_and_starts_nothing(arguments, tmp_path, capsys, launcher):
    sizes = ["--nodes=4", "--gpus=4", "--gpu-gb=80"]
    assert plan.main([*arguments, *sizes]) == 0
    planned = capsys.readouterr().out.strip()
    assert LAUNCHERS[launcher]([*arguments, "--dry-run", *sizes]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(planned) and re.search(r"engine-0 +rollout +node3:0 node3:1\n", shown)
    assert f"would start {tmp_path / 'runs' / 'x'}, a new run:\n  1 controller: python -m" in shown
    assert "  8 trainer ranks: python -m areal_megatron.train\n" in shown
    assert "  4 engines: python -m areal_megatron.engine.server\n" in shown
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model.layers.0.mlp.up_proj.bias": np.ones(64, np.float32)}, "has a tensor model.layers.0.mlp.up_proj.bias"),
        ({"model.norm.weight": None}, "has no tensor model.norm.weight"),
        ({"model.norm.weight": np.ones(3, np.float32)}, "model.norm.weight has shape [3]"),
    ],
    ids=["more", "fewer", "others"],
)
def test_weights_of_another_model_are_told_before_anything_starts(arguments, world, tmp_path, capsys, change, says):
    folder = shutil.copytree(world / "model", tmp_path / "model")
    weights = load_file(folder / "model.safetensors") | change
    save_file({name: t for name, t in weights.items() if t is not None}, folder / "model.safetensors")
    sizes = ["--nodes=4", "--gpus=4", "--gpu-gb=80"]
    assert slurm.main([*arguments, f"model.path={folder}", "--dry-run", *sizes]) == 2
    assert f"error: model.path: {folder}" in (said := capsys.readouterr().err) and says in said


def test_another_python_of_a_pool_is_shown(arguments, capsys):
    assert slurm.main([*arguments, "--dry-run", "--nodes=4", "--gpus=4", "--python", "rollout=env A=b python3"]) == 0
    assert "  4 engines: env A=b python3 -m areal_megatron.engine.server\n" in capsys.readouterr().out


def test_the_scripts_plan_for_the_nodes_of_their_headers(world, tmp_path):
    keys = [f"model.path={world / 'model'}", f"data.train={world / 'train.jsonl'}", f"data.eval={world}/heldout.jsonl"]
    keys += ["reward.function=math", "rollout.max_new_tokens=24", "data.max_prompt_tokens=32", "model.dtype=float32"]
    keys += ["trainer.tp=1", "trainer.cp=1", "trainer.dp=24"]
    keys += [f"runs_dir={tmp_path / 'runs'}", "machine.host=ib0", "--dry-run"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    command = ["bash", "slurm/train_32b.sh", *keys]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "48 nodes: 96 trainer ranks, 72 engines of 4; controller on node01" in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("lines", "sizes"),
    [
        (["--nodes=48", "--gpus-per-node=8"], Sizes(48, 8)),
        (["-N 3", "--gres=gpu:h100:4"], Sizes(3, 4)),
        (["-N3", "--gpus-per-node=h100:4", "--mem=0"], Sizes(3, 4)),
        (["--nodes 2", "--gres gpu:2"], Sizes(2, 2)),
        (["--nodes=2", "--job-name=--nodes=7"], Sizes(2, 0)),
        (["--nodes=2", "--nodes=3"], Sizes(3, 0)),
        (["--nodes=2  # of the four", "--gpus-per-node=8  # all"], Sizes(2, 8)),
        (["-N 2 --gpus-per-node=nvidia_a100-sxm4-80gb:8 --mem 0"], Sizes(2, 8)),
        (["--nodes='2'", "--gres=gpu:h100:8,nvme:1"], Sizes(2, 8)),
        (["--nodes=2", "--gres=gpu:4(S:0-1)"], Sizes(2, 4)),
        (["--nodes=2", "--gres=nvme:1"], Sizes(2, 0)),
    ],
)
def test_sizes_of_a_batch_script(tmp_path, lines, sizes):
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines) + "# --nodes=9\n")
    assert read_header(script) == sizes


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dry-run"], "areal_megatron.launch.slurm runs inside a Slurm job"),
        (["--dry-run", "--nodes=4"], "--nodes and --gpus go together"),
        (["--nodes=4", "--gpus=4"], "--nodes and --gpus go with --dry-run"),
        (["--nodes=0"], "--nodes and --gpus go with --dry-run"),
        (["--dry-run", "--nodes=0", "--gpus=4"], "expected at least one node"),
        (["--dry-run", "--nodes=3", "--gpus=4"], "the pools need 16 slots"),
        (["--dry-run", "--nodes=4", "--gpus=4", "machine.slots=5"], "--gpus 4: expected at least 5"),
        (["--dry-run", "--nodes=4", "--gpus=4", "machine.shared=true"], "machine.shared: say by --gpu-gb"),
        (["--dry-run", "--nodes=4", "--gpus=0"], "machine.slots: say how many cores"),
        (["--dry-run", "--nodes=4", "--gpus=4", "machine.host=127.0.0.1"], "is a loopback address and the job has 4"),
        (["--dry-run", "--nodes=4", "--gpus=4", "model.path=nowhere"], "model.path: there is no folder nowhere"),
        (["--dry-run", "--nodes=4", "--gpus=4", "data.train=nowhere.jsonl"], "nowhere.jsonl"),
        (["--dry-run", "--batch-script=nowhere.sh"], "--batch-script: cannot read nowhere.sh: No such file"),
        (["--dry-run", f"--batch-script={__file__}"], "has no line '#SBATCH --nodes=N'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments, capsys, monkeypatch, flags, words):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert slurm.main([*arguments, *flags]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and words in message, message


def test_a_heterogeneous_script_is_refused(tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH hetjob\n#SBATCH --nodes=3\n")
    with pytest.raises(ConfigError, match="nodes of several kinds"):
        read_header(script)


def test_a_run_that_another_process_may_be_writing_is_left_as_it_is(arguments, tmp_path, capsys):
    run = RunFolder(tmp_path / "runs" / "x")
    run.create()
    config_file.save(config_file.load(arguments[0], arguments[1:]), run.config)
    run.begin()
    (run.checkpoints / ".version-000002.replaced").mkdir(parents=True)
    before = sorted(path for path in run.folder.rglob("*"))
    assert slurm.main([*arguments, "resume=auto", "--dry-run", "--nodes=4", "--gpus=4"]) == 0
    assert "a new run" in capsys.readouterr().out
    assert sorted(path for path in run.folder.rglob("*")) == before


def test_a_submitted_script_asks_for_what_those_in_slurm_ask(arguments, tmp_path, capsys):
    ours = (ROOT / "slurm" / "train_32b.sh").read_text().splitlines()
    assert submit.main([*arguments, "name=r1-32b", "--nodes=48", "--gpus=8", "--dry-run"]) == 0
    written = capsys.readouterr().out.partition("#!/bin/bash\n")[2].splitlines()
    assert [line for line in written if line.startswith("#SBATCH")] == [
        line for line in ours if line.startswith("#SBATCH")
    ]
    shared = (ROOT / "slurm" / "run.sh").read_text().splitlines()
    assert [line for line in written if line.startswith("export")] == [
        line for line in shared if line.startswith("export")
    ]
    (command,) = (line for line in shared if line.startswith("exec"))
    options = command.partition("areal_megatron.launch.slurm")[2].replace('--batch-script="$0" ', "").split()
    assert options[0] == '"$CONFIG"' and options[-1] == '"$@"'
    assert written[-1].split("areal_megatron.launch.slurm ")[1].split() == [
        arguments[0],
        *options[1:-1],
        *arguments[1:],
        "name=r1-32b",
    ]


def test_options_of_a_job_reach_the_script(arguments, capsys):
    more = [
        "--account=lab",
        "--partition=h100",
        "--qos=low",
        "--time=2:00:00",
        "--restarts=3",
        "--python",
        "trainer=env python3",
    ]
    more += ["--sbatch=--constraint=a|b", "--cpus=64", "--mem=200G"]
    assert submit.main([*arguments, "--nodes=4", "--gpus=4", "--dry-run", *more]) == 0
    written = capsys.readouterr().out.partition("#!/bin/bash\n")[2]
    for line in (
        "--account=lab",
        "--partition=h100",
        "--qos=low",
        "--time=2:00:00",
        "'--constraint=a|b'",
        "--mem=200G",
    ):
        assert f"#SBATCH {line}\n" in written
    assert "--exclusive" not in written and "#SBATCH --ntasks-per-node=1\n#SBATCH --cpus-per-task=64\n" in written
    assert " --restarts=3 '--python=trainer=env python3' resume=auto" in written


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--sbatch=constraint=h100"], "'constraint=h100' is no option of sbatch"),
        (["--account=a\nb"], "is no option of sbatch"),
        (["--time=10"], "--time 10: give at least 20 minutes"),
        (["--time=soon"], "--time soon: expected a limit such as 24:00:00"),
        (["rollout.engines=5"], "the pools need 18 slots"),
        (["machine.device=cpu", "machine.slots=4"], "there is no sbatch here"),
    ],
)
def test_what_cannot_be_submitted_is_refused_in_one_line(arguments, capsys, monkeypatch, flags, words):
    monkeypatch.setenv("PATH", "/nowhere")
    assert submit.main([*arguments, "--nodes=4", "--gpus=4", *flags]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and words in message, message


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [("90", 90), ("90:30", 90.5), ("1:30:00", 90), ("2-1", 2940), ("2-1:30", 2970), ("1-0:0:30", 1440.5)],
)
def test_time_limits_are_read_as_slurm_reads_them(limit, minutes):
    assert submit.seconds(limit) == minutes * 60
