"""The scripts of slurm/ on a real Slurm cluster of four virtual nodes, with a model that CPU cores can train."""

import json
import os
import random
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from areal_megatron.checkpoint.folder import complete
from areal_megatron.config import Config, ConfigError
from areal_megatron.launch import slurm
from areal_megatron.launch import submit as submitting
from areal_megatron.launch.supervision.orders import NodeHello
from areal_megatron.observe.metrics import read_metrics, read_status
from areal_megatron.observe.records import read_record
from areal_megatron.observe.status import EngineStatus
from areal_megatron.programs import status
from areal_megatron.programs.audit import audit
from areal_megatron.run.folder import RunFolder
from areal_megatron.run.network import check_network
from tests.e2e.test_run import small
from tests.support.cluster import ENDED, Cluster
from tests.support.living import command_of, name_of
from tests.support.traces import Traces

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm"), gpus=8, grace_s=200) as cluster:
        yield cluster


@pytest.fixture
def traces(tmp_path):
    """What the nodes leave behind, which are all this machine."""
    return Traces(tmp_path)


@pytest.fixture
def submit(cluster, monkeypatch, traces):
    """Submits the real script from the repository's folder, on four nodes by default."""
    monkeypatch.chdir(ROOT)
    jobs = []

    def submit(*arguments: str, options: Sequence[str] = ("--nodes=4",)) -> str:
        environment = f"--export=ALL,TMPDIR={traces.temporary}"
        jobs.append(cluster.submit(Path("slurm/train_32b.sh"), environment, *options, "--time=60", arguments=arguments))
        return jobs[-1]

    yield submit
    for job in jobs:  # a job that a failed test has left would occupy the nodes
        if cluster.state(job) not in ENDED:
            cluster.run("scancel", job)
            cluster.wait(job)
    for node in set(cluster.failed):
        cluster.restore(node)


def tiny(world: Path, runs: Path, **changes) -> list[str]:
    """Returns overrides of the 32B run: a trainer rank or an engine on each node."""
    keys = {
        "name": "run",
        "runs_dir": runs,
        "machine.device": "cpu",
        "machine.slots": 1,
        "machine.host": "127.0.0.1",
        "machine.silence_s": 60,
        "model.dtype": "float32",
        "trainer.tp": 1,
        "trainer.pp": 2,
        "trainer.cp": 1,
        "trainer.dp": 1,
        "trainer.microbatch_tokens": 2048,
        "rollout.tp": 1,
        "rollout.engines": 2,
        "rollout.max_new_tokens": 24,
        "data.max_prompt_tokens": 32,
        "checkpoint.hf_every": 0,
        "optimizer.lr": 3e-3,
        **changes,
    }
    return small(world, **keys)


def eventually(condition, timeout_s: float, problem=lambda: ""):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"nothing within {timeout_s} s\n{problem()}"
        time.sleep(0.1)
    return value


def trained(run: RunFolder) -> int:
    return sum(line["kind"] == "update" for line in read_metrics(run)) if run.metrics.exists() else 0


def engines(run: RunFolder) -> list[EngineStatus]:
    return read_status(run).engines


def pid(cluster: Cluster, part: str) -> int:
    return next(p.pid for p in cluster.processes() if part in command_of(p))


def of_jobs(cluster: Cluster) -> list[psutil.Process]:
    """Every process of the cluster but Slurm's daemons."""
    return [p for p in cluster.processes() if name_of(p) not in ("", "munged", "slurmctld", "slurmscriptd", "slurmd")]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.soak)])  # also in test_faults, test_mpi
