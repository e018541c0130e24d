"""Engines that join a running run, and engines that leave it."""

import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest

import areal_megatron as areal
from areal_megatron.observe.metrics import read_metrics, read_status
from areal_megatron.observe.status import EngineState, EngineStatus
from areal_megatron.programs.audit import audit
from areal_megatron.run.folder import RunFolder
from tests.conftest import ROOT
from tests.e2e.test_run import small
from tests.support.living import left_over

ENGINES = [sys.executable, "-m", "areal_megatron.launch.engines"]


def engine(run, name):
    """What the controller says of an engine; without a version before it says anything."""
    known = {each.name: each for each in read_status(run).engines}
    return known.get(name) or EngineStatus(name=name, state=EngineState.STARTING)


def refused(*arguments):
    done = subprocess.run([*ENGINES, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    return done.stderr


@contextmanager
def beside(output, *arguments):
    """`areal engines` with these arguments, while the test runs its body; ended afterwards."""
    with output.open("w") as file:
        process = subprocess.Popen([*ENGINES, *map(str, arguments)], cwd=ROOT, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.soak  # test_faults.py brings an engine back into a run; the rest is in test_unreached.py, test_health.py
def test_an_engine_joins_and_the_first_one_leaves(local_run, world):
    """From Python, which calls the command; the run was started elsewhere."""
    started = local_run("elastic", *small(world, **{"updates": 100000, "held_out": 4, "rollout.max_staleness": 2}))
    run = RunFolder(started.folder)
    started.wait_for(lambda: run.metrics.exists() and any(line["kind"] == "update" for line in read_metrics(run)))
    assert "engine-7: no such engine; the run has engine-0" in refused("drain", run.folder, "engine-7")
    python = areal.Run(run.config)
    with pytest.raises(areal.ConfigError, match=r"^no engine would be left to generate; stop the run instead$"):
        python.engines.drain("engine-0")
    with pytest.raises(areal.ConfigError, match=r"^--listen: goes with --address"):
        python.engines.add("--listen=127.0.0.1", quiet=True)

    added = python.engines.add("--count=1", quiet=True)
    assert added.names == ["engine-1"]
    started.wait_for(lambda: engine(run, "engine-1").version > 0)
    first = psutil.Process(started.pid("engine-0"))
    leaving = [first, *first.children(recursive=True)]
    python.engines.drain("engine-0")
    started.wait_for(lambda: not left_over(leaving, 0.1), 30)
    reached = read_status(run).version
    started.wait_for(lambda: read_status(run).version > reached + 2)
    started.wait_for(lambda: engine(run, "engine-1").running > 0)
    assert engine(run, "engine-0").state == "drained"
    with pytest.raises(TimeoutError):
        added.wait(timeout_s=0.1)

    lost = python.engines.add("--count=1", quiet=True)
    lost.kill()
    with pytest.raises(areal.RunFailed, match=r"^interrupted: the engines have been ended$"):
        lost.wait()
    python.stop()
    assert started.wait() == 75, started.output
    added.wait(60)
    updates = [line for line in read_metrics(run) if line["kind"] == "update"]
    assert {line["engines_serving"] for line in updates} == {1, 2} and updates[-1]["groups_skipped"] == 0
    assert "engine-0 is drained: it is ended" in started.output
    assert audit(run) == []
    assert "is not running: it is stopped" in refused("add", run.folder)


@pytest.mark.soak
def test_an_added_engine_serves_the_next_launcher_too(local_run, world, tmp_path):
    """The first launcher is killed. The next one has another secret, so the engine must start again."""
    arguments = small(world, **{"updates": 100000, "held_out": 1, "rollout.max_staleness": 2, "resume": "auto"})
    started = local_run("relaunched", *arguments)
    run = RunFolder(started.folder)
    started.wait_for(lambda: run.metrics.exists() and any(line["kind"] == "update" for line in read_metrics(run)))
    with beside(tmp_path / "added.out", "add", run.folder, "--count", 1) as added:
        started.wait_for(lambda: engine(run, "engine-1").version > 0)
        started.process.kill()
        started.process.wait()
        again = local_run("relaunched", *arguments, output="again.out")
        again.wait_for(lambda: run.incarnation == 1 and engine(run, "engine-1").version > 0)
        again.wait_for(lambda: engine(run, "engine-1").running > 0)
        run.stop.touch()
        assert again.wait() == 75, again.output
        assert added.wait(60) == 0
    assert audit(run) == []
