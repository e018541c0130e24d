"""`python -m areal_megatron.launch.ranks` under plain rank variables: processes that stand for nodes."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_megatron.checkpoint.folder import complete
from areal_megatron.config import ConfigError
from areal_megatron.launch.ranks import Rank
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.programs.audit import audit
from areal_megatron.run.folder import RunFolder
from tests.e2e.test_run import small
from tests.support.traces import Traces

ROOT = Path(__file__).parents[2]


class Job:
    """The processes of a job, each with its output in a file, as a starter makes them that knows no more."""

    def __init__(self, folder: Path, world: int, *overrides: str, worlds: dict[int, int] | None = None):
        self.traces = Traces(folder.parent)
        self.outputs = [folder.with_name(f"{folder.name}-rank-{rank}.out") for rank in range(world)]
        command = [
            sys.executable,
            "-m",
            "areal_megatron.launch.ranks",
            "configs/tiny_cpu.yaml",
            f"name={folder.name}",
            f"runs_dir={folder.parent}",
            "machine.slots=1",
            "machine.silence_s=30",
            *overrides,
        ]
        self.processes = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ
                | {"RANK": str(rank), "WORLD_SIZE": str((worlds or {}).get(rank, world)), "OMP_NUM_THREADS": "1"}
                | {"TMPDIR": str(self.traces.temporary)},
                stdin=subprocess.DEVNULL,
                stdout=output.open("wb"),
                stderr=subprocess.STDOUT,
            )
            for rank, output in enumerate(self.outputs)
        ]

    @property
    def said(self) -> list[str]:
        return [output.read_text() for output in self.outputs]

    def ended(self, timeout_s: float = 300) -> list[int]:
        """The exit codes."""
        deadline = time.monotonic() + timeout_s
        return [process.wait(max(1, deadline - time.monotonic())) for process in self.processes]

    def wait_for(self, condition, timeout_s: float = 300) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline and all(p.poll() is None for p in self.processes), self.said
            time.sleep(0.1)


@pytest.fixture
def job(tmp_path):
    jobs = []

    def start(name: str, world: int, *overrides: str, **settings) -> Job:
        jobs.append(Job(tmp_path / name, world, *overrides, **settings))
        return jobs[-1]

    yield start
    for one in jobs:
        for process in one.processes:
            process.kill() if process.poll() is None else None
            process.wait(30)
        one.traces.check()


def updates(run: RunFolder) -> list[int]:
    return [line["version"] for line in read_metrics(run) if line["kind"] == "update"]


def settings_of(world, trainers: int) -> list[str]:
    changes = {"held_out": 4, "checkpoint.every": 2, "trainer.pp": trainers, "resume": "auto", "updates": 1000}
    return [*small(world, **changes), "rollout.engines=1"]


@pytest.mark.timeout(900)
def test_sigterm_to_any_rank_stops_the_run_with_a_checkpoint(job, world, of_family, tmp_path):
    """It trains a DeepSeek-V3."""
    run = RunFolder(tmp_path / "run")
    started = job("run", 2, *settings_of(world, 1), f"model.path={of_family('deepseek_v3')}")
    started.wait_for(lambda: run.metrics.exists() and updates(run))
    started.processes[1].send_signal(signal.SIGTERM)  # as to the pod of one node
    assert started.ended() == [75] * 2, started.said
    stopped_at = updates(run)[-1]
    assert complete(run)[-1].name == f"version-{stopped_at:06d}"
    assert updates(run) == list(range(1, stopped_at + 1)) and audit(run) == []
    assert not (run.folder / "ranks.json").exists()


@pytest.mark.soak  # jobs of MPI and Slurm go on in theirs, by the same code
@pytest.mark.timeout(1800)
def test_four_nodes_lose_one_and_go_on(job, world, tmp_path):
    run, settings = RunFolder(tmp_path / "run"), settings_of(world, 2)
    first = job("run", 4, *settings)
    first.wait_for(lambda: run.metrics.exists() and len(updates(run)) > 3)
    victim = int(re.search(r"trainer-1\s+trainer\s+rank-(\d)", first.said[0])[1])
    first.processes[victim].kill()  # with all that it has started
    codes = first.ended()
    del codes[victim]
    # a trainer rank that has lost another says so before the node's silence does
    assert codes in ([1] * 3, [3] * 3), first.said
    saved = int(complete(run)[-1].name.removeprefix("version-"))
    second = job("run", 4, *settings, f"updates={saved + 2}")
    assert second.ended() == [0] * 4, second.said
    assert updates(run) == list(range(1, saved + 3)) and audit(run) == []
    assert "resuming from" in second.said[0] and not (run.folder / "ranks.json").exists()


def test_ranks_that_disagree_and_wrong_input_are_one_line_on_every_rank(job, world, tmp_path):
    alone = job("alone", 2, *small(world), "machine.gather_s=20", worlds={0: 3, 1: 3})  # it waits beside what follows
    wrong = job("wrong", 2, *small(world), worlds={1: 3})
    wrong.processes[1].wait(120)
    assert "error: rank 1 has WORLD_SIZE=3, and rank 0 has WORLD_SIZE=2" in wrong.said[1]
    wrong.processes[0].send_signal(signal.SIGTERM)  # before there is a run
    assert wrong.processes[0].wait(60) == 75 and not (tmp_path / "wrong").exists()

    nowhere = job("nowhere", 1, *small(world), "machine.host=192.0.2.1")
    assert nowhere.ended(120) == [2] and "error: machine.host=192.0.2.1: cannot listen on" in nowhere.said[0]

    refused = job("refused", 2, *small(world, **{"trainer.pp": 4}))
    assert refused.ended(120) == [2, 2], refused.said
    assert refused.said[0].count("error: ") == 1 and "error: rank 0 says: " in refused.said[1]
    assert not (tmp_path / "refused").exists()

    run = RunFolder(tmp_path / "there")
    run.create()
    run.begin()
    there = job("there", 2, *small(world))
    assert there.ended(120) == [2, 2], there.said
    assert all(said.count("error: ") == 1 and f"{run.folder} exists: choose" in said for said in there.said), there.said

    assert alone.ended(120) == [3, 3], alone.said
    assert all("1 of 3 nodes did not answer within 20 s: rank-2" in said for said in alone.said), alone.said


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({}, "RANK=: areal_megatron.launch.ranks needs RANK and WORLD_SIZE"),
        ({"RANK": "0"}, "WORLD_SIZE=: "),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1: "),
        ({"RANK": "0", "WORLD_SIZE": "100000000"}, "WORLD_SIZE=100000000: "),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
        ({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}, "start one process a node"),
    ],
)
def test_variables_that_are_missing_or_wrong_are_one_line(variables, problem):
    with pytest.raises(ConfigError, match=problem):
        Rank.of(variables)