def test_a_job_is_killed_in_part_and_preempted_and_ends_by_itself(
    cluster, submit, traces, world, tmp_path, capsys, killed
):
    """A trainer rank dies, if `killed`: the run restarts. A more important job comes: this one saves, is queued and
    resumes. With one that is killed there are two trainers and two engines, otherwise one of each."""
    run, updates, ranks = RunFolder(tmp_path / "run"), 40, 2 if killed else 1
    nodes = 2 * ranks
    changes = {"rollout.max_staleness": 2, "reward.function": "tests.support.rewards:brief", "eval.share": 1}
    arguments = tiny(world, tmp_path, updates=updates, **changes, **{"trainer.pp": ranks, "rollout.engines": ranks})
    job = submit("--restarts", "1", *arguments, options=[f"--nodes={nodes}"])
    eventually(lambda: trained(run) >= 2, 300, lambda: cluster.output(job))
    assert status.main([str(run.folder)]) == 0
    shown = capsys.readouterr().out
    assert all(f"node{n}" in shown for n in range(nodes))
    assert "running, training" in shown and "1 restarts are left" in shown
    traces.watch(of_jobs(cluster))
    if killed:
        os.kill(pid(cluster, "areal_megatron.train"), signal.SIGKILL)
    eventually(lambda: run.incarnation == killed and trained(run) >= 5, 300, lambda: cluster.output(job))
    traces.watch(of_jobs(cluster))

    script = tmp_path / "important.sh"
    script.write_text("#!/bin/sh\nsleep 2\n")
    important = cluster.submit(script, "--partition=high", "--nodes=4", "--exclusive")
    assert cluster.wait(important, timeout_s=200) == "COMPLETED", cluster.output(job)
    assert run.incarnation == killed and 5 <= trained(run) < updates
    assert cluster.wait(job, timeout_s=400) == "COMPLETED", cluster.output(job)

    assert status.main([str(run.folder)]) == 0 and f": done, version {updates} of {updates}" in capsys.readouterr().out
    output = cluster.output(job)
    dead = [rank for rank in range(ranks) if f"trainer-{rank} was killed by SIGKILL" in output]
    assert bool(dead) == killed, output
    assert "queueing the job again" in output and output.count("resuming from") == 1 + killed
    assert not run.faults.exists(), "to make room for another job is no fault"
    lines = [line for line in read_metrics(run) if line["kind"] == "update"]
    assert [line["version"] for line in lines] == list(range(1, updates + 1))
    held_out = [line["accuracy"] for line in read_metrics(run) if line["kind"] == "eval"]
    print("accuracy", [line["accuracy"] for line in lines], "held out", held_out)
    assert sum(line["accuracy"] for line in lines[-4:]) > sum(line["accuracy"] for line in lines[:4]) + 0.4
    assert held_out[-1] > held_out[0]
    assert audit(run) == [] and complete(run)[-1].name == f"version-{updates:06d}"
    assert run.start.version >= 5, "what was trained before the preemption was trained again"
    assert not [p for p in of_jobs(cluster) if name_of(p) != "slurmstepd"]
    traces.check()


@pytest.mark.soak  # five minutes
def test_a_job_that_loses_a_node_goes_on_when_that_is_back(cluster, submit, world, tmp_path):
    """First the node of the only engine, then that of the launcher, whose loss only the other nodes notice."""
    run, updates = RunFolder(tmp_path / "run"), 30
    job = submit(*tiny(world, tmp_path, updates=updates, **{"trainer.pp": 1, "rollout.engines": 1, "machine.slots": 1}))
    for lost in ("node1", "node0"):
        begun = trained(run)
        eventually(lambda: trained(run) >= begun + 3, 300, lambda: cluster.output(job))  # noqa: B023
        cluster.fail(lost)
        cluster.wait(job, ["PENDING"], timeout_s=150)
        cluster.restore(lost)
    assert cluster.wait(job, timeout_s=300) == "COMPLETED", cluster.output(job)
    assert "resuming from" in cluster.output(job) and run.start.version >= 1
    assert run.faults.exists()
    lines = [line for line in read_metrics(run) if line["kind"] == "update"]
    assert [line["version"] for line in lines] == list(range(1, updates + 1)) and audit(run) == []


