"""Trainers at one site and an engine at another: two network namespaces with a slow link between them."""

import subprocess
import time
from contextlib import contextmanager

import psutil
import pytest

from areal_megatron.observe.metrics import read_metrics, read_status
from areal_megatron.programs.audit import audit
from areal_megatron.run.folder import RunFolder
from tests.conftest import ROOT
from tests.e2e.test_elastic import ENGINES, engine
from tests.e2e.test_run import small
from tests.support.living import command_of
from tests.support.slow_link import NoNamespaces, slow_link

ETA = 2
KEYS = {"updates": 100000, "held_out": 1, "rollout.max_staleness": ETA}
FAR = ["unshare", "--uts", "sh", "-c", 'hostname far && exec "$@"', "sh"]
"""The beginning of a command on a machine of another name."""


@pytest.fixture
def sites():
    """50 ms there and back, 200 Mb/s each way."""
    try:
        with slow_link(mbps=200, delay_ms=50) as link:
            yield link
    except NoNamespaces as e:
        pytest.skip(str(e))


@contextmanager
def added(run, sites, output):
    """The launcher of an engine at the far site; it must end well with the run."""
    arguments = ["add", str(run.folder), "--count", "1", "--address", sites.far.address]
    with output.open("w") as file:
        process = subprocess.Popen([*sites.far.enter, *FAR, *ENGINES, *arguments], cwd=ROOT, stdout=file, stderr=file)
    try:
        yield process
        assert process.wait(60) == 0, output.read_text()
    finally:
        process.terminate()
        process.wait(30)


def version_of(run, name):
    return engine(run, name).version


def trains(run):
    return run.metrics.exists() and any(line["kind"] == "update" for line in read_metrics(run))


def assert_bounded(run):
    """Nothing was lost, nothing trained twice, and nothing was too stale."""
    assert audit(run) == []
    assert max(line["staleness_max"] for line in read_metrics(run) if line["kind"] == "update") <= ETA


def drain_the_near_one(run):
    """From here on the far engine generates alone."""
    subprocess.run([*ENGINES, "drain", str(run.folder), "engine-0"], cwd=ROOT, check=True, timeout=500)


@pytest.mark.soak  # two to three minutes
def test_an_engine_at_another_site_is_killed_and_comes_back(local_run, world, tmp_path, sites):
    started = local_run("sites", *small(world, **KEYS), enter=sites.near.enter)
    run = RunFolder(started.folder)
    started.wait_for(lambda: trains(run))
    with added(run, sites, tmp_path / "added.out") as adding:
        started.wait_for(lambda: version_of(run, "engine-1") > 0)
        assert run.endpoint("engine-1").startswith(f"https://{sites.far.address}:")
        drain_the_near_one(run)
        reached = read_status(run).version
        started.wait_for(lambda: read_status(run).version > reached + 2)
        below = psutil.Process(adding.pid).children(recursive=True)
        next(p for p in below if "areal_megatron.engine.serving" in command_of(p)).kill()
        started.wait_for(lambda: engine(run, "engine-1").losses == 1)
        started.wait_for(lambda: version_of(run, "engine-1") > reached + 2)
        again = read_status(run).version
        started.wait_for(lambda: read_status(run).version > again + 2)
        run.stop.touch()
        assert started.wait() == 75, started.output
    assert_bounded(run)


@pytest.mark.soak
def test_a_site_that_is_cut_off_comes_back(local_run, world, tmp_path, sites):
    """The engine of the trainers' own site goes on meanwhile."""
    started = local_run("cut", *small(world, **KEYS, **{"reshard.timeout_s": 10}), enter=sites.near.enter)
    run = RunFolder(started.folder)
    started.wait_for(lambda: trains(run))
    with added(run, sites, tmp_path / "added.out"):
        started.wait_for(lambda: version_of(run, "engine-1") > 0)
        with sites.near.cut_off():
            before = read_status(run).version
            time.sleep(60)
        assert read_status(run).version > before + 2
        reached = read_status(run).version
        started.wait_for(lambda: version_of(run, "engine-1") > reached)
        run.stop.touch()
        assert started.wait() == 75, started.output
    assert_bounded(run)


@pytest.mark.soak
def test_another_launcher_has_other_credentials(local_run, world, tmp_path, sites):
    """The first one is killed; the engine starts again with the new credentials."""
    arguments = small(world, **KEYS, resume="auto")
    started = local_run("relaunched", *arguments, enter=sites.near.enter)
    run = RunFolder(started.folder)
    started.wait_for(lambda: trains(run))
    with added(run, sites, tmp_path / "added.out"):
        started.wait_for(lambda: version_of(run, "engine-1") > 0)
        before = run.credentials.path.read_bytes()
        started.process.kill()
        started.process.wait()
        again = local_run("relaunched", *arguments, output="again.out", enter=sites.near.enter)
        again.wait_for(lambda: run.incarnation == 1 and version_of(run, "engine-1") > 0)
        assert run.credentials.path.read_bytes() != before
        drain_the_near_one(run)
        again.wait_for(lambda: engine(run, "engine-1").running > 0)
        run.stop.touch()
        assert again.wait() == 75, again.output
    assert_bounded(run)
