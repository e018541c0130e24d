"""The cluster that tests of launching use is Slurm itself: what such tests rely on."""

import os
import time

import psutil
import pytest
from cluster import Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster"), gpus=8, grace_s=5) as started:
        yield started


@pytest.fixture
def submit(cluster, tmp_path):
    """Starts a batch script of these lines; the id of the job."""
    return lambda lines, *options: cluster.submit(script(tmp_path, lines), *options)


def script(folder, lines):
    path = folder / f"{len(list(folder.iterdir()))}.sh"
    path.write_text(f"#!/bin/bash\n{lines}\n")
    return path


def eventually(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return value


WAITS = 'trap "echo USR1" USR1; echo "run ${SLURM_RESTART_COUNT:-0}"; for i in {1..600}; do sleep 0.1; done'
SECOND_RUN_ENDS = '[ "$SLURM_RESTART_COUNT" ] && echo "run $SLURM_RESTART_COUNT" && exit\n'


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


def test_signals_reach_the_batch_script(cluster, submit):
    job = submit(WAITS)
    announced = submit(WAITS, "--time=1", "--signal=B:USR1@57")
    assert eventually(lambda: cluster.output(job))
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert eventually(lambda: "USR1" in cluster.output(job))
    assert eventually(lambda: "USR1" in cluster.output(announced))
    cluster.run("scancel", job, announced)
    assert cluster.wait(job) == "CANCELLED"


def test_leaving_takes_everything_along(tmp_path):
    with Cluster(tmp_path / "logs", nodes=2) as cluster:
        job = cluster.submit(script(tmp_path, "trap '' TERM; setsid sleep 300 & srun -N2 sleep 300 & wait"), "-N2")
        assert eventually(lambda: sum(p.name() == "sleep" for p in cluster.processes()) == 3), cluster.output(job)
        folder, processes = cluster.environment["SLURM_CONF"], cluster.processes()
    assert not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not os.path.exists(folder)