@pytest.mark.soak
def test_a_job_beside_a_start_by_hand_is_refused_and_goes_on_after_it(cluster, submit, local_run, world, tmp_path):
    """As when a job that waits in the queue is forgotten, and the run is continued by hand."""
    run, arguments = RunFolder(tmp_path / "run"), tiny(world, tmp_path, updates=16, resume="auto")
    by_hand = local_run("run", *arguments, "machine.slots=4", "updates=100000")
    by_hand.wait_for(lambda: trained(run) >= 2)
    job = submit(*arguments)
    assert cluster.wait(job, timeout_s=100) == "FAILED" and len(run.starts()) == 1
    assert f"error: {run.folder} is being run by process {by_hand.process.pid} on" in cluster.output(job)
    run.stop.touch()
    assert by_hand.wait() == 75, by_hand.output
    cluster.run("scontrol", "requeue", job)
    assert cluster.wait(job, timeout_s=300) == "COMPLETED", cluster.output(job)
    assert "resuming from" in cluster.output(job) and audit(run) == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_job_that_loses_a_node_ten_times_ends_by_itself(cluster, submit, world, tmp_path):
    """Loses one of the two trainer nodes or the engine's, at random moments."""
    run, updates = RunFolder(tmp_path / "run"), 80
    job = submit(*tiny(world, tmp_path, updates=updates, **{"rollout.engines": 1}))
    for number in range(10):
        begun = trained(run)
        eventually(lambda: run.incarnation == number and trained(run) >= begun + 2, 300, lambda: cluster.output(job))  # noqa: B023
        time.sleep(random.uniform(0, 3))
        node = random.choice(["node0", "node1", "node2"])
        cluster.fail(node)
        cluster.wait(job, ["PENDING"], timeout_s=150)
        cluster.restore(node)
        print(f"{number + 1}: {node} was lost at version {trained(run)}", flush=True)
    assert cluster.wait(job, timeout_s=600) == "COMPLETED", cluster.output(job)
    lines = [line for line in read_metrics(run) if line["kind"] == "update"]
    assert [line["version"] for line in lines] == list(range(1, updates + 1)) and audit(run) == []


@pytest.mark.soak  # five minutes
def test_a_job_that_loses_a_node_of_engines_goes_on_without_it(cluster, submit, world, tmp_path):
    """Then an engine of another job joins. Neither job leaves anything behind."""
    run = RunFolder(tmp_path / "run")
    changes = {"rollout.max_staleness": 2, "trainer.pp": 1}
    job = submit(*tiny(world, tmp_path, updates=100000, **changes), options=["--nodes=3"])
    eventually(lambda: trained(run) >= 2, 300, lambda: cluster.output(job))
    reached = trained(run)
    cluster.fail("node2")
    eventually(lambda: trained(run) >= reached + 3, 60, lambda: cluster.output(job))  # also if it was being sent to
    eventually(lambda: "the run continues without engine-1" in cluster.output(job), 150, lambda: cluster.output(job))
    reached = trained(run)
    more = cluster.submit(Path("slurm/add_engines.sh"), "--time=60", arguments=[str(run.folder), "--count=1"])
    eventually(lambda: len(engines(run)) == 3 and engines(run)[2].version > reached, 120, lambda: cluster.output(more))
    assert run.incarnation == 0 and [engine.state == "lost" for engine in engines(run)] == [False, True, False]
    assert cluster.state(job) == "RUNNING"
    cluster.run("scancel", job)
    assert cluster.wait(job) == "CANCELLED"
    assert cluster.wait(more, timeout_s=60) == "COMPLETED", cluster.output(more)
    eventually(lambda: not of_jobs(cluster), 20, lambda: str(of_jobs(cluster)))
    cluster.restore("node2")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_served_models_of_a_job_have_nodes_of_their_own_and_are_started_again(cluster, submit, world, tmp_path):
    """A user and a judge, whom a workflow and a reward ask; both are killed, and no answer fails for it."""
    run, model = RunFolder(tmp_path / "run"), world / "model"
    rows = [{"prompt": f"{a}+{a + 1}=", "answer": str(2 * a + 1), "response_tokens": 6} for a in range(10, 99)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "data.train": tmp_path / "rows.jsonl",
        "trainer.pp": 1,
        "rollout.engines": 1,
        "rollout.workflow": "tests.support.served_flows:asks_a_user",
        "rollout.turns": 2,
        "rollout.samples": "individual",
        "rollout.max_new_tokens": 300,  # room for the conversation
        "rollout.max_staleness": 1,
        "served.user.path": model,
        "served.user.max_new_tokens": 16,
        "served.judge.path": model,
        "served.judge.max_new_tokens": 350,
        "reward.function": "tests.support.served_rewards:by_judge",
        "reward.timeout_s": 60,
        "data.eval": "",
    }
    job = submit("--restarts", "2", *tiny(world, tmp_path, updates=6, **changes))
    eventually(lambda: trained(run) >= 2, 900, lambda: cluster.output(job))
    for name in ("user", "judge"):
        os.kill(next(p.pid for p in cluster.processes() if p.environ().get("AREAL_SERVED") == name), signal.SIGKILL)
    assert cluster.wait(job, timeout_s=800) == "COMPLETED", cluster.output(job)
    output = cluster.output(job)
    assert all(f"{name}-0 was killed by SIGKILL" in output for name in ("user", "judge")), output
    lines = [line for line in read_metrics(run) if line["kind"] == "update"]
    assert len(lines) == 6 and run.incarnation == 0
    assert lines[-1]["reward_failures"] == lines[-1]["workflow_failures"] == 0


