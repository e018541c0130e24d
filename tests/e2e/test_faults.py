"""Processes that die in the middle, and Ctrl-C: the run ends at once, says why and leaves nothing behind."""

import os
import random
import signal
import sys
import time

import psutil
import pytest

from areal_megatron.observe.metrics import read_metrics
from areal_megatron.programs.audit import audit
from areal_megatron.run.folder import RunFolder
from tests.e2e.test_run import small
from tests.support.living import left_over


def kill(started, victim):
    """SIGKILL to the launcher, or to one process, which the launcher then names; nothing is left of the run."""
    members, killed = started.members(), time.monotonic()
    if victim == "launcher":
        started.process.kill()
        started.wait(60)
    else:
        os.kill(started.pid(victim), signal.SIGKILL)
        assert started.wait(60) == 1
        last = started.output.splitlines()[-4]
        assert f"{victim} was killed by SIGKILL" in last
        assert str(RunFolder(started.folder).log(victim)) in last
    assert time.monotonic() - killed < 20
    assert not left_over(members, timeout_s=20)


@pytest.mark.soak
def test_an_engine_that_is_killed_ends_the_run(local_run, world):
    """The others are killed in test_resume.py."""
    started = local_run("kill-engine", *small(world, updates=100000, held_out=1))
    started.wait_for(lambda: updates(RunFolder(started.folder)))
    kill(started, "engine-0")


def test_an_engine_that_cannot_start_shows_why(local_run, world):
    started = local_run("loud", f"--python=rollout=env VLLM_LOGGING_LEVEL=loud {sys.executable}", *small(world))
    assert started.wait(120) == 1
    assert "engine-0 ended with exit code" in started.output.splitlines()[-4]
    assert "Unable to configure handler 'vllm'" in started.output


def updates(run):
    return sum(line["kind"] == "update" for line in read_metrics(run)) if run.metrics.exists() else 0


TWO_ENGINES = {
    "updates": 100000,
    "checkpoint.every": 2,
    "held_out": 4,
    "rollout.engines": 2,
    "machine.slots": 3,
    "rollout.max_staleness": 2,
}


def test_what_dies_is_started_again_alone_and_an_interrupt_ends_everything(local_run, world, of_family):
    """First one engine of two, while the other keeps running; then a trainer dies under both; then comes Ctrl-C. The
    run trains a GLM-4.5 with experts."""
    changes = TWO_ENGINES | {"model.path": of_family("glm4_moe")}
    started = local_run("survivor", "--restarts=2", *small(world, **changes))
    run = RunFolder(started.folder)
    started.wait_for(lambda: updates(run) >= 2)
    others = [started.pid(name) for name in ("controller", "trainer-0", "engine-0")]
    os.kill(started.pid("engine-1"), signal.SIGKILL)
    killed, trained = time.monotonic(), updates(run)
    started.wait_for(lambda: "engine-1 is back" in run.log("controller").read_text())
    print(f"back after {time.monotonic() - killed:.1f} s, {updates(run) - trained} updates meanwhile")
    assert updates(run) > trained, "training continued"
    assert [started.pid(name) for name in ("controller", "trainer-0", "engine-0")] == others and run.incarnation == 0
    engines, trained = [started.pid(f"engine-{index}") for index in range(2)], updates(run)
    os.kill(others[1], signal.SIGKILL)
    started.wait_for(lambda: run.incarnation == 1 and updates(run) >= trained + 4)
    assert "2 engines keep running" in started.output
    assert [started.pid(f"engine-{index}") for index in range(2)] == engines
    members = started.members()
    started.process.send_signal(signal.SIGINT)
    assert started.wait(30) == 130
    assert "interrupted" in started.output
    assert not left_over(members)
    assert audit(run) == []


@pytest.mark.soak
def test_an_engine_that_hangs_is_ended_and_started_again_alone(local_run, world):
    started = local_run("survivor", "--restarts=1", *small(world, **TWO_ENGINES, **{"rollout.silence_s": 15}))
    run = RunFolder(started.folder)
    started.wait_for(lambda: updates(run) >= 2)
    others = [started.pid(name) for name in ("controller", "trainer-0", "engine-1")]
    hung = psutil.Process(started.pid("engine-0"))
    for process in (hung, *hung.children(recursive=True)):
        process.suspend()
    started.wait_for(lambda: "engine-0 is back" in run.log("controller").read_text())
    assert "engine-0 lives but does not answer: it is ended" in started.output
    assert not left_over([hung])
    trained = updates(run)
    started.wait_for(lambda: updates(run) >= trained + 4)
    assert [started.pid(name) for name in ("controller", "trainer-0", "engine-1")] == others and run.incarnation == 0
    run.stop.touch()
    assert started.wait() == 75, started.output
    assert audit(run) == []


@pytest.mark.soak
def test_a_run_whose_launcher_hangs_is_taken_over(local_run, world):
    """It is stopped, as by Ctrl-Z or a machine that stands still; its processes train on until they notice."""
    arguments = small(world, resume="auto", updates=40, **{"checkpoint.every": 2, "machine.lease_s": 5})
    first = local_run("hangs", *arguments)
    run = RunFolder(first.folder)
    first.wait_for(lambda: updates(run) >= 4)
    members, secret = first.members(), run.token
    first.process.send_signal(signal.SIGSTOP)
    second = local_run("hangs", *arguments, output="second.out")
    assert second.wait(400) == 0, second.output
    assert "taking over" in second.output and "resuming from" in second.output
    assert first.wait(10) == -signal.SIGKILL and not left_over(members)
    assert len(run.starts()) == 2 and audit(run) == [] and run.token != secret


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_whatever_dies_ten_times_is_started_again(local_run, world):
    """Engines, trainer ranks and the controller at random moments; the launcher brings the run to its end by itself."""
    victims = ["engine-0", "engine-1", "trainer-0", "trainer-1", "controller", "controller"] * 5
    random.shuffle(victims)
    changes = {
        "updates": 100000,
        "held_out": 4,
        "rollout.engines": 2,
        "trainer.pp": 2,
        "machine.slots": 4,
        "rollout.max_staleness": 2,
        "checkpoint.every": 1,
    }
    started = local_run("survivor", f"--restarts={len(victims)}", *small(world, **changes))
    run = RunFolder(started.folder)
    started.wait_for(lambda: updates(run) >= 2)
    for number, victim in enumerate(victims):
        time.sleep(random.uniform(0, 3))
        trained, killed, seen = updates(run), time.monotonic(), len(run.log("controller").read_text())
        os.kill(started.pid(victim), signal.SIGKILL)
        started.wait_for(lambda: started.output.count("starting again") > number)  # noqa: B023
        if victim.startswith("engine"):
            started.wait_for(lambda: f"{victim} is back" in run.log("controller").read_text()[seen:])  # noqa: B023
        started.wait_for(lambda: updates(run) >= trained + 2)  # noqa: B023
        print(
            f"{number + 1}: {victim}, generating and training again after {time.monotonic() - killed:.1f} s", flush=True
        )
    run.stop.touch()
    assert started.wait() == 75, started.output
    assert audit(run) == []
