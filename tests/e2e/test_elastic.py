"""Engines that join a running run, and engines that leave it."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from itertools import pairwise

import psutil
import pytest

from areal_megatron.audit import audit
from areal_megatron.observe.metrics import read_metrics, read_status
from areal_megatron.run import Run
from tests.conftest import ROOT
from tests.e2e.test_run import small
from tests.support.living import left_over

ENGINES = [sys.executable, "-m", "areal_megatron.launch.engines"]


def engines(run):
    return {engine["name"]: engine for engine in read_status(run).get("engines", [])}


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


def test_an_engine_joins_and_the_first_one_leaves(local_run, world, tmp_path):
    started = local_run("elastic", *small(world, **{"updates": 100000, "held_out": 4, "rollout.max_staleness": 2}))
    run = Run(started.folder)
    started.wait_for(lambda: run.metrics.exists() and any(line["kind"] == "update" for line in read_metrics(run)))
    assert "engine-7: no such engine; the run has engine-0" in refused("drain", run.folder, "engine-7")
    assert "no engine would be left" in refused("drain", run.folder, "engine-0")

    with beside(tmp_path / "added.out", "add", run.folder, "--count", 1) as added:
        started.wait_for(lambda: engines(run).get("engine-1", {}).get("version", -1) > 0)
        first = psutil.Process(started.pid("engine-0"))
        leaving = [first, *first.children(recursive=True)]
        subprocess.run([*ENGINES, "drain", run.folder, "engine-0"], cwd=ROOT, check=True, timeout=120)
        started.wait_for(lambda: not left_over(leaving, 0.1), 30)
        reached = read_status(run)["version"]
        started.wait_for(lambda: read_status(run)["version"] > reached + 2)
        started.wait_for(lambda: engines(run)["engine-1"]["running"] > 0)
        assert engines(run)["engine-0"]["state"] == "drained"
        run.stop.touch()
        assert started.wait() == 75, started.output
        assert added.wait(60) == 0
    assert "started engine-1" in (tmp_path / "added.out").read_text()
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
    run = Run(started.folder)
    started.wait_for(lambda: run.metrics.exists() and any(line["kind"] == "update" for line in read_metrics(run)))
    with beside(tmp_path / "added.out", "add", run.folder, "--count", 1) as added:
        started.wait_for(lambda: engines(run).get("engine-1", {}).get("version", -1) > 0)
        started.process.kill()
        started.process.wait()
        again = local_run("relaunched", *arguments, output="again.out")
        again.wait_for(lambda: run.incarnation == 1 and engines(run).get("engine-1", {}).get("version", -1) > 0)
        again.wait_for(lambda: engines(run).get("engine-1", {}).get("running", 0) > 0)
        run.stop.touch()
        assert again.wait() == 75, again.output
        assert added.wait(60) == 0
    assert audit(run) == []


def served(run):
    return [line["engines_serving"] for line in read_metrics(run) if line["kind"] == "update"]


def check_balanced(run):
    """A run that has had a second engine for a while has not flapped."""
    updates = [line for line in read_metrics(run) if line["kind"] == "update"]
    print([(line["version"], line["engines_serving"], round(line["update_s"], 2)) for line in updates])
    moves = sum(a["engines_serving"] != b["engines_serving"] for a, b in pairwise(updates))
    assert moves <= 3 and audit(run) == []


SHORT_OF_ENGINES = {"updates": 100000, "held_out": 1, "rollout.max_staleness": 2, "rollout.max_running": 4}
"""The only engine has room for few answers at once."""


@pytest.mark.soak
def test_a_run_that_is_short_of_engines_gets_one(local_run, world, tmp_path):
    started = local_run("balanced", *small(world, **SHORT_OF_ENGINES))
    run = Run(started.folder)
    started.wait_for(run.metrics.exists)
    with beside(tmp_path / "balanced.out", "balance", run.folder, "--most", 2) as balancing:
        started.wait_for(lambda: served(run)[-1:] == [2], 600)
        many = len(served(run))
        started.wait_for(lambda: len(served(run)) > many + 30, 600)
        run.stop.touch()
        assert started.wait() == 75, started.output
        assert balancing.wait(60) == 0
    assert "engines are short: started engine-1" in (tmp_path / "balanced.out").read_text()
    check_balanced(run)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_launcher_starts_the_engines_that_its_run_is_short_of(local_run, world):
    """The second one leaves when it is asked to, and comes back; then trainers die, and it lives on."""
    bounds = {"rollout.most_engines": 2, "machine.slots": 3, "checkpoint.every": 2}
    started = local_run("elastic", *small(world, **SHORT_OF_ENGINES, **bounds), "--restarts=1")
    run = Run(started.folder)
    started.wait_for(run.metrics.exists)
    assert "already" in refused("balance", run.folder)
    started.wait_for(lambda: served(run)[-1:] == [2], 600)
    subprocess.run([*ENGINES, "drain", run.folder, "engine-1"], cwd=ROOT, check=True, timeout=120)
    started.wait_for(lambda: served(run)[-1:] == [1])
    started.wait_for(lambda: served(run)[-1:] == [2], 600)
    assert started.output.count("engines are short: engine-1 is started") == 2
    engine = started.pid("engine-1")
    os.kill(started.pid("trainer-0"), signal.SIGKILL)
    started.wait_for(lambda: run.incarnation == 1 and engines(run).get("engine-1", {}).get("running", 0) > 0)
    assert started.pid("engine-1") == engine
    run.stop.touch()
    assert started.wait() == 75, started.output
    assert audit(run) == []