@pytest.mark.soak
def test_a_heterogeneous_job_that_is_cancelled_leaves_nothing(cluster, submit, traces, world, tmp_path):
    """Trainers and engine have nodes of their own; the engine is on two and loses one of its parts."""
    run = RunFolder(tmp_path / "run")
    options = ["--nodes=2", "--time=60", ":", "--nodes=2"]
    changes = {"rollout.tp": 2, "rollout.engines": 1, "rollout.max_staleness": 1}
    job = submit("--restarts", "1", *tiny(world, tmp_path, updates=100000, held_out=1, **changes), options=options)
    eventually(lambda: trained(run) >= 2, 200, lambda: cluster.output(job))
    nodes = {process.name: process.node for process in read_record(run).processes}
    assert nodes == {
        "controller": "node0",
        "trainer-0": "node0",
        "trainer-1": "node1",
        "engine-0": "node2",
        "engine-0.1": "node3",
    }
    traces.watch(of_jobs(cluster))
    part, reached = psutil.Process(pid(cluster, "--headless")), trained(run)
    assert part.environ()["SLURMD_NODENAME"] == "node3"
    part.kill()
    eventually(lambda: engines(run)[0].losses == 1, 60, lambda: cluster.output(job))
    eventually(lambda: trained(run) >= reached + 4, 200, lambda: cluster.output(job))
    assert "engine-0.1 was killed by SIGKILL" in cluster.output(job) and run.incarnation == 0
    traces.watch(of_jobs(cluster))
    cluster.run("scancel", job)
    assert cluster.wait(job) == "CANCELLED"
    eventually(lambda: not of_jobs(cluster), 20, lambda: str(of_jobs(cluster)))
    traces.check()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"trainer.pp": 4}, ["pools need 6 slots", "2 on 2 nodes"]),
        ({"optimiser.lr": 1}, ["optimiser", "optimizer"]),
        ({"model.path": "/nowhere"}, ["model.path", "/nowhere"]),
        ({"machine.host": "ib7"}, ["machine.host", "ib7", "lo"]),
        (
            {"data.train": "$(touch hostile);`touch hostile`"},
            ["$(touch hostile);`touch hostile`: cannot read the dataset"],
        ),
    ],
)
def test_wrong_input_ends_the_job_at_once(cluster, submit, world, tmp_path, overrides, words):
    job = submit(*tiny(world, tmp_path, **overrides), options=["--nodes=2"])
    assert cluster.wait(job) == "FAILED"
    last = [line for line in cluster.output(job).splitlines() if line.startswith("error: ")]
    assert len(last) == 1 and all(word in last[0] for word in words), cluster.output(job)
    assert "ExitCode=2:0" in cluster.run("scontrol", "show", "job", job)
    assert not list(tmp_path.iterdir()) and not (ROOT / "hostile").exists()


