"""The limit of open files: raised in every process, and checked against what the controller needs."""

import resource
import subprocess
import sys

import pytest

from areal_megatron import descriptors
from areal_megatron.config import Config, ConfigError, DataConfig, ModelConfig, RolloutConfig
from areal_megatron.config_file import save
from areal_megatron.run import Run


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
    run = Run(tmp_path / "run")
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
