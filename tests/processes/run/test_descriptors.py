"""The limit of open files: raised in every process, and checked against what the controller needs."""

import re
import resource
import subprocess
import sys

import pytest

from areal_megatron.config import Config, ConfigError, DataConfig, ModelConfig, RolloutConfig
from areal_megatron.config.config_file import save
from areal_megatron.launch.supervision import start
from areal_megatron.launch.supervision.orders import NodeHello
from areal_megatron.planning.pools import Node, allocate
from areal_megatron.run import descriptors
from areal_megatron.run.folder import RunFolder
from tests.conftest import ROOT


def config(**rollout):
    settings = {"engines": 5, "max_running": 256, "group_size": 16} | rollout
    return Config(name="x", model=ModelConfig("m"), data=DataConfig("d"), updates=1, rollout=RolloutConfig(**settings))


def test_what_the_controller_needs_follows_from_the_requests_in_flight():
    groups, turns, agents = (
        descriptors.needed(config(workflow=workflow)) for workflow in ("single_turn", "multi_turn", "my:agent")
    )
    assert turns - groups == 5 * (256 - 16) and agents - turns == 5 * 256
    assert groups < 1024 < turns, "the usual soft limit suffices for the one and not for the other"


def test_reward_workers_have_pipes_to_the_controller():
    few, many = config(), config()
    few.reward.workers, many.reward.workers = 2, 302
    assert descriptors.needed(many) - descriptors.needed(few) >= 2 * 300


def test_too_low_a_hard_limit_is_wrong_input():
    descriptors.check(config(), 1024)
    with pytest.raises(ConfigError, match=r"rollout\.max_running: 5 engines .* allows 1,024; raise the hard limit"):
        descriptors.check(config(workflow="multi_turn", turns=2), 1024)


@pytest.mark.parametrize("hard", [4096, 200])
def test_the_controller_raises_its_soft_limit_and_says_in_one_line_if_that_does_not_suffice(tmp_path, hard):
    run = RunFolder(tmp_path / "run")
    run.create()
    save(config(), run.config)
    code = (
        "import resource, sys; from areal_megatron.controller import controller\n"
        "async def control(*_): print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "controller.control = control; sys.exit(controller.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--run", run.folder],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard)),
    )
    if hard == 4096:
        assert (done.returncode, done.stdout) == (0, "4096\n"), done.stderr
    else:
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert done.stderr.startswith("error: rollout.max_running: 5 engines with 256 answers each need")


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_the_launcher_refuses_before_it_starts_anything(world, tmp_path, more):
    keys = [f"model.path={world / 'model'}", f"data.train={world / 'train.jsonl'}", f"data.eval={world}/heldout.jsonl"]
    keys += [f"runs_dir={tmp_path / 'runs'}", "name=x", "rollout.max_running=2000", "rollout.group_size=1"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "areal_megatron.launch.local",
            ROOT / "configs" / "tiny_cpu.yaml",
            *keys,
            *more,
            "--restarts=20",
        ],
        capture_output=True,
        text=True,
        timeout=500,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024)),
    )
    assert done.returncode == 2, done.stderr
    assert re.search("^error: rollout.max_running: .* whose node allows 1,024; raise the hard limit", done.stderr, re.M)
    assert not list((tmp_path / "runs").glob("*"))


def test_the_limit_that_counts_is_that_of_the_controllers_node():
    hellos = [NodeHello(f"n{n}", [], 0, 4, "m", files=files) for n, files in enumerate((4096, 1024))]
    made = config(workflow="multi_turn", turns=2)
    made.machine.device = "cpu"
    nodes = [start.describe(hello, made) for hello in hellos]
    start.check_open_files(made, allocate(made, nodes))
    with pytest.raises(ConfigError, match=r"rollout\.max_running: .* allows 1,024; raise the hard limit"):
        start.check_open_files(made, allocate(made, nodes[::-1]))
    start.check_open_files(made, allocate(made, [Node("n", (0, 1, 2, 3)), Node("m", (0, 1, 2, 3))]))  # unknown
    made.mode = "replay"  # a controller without engines
    start.check_open_files(made, allocate(made, nodes[::-1]))
    with pytest.raises(ConfigError, match=r"trainer: each of 1 ranks needs 129 open files, and their node allows 100;"):
        start.check_open_files(made, allocate(made, [Node("n", (0,), files=100)]))