def test_a_dry_run_in_a_job_asks_its_nodes_and_starts_nothing(cluster, submit, world, tmp_path):
    job = submit(*tiny(world, tmp_path), "--dry-run")
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    placed = [line.split() for line in cluster.output(job).splitlines() if line.startswith(("trainer-", "engine-"))]
    assert [(line[0], line[2]) for line in placed] == [
        ("trainer-0", "node0:0"),
        ("trainer-1", "node1:0"),
        ("engine-0", "node2:0"),
        ("engine-1", "node3:0"),
    ]
    assert f"would start {tmp_path / 'run'}, a new run:\n  1 controller:" in cluster.output(job)
    assert not (tmp_path / "run").exists() and not of_jobs(cluster)


@pytest.mark.soak
def test_a_run_is_submitted_from_a_folder_without_a_checkout(cluster, world, tmp_path, monkeypatch, capsys):
    """As an installed package does it: the job is what the scripts in slurm/ ask for, and trains."""
    for name, value in {**cluster.environment, "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    changes = {"trainer.pp": 1, "rollout.engines": 1, "machine.host": "lo", "name": "my run", "runs_dir": "runs"}
    keys = tiny(world, tmp_path, updates=2, held_out=1, **changes)
    flags = ["--nodes=2", "--gpus=8", "--time=60", "--partition=main", '--sbatch=--comment=it\'s "mine" # all']
    assert submitting.main([str(ROOT / "configs" / "tiny_cpu.yaml"), *keys, *flags]) == 0
    said = capsys.readouterr().out
    job = re.fullmatch(r"submitted job (\d+): its output is slurm-\1\.out, .*areal status 'runs/my run'\n", said)[1]
    shown = cluster.run("scontrol", "show", "job", job)
    log = tmp_path / f"slurm-{job}.out"
    assert cluster.wait(job, timeout_s=400) == "COMPLETED", log.read_text()
    run = RunFolder(tmp_path / "runs" / "my run")
    assert trained(run) == 2 and audit(run) == []
    assert {process.node for process in read_record(run).processes} == {"node0", "node1"}
    for line in ("JobName=my run", "NumNodes=2", "Requeue=1", "TimeLimit=01:00:00", "OverSubscribe=NO"):
        assert line in shown
    assert re.search("TresPerNode=gres.gpu.8", shown)
    assert f"WorkDir={tmp_path}" in shown and 'Comment=it\'s "mine" # all' in shown


def test_what_slurm_refuses_is_one_line(cluster, world, tmp_path, monkeypatch, capsys):
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    keys = tiny(world, tmp_path, **{"trainer.pp": 1, "machine.host": "lo"})
    flags = ["--nodes=3", "--gpus=8", "--partition=nosuch"]
    assert submitting.main([str(ROOT / "configs" / "tiny_cpu.yaml"), *keys, *flags]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and message.startswith("error: sbatch refuses the job: ") and "nosuch" in message


def test_outside_a_job_it_says_what_to_do(capsys):
    assert slurm.main(["configs/tiny_cpu.yaml"]) == 2
    assert "sbatch slurm/train_32b.sh" in capsys.readouterr().err


def test_a_node_list_that_slurm_does_not_know(cluster, monkeypatch, capsys):
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[0-")
    assert slurm.main(["configs/tiny_cpu.yaml"]) == 2
    assert "'node[0-' is malformed" in capsys.readouterr().err
    assert slurm.expand("node[2-3,11]") == ["node2", "node3", "node11"]


def test_loopback_is_refused_on_several_machines():
    found = [NodeHello(f"node{n}", [], 0, 1, machine=str(n)) for n in range(2)]
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1 is a loopback address and the job has 2 nodes"):
        check_network(Config().machine.host, {hello.machine for hello in found})
    check_network(Config().machine.host, {found[0].machine})
