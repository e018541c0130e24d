"""Runs that are killed and go on: from the newest whole checkpoint, nothing lost, nothing trained twice."""

import os
import random
import signal
import time

import pytest
import torch
from audit_run import audit
from safetensors.torch import load_file

from areal_megatron.checkpoint_folder import complete
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.run import Run
from tests.e2e.test_run import small


def trained(run: Run) -> list[int]:
    return [line["version"] for line in read_metrics(run) if line["kind"] == "update"]


@pytest.mark.parametrize("victim", ["launcher", "trainer-0", "controller"])
def test_a_run_that_is_killed_goes_on(local_run, world, victim):
    changes = {"updates": 8, "eval_items": 4, "checkpoint.every": 2, "checkpoint.hf_every": 4, "rollout.max_staleness": 2, "resume": "auto",
               "rollout.filter_uniform_groups": True, "reward.function": "tests.e2e.rewards:coarse"}  # fmt: skip
    started = local_run("killed", *small(world, **changes))
    run = Run(started.folder)
    started.wait_for(lambda: complete(run))
    time.sleep(random.uniform(0, 3))
    os.kill(started.process.pid if victim == "launcher" else started.pid(victim), signal.SIGKILL)
    assert started.wait(60) != 0

    again = local_run("killed", *small(world, **changes))
    assert again.wait() == 0, again.output
    assert "resuming from" in again.output
    assert trained(run) == list(range(1, 9))
    assert audit(run) == []
    assert len(complete(run)) == 2 and complete(run)[-1].name == "version-000008"
    whole, exported = (load_file(folder / "model.safetensors") for folder in (run.hf, run.exports / "version-000008"))
    assert whole.keys() == exported.keys()
    assert all(torch.equal(whole[name], exported[name]) for name in whole)
