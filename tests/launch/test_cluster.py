"""What tests of launching rely on in their cluster, which is Slurm itself on virtual nodes."""

import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest

from tests.support import debian
from tests.support.cluster import Cluster
from tests.support.living import is_alive, name_of

pytestmark = pytest.mark.soak  # the tests of launching fail, too, where the cluster does not do what they rely on

ENDS_IN_ITS_SECOND_RUN = """
echo run ${SLURM_RESTART_COUNT:-0}
[ "$SLURM_RESTART_COUNT" ] && exit
trap 'echo USR1' USR1
for i in {1..900}; do sleep 0.1; done
"""


@pytest.fixture(scope="module", autouse=True)
def restarts(tmp_path_factory):
    """A cluster, and jobs on it whose restart takes half a minute, during which other tests run."""
    folder = tmp_path_factory.mktemp("restarts")
    batch = script(folder, ENDS_IN_ITS_SECOND_RUN)
    with Cluster(folder / "logs", grace_s=5) as cluster:
        jobs = {
            "announced": cluster.submit(batch, "-w", "node0", "--time=1", "--signal=B:USR1@57"),
            "requeued": cluster.submit(batch, "-w", "node0"),
            "preempted": cluster.submit(batch, "-w", "node1", "--exclusive", "--signal=B:USR1@30"),
            "lost": cluster.submit(batch, "-w", "node2"),
        }
        assert eventually(lambda: all("run 0" in cluster.output(job) for job in jobs.values()))
        cluster.run("scontrol", "requeue", jobs["requeued"])
        jobs["preempting"] = cluster.submit(script(folder, "sleep 1"), "-w", "node1", "--exclusive", "-p", "high")
        cluster.fail("node2")
        assert not cluster.processes("node2")
        yield cluster, jobs


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    environment = debian.mpi_environment(os.environ)
    with Cluster(tmp_path_factory.mktemp("cluster"), gpus=8, environment=environment) as started:
        yield started


@pytest.fixture
def submit(cluster, tmp_path):
    """Submits a batch script of these lines and returns the id of the job."""
    return lambda lines, *options: cluster.submit(script(tmp_path, lines), *options)


def script(folder: Path, lines: str) -> Path:
    path = folder / f"{len(list(folder.iterdir()))}.sh"
    path.write_text(f"#!/bin/bash\n{lines}\n")
    return path


def eventually(condition, timeout_s=40.0):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return value


def test_steps_run_beside_each_other_on_nodes_of_their_own(cluster, submit):
    job = submit(
        "srun --overlap -N2 -w node0,node1 sh -c 'echo first $SLURMD_NODENAME; sleep 0.5' &\n"
        "srun --overlap -N2 -w node2,node3 sh -c 'echo second $SLURMD_NODENAME; sleep 0.5' &\n"
        "wait; scontrol show hostnames",
        "-N4",
    )
    assert cluster.wait(job) == "COMPLETED"
    lines = cluster.output(job).splitlines()
    assert sorted(lines[:4]) == ["first node0", "first node1", "second node2", "second node3"]
    assert lines[4:] == cluster.nodes


def test_a_job_sees_its_gpus(cluster, submit):
    job = submit("echo $CUDA_VISIBLE_DEVICES $SLURM_GPUS_ON_NODE", "--gpus-per-node=8")
    assert cluster.wait(job) == "COMPLETED"
    assert cluster.output(job) == "0,1,2,3,4,5,6,7 8\n"


def test_a_signal_reaches_the_batch_script(cluster, submit):
    job = submit("trap 'echo USR1; exit' USR1; echo ready; for i in {1..600}; do sleep 0.1; done")
    assert eventually(lambda: cluster.output(job))
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert cluster.wait(job) == "COMPLETED"
    assert cluster.output(job) == "ready\nUSR1\n"


def test_mpirun_starts_more_processes_than_there_are_cores(cluster, submit):
    job = submit("mpirun -n 4 hostname", "-N1")
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    assert len(cluster.output(job).splitlines()) == 4


@pytest.mark.skipif(not importlib.util.find_spec("mpi4py"), reason="mpi4py is not installed")
def test_mpi4py_finds_the_library_of_mpirun(cluster, submit, tmp_path):
    code = tmp_path / "rank.py"
    code.write_text(
        "from mpi4py import MPI\n"
        "world = MPI.COMM_WORLD\n"
        "sums = world.gather(world.Split(world.rank % 2).allreduce(world.rank))\n"
        "if not world.rank: print(sums)"
    )
    job = submit(f"mpirun -n 4 '{sys.executable}' '{code}'", "-N2", "-n4")
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    assert cluster.output(job) == "[2, 4, 2, 4]\n"


def test_leaving_takes_everything_along(tmp_path):
    lines = "trap '' TERM; setsid sleep 300 & srun -N2 sleep 300 & wait"
    with Cluster(tmp_path / "logs", nodes=2) as cluster:
        job = cluster.submit(script(tmp_path, lines), "-N2")
        assert eventually(lambda: sum(name_of(p) == "sleep" for p in cluster.processes()) == 3), cluster.output(job)
        configuration, processes = cluster.environment["SLURM_CONF"], cluster.processes()
        assert {"munged", "slurmctld", "slurmd", "slurmstepd", "srun", "sleep"} <= {name_of(p) for p in processes}
    assert not [p for p in processes if is_alive(p)]
    assert not os.path.exists(configuration)


def test_a_requeued_job_runs_again(restarts):
    cluster, jobs = restarts
    assert cluster.wait(jobs["requeued"]) == "COMPLETED"
    assert runs(cluster.output(jobs["requeued"])) == ["run 0", "run 1"]


def test_a_preempted_job_is_told_and_runs_again(restarts):
    cluster, jobs = restarts
    assert cluster.wait(jobs["preempting"]) == "COMPLETED"
    assert cluster.wait(jobs["preempted"]) == "COMPLETED"
    assert runs(cluster.output(jobs["preempted"])) == ["run 0", "USR1", "run 1"]


def test_the_end_of_its_time_is_announced(restarts):
    cluster, jobs = restarts
    assert eventually(lambda: "USR1" in cluster.output(jobs["announced"]))


def test_a_job_of_a_lost_node_runs_again_when_the_node_is_back(restarts):
    cluster, jobs = restarts
    assert cluster.wait(jobs["lost"], {"PENDING"}) == "PENDING"
    cluster.restore("node2")
    assert cluster.wait(jobs["lost"]) == "COMPLETED"
    assert runs(cluster.output(jobs["lost"])) == ["run 0", "run 1"]


def runs(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(("run ", "USR1"))]
