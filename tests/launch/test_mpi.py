"""`mpirun -n W python -m areal_megatron.launch.mpi`: the same config over MPI slots, with Debian's Open MPI."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from areal_megatron.config import Config, ConfigError
from areal_megatron.launch.mpi import slots
from areal_megatron.launch.supervision.orders import NodeHello
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.programs.audit import audit
from areal_megatron.run.folder import RunFolder
from tests.e2e.test_run import small
from tests.support import debian
from tests.support.living import command_of, left_over
from tests.support.traces import Traces

ROOT = Path(__file__).parents[2]


class MpiRun:
    """areal_megatron.launch.mpi under mpirun, with its output in a file."""

    def __init__(self, folder: Path, count: int, *overrides: str):
        self._output = folder.with_suffix(".out")
        program = debian.openmpi().program("mpirun")
        command = [
            program,
            "-n",
            str(count),
            sys.executable,
            "-m",
            "areal_megatron.launch.mpi",
            "configs/tiny_cpu.yaml",
            f"name={folder.name}",
            f"runs_dir={folder.parent}",
            *overrides,
        ]
        self.traces = Traces(folder.parent)
        environment = debian.mpi_environment(os.environ | {"TMPDIR": str(self.traces.temporary)})
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output.open("wb"),
            stderr=subprocess.STDOUT,
        )

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def members(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def mpi_run(tmp_path):
    runs = []

    def start(name: str, count: int, *overrides: str) -> MpiRun:
        runs.append(MpiRun(tmp_path / name, count, *overrides))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.wait(60)
        run.traces.check()


@pytest.mark.timeout(900)
def test_trains_over_two_pools_and_a_dead_child_does_not_abort_the_world(mpi_run, world, of_family, tmp_path):
    """A trainer rank of a Qwen3.5 is killed; the slots stay, restart everything, and the run ends as if nothing had
    happened."""
    changes = {"updates": 6, "checkpoint.every": 1, "trainer.pp": 2, "held_out": 4, "rollout.max_staleness": 2}
    changes |= {"model.path": of_family("qwen3_5"), "model.dtype": "bfloat16"}
    marked = f"--python=rollout=env OWN_PYTHON=engines {sys.executable}"
    started, run = mpi_run("run", 3, "--restarts=1", marked, *small(world, **changes)), RunFolder(tmp_path / "run")
    deadline = time.monotonic() + 300
    while not run.metrics.exists() or sum(line["kind"] == "update" for line in read_metrics(run)) < 2:
        assert started.process.poll() is None and time.monotonic() < deadline, started.output
        time.sleep(0.1)
    members = started.members
    started.traces.watch(members)
    victim = next(p for p in members if "areal_megatron.train" in command_of(p) and command_of(p)[-1] == "1")
    assert not [name for name in victim.environ() if name.startswith(("OMPI_", "PMIX_"))]
    engine = next(p for p in members if "--max-num-seqs" in command_of(p))
    assert engine.environ()["OWN_PYTHON"] == "engines" and "OWN_PYTHON" not in victim.environ()
    victim.send_signal(signal.SIGKILL)
    assert started.process.wait(400) == 0, started.output
    assert "trainer-1 was killed by SIGKILL" in started.output and "resuming from" in started.output
    assert [line["version"] for line in read_metrics(run) if line["kind"] == "update"] == list(range(1, 7))
    assert audit(run) == []
    assert not left_over(members)


def test_too_few_slots_and_wrong_input_are_one_line(mpi_run, world):
    for overrides, words in (({"trainer.pp": 2}, "but there are 2"), ({"rollout.engines": 0}, "at least 1")):
        started = mpi_run("refused", 2, *small(world, **overrides))
        assert started.process.wait(60) == 2
        errors = [line for line in started.output.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and words in errors[0], started.output


WAITS_FOR_ITS_LOG = """
import os, sys, time
from mpi4py import MPI
from areal_megatron.launch.supervision.hosts import Nodes
from areal_megatron.launch.mpi import Messages, MpiChannel, follow
from areal_megatron.launch.supervision.node import hello
from areal_megatron.launch.supervision.orders import StartOrder
world, log = Messages(MPI.COMM_WORLD), sys.argv[1]
if world.rank:
    follow(world, hello("1"))
    sys.exit()
silence_s, begin = 6, time.monotonic()
with Nodes(MpiChannel(world, hello("0")), silence_s) as nodes:
    nodes.gather(["0", "1"], 60)
    nodes.start(StartOrder("1", "child", [sys.executable, "-c", "print('started')"], {}, log, []))
    while time.monotonic() < begin + 1.5 * silence_s:
        nodes.refresh()
        time.sleep(0.05)
    assert nodes.by_name["child"].exit_code is None
    with open(log) as file:
        while nodes.by_name["child"].exit_code is None:
            nodes.refresh()
            time.sleep(0.05)
        print("read", file.read())
"""


def test_a_slot_that_waits_for_its_folder_is_not_lost_and_goes_on(tmp_path):
    """To open a pipe that nobody reads takes as long as to open a file of a server that does not answer."""
    os.mkfifo(tmp_path / "log")
    command = [debian.openmpi().program("mpirun"), "-n", "2", sys.executable, "-c", WAITS_FOR_ITS_LOG, tmp_path / "log"]
    environment = debian.mpi_environment(os.environ | {"TMPDIR": "/tmp"})
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and "read started" in done.stdout, done.stderr


def test_slots_of_nodes():
    config = Config()
    config.machine.device = "cuda"
    found = [NodeHello(str(rank), [4, 5, 6], 80, 8, "m", node="ab"[rank % 2]) for rank in range(5)]
    nodes, places = slots(found, config)
    assert [(node.name, node.slots) for node in nodes] == [("a", (4, 5, 6)), ("b", (4, 5))]
    assert places["a", 6] == "4" and places["b", 4] == "1" and places["b", None] == "1"
    with pytest.raises(ConfigError, match="node a has 4 MPI processes and 3 GPUs"):
        slots([*found, NodeHello("5", [4, 5, 6], 80, 8, "m", node="a")], config)


def per_task(*gpus, uuids=()):
    """Slots of a node whose MPI processes see a list of GPUs each, and the config."""
    config = Config()
    config.machine.device = "cuda"
    uuids = uuids or [[""] * len(own) for own in gpus]
    found = [
        NodeHello(str(rank), own, 80, 8, "m", node="a", uuids=named)
        for rank, (own, named) in enumerate(zip(gpus, uuids, strict=True))
    ]
    return found, config


def test_processes_that_see_a_gpu_each_share_them_as_a_node():
    (node,), places = slots(*per_task([2], [0], ["MIG-1"]))
    assert node.slots == (2, 0, "MIG-1")
    assert [places["a", slot] for slot in node.slots] == ["0", "1", "2"]
    (node,), places = slots(*per_task([0, 1], [2, 3]))
    assert node.slots == (0, 2) and places["a", 2] == "1"
    with pytest.raises(ConfigError, match="node a has 3 MPI processes and 2 GPUs"):
        slots(*per_task([0], [1], [0]))
    with pytest.raises(ConfigError, match="node a has 2 MPI processes and 1 GPUs"):
        slots(*per_task([0], [0]))


def test_gpus_that_every_process_calls_0_go_by_their_uuids():
    found, config = per_task([0], [0], uuids=[["GPU-b"], ["GPU-a"]])
    (node,), places = slots(found, config)
    assert node.slots == ("GPU-b", "GPU-a") and places["a", "GPU-a"] == "1"
    config.rollout.tp = 2
    with pytest.raises(ConfigError, match=r"rollout.tp: an engine takes 2 GPUs, but each .* of node a may open one"):
        slots(found, config)
    (node,), _ = slots(*per_task([0, 1], [0, 1], uuids=[["GPU-a", "GPU-b"]] * 2))
    assert node.slots == (0, 1)


A_GPU_EACH = """
import os, sys, time
from mpi4py import MPI
from areal_megatron.config import Config, DataConfig, ModelConfig
from areal_megatron.run.folder import RunFolder
from areal_megatron.launch.supervision.hosts import Nodes
from areal_megatron.launch.mpi import Messages, MpiChannel, _slot, follow, slots
from areal_megatron.launch.supervision.node import hello
from areal_megatron.launch.supervision.orders import start_order
from areal_megatron.planning.pools import allocate
world, folder = Messages(MPI.COMM_WORLD), sys.argv[1]
os.environ["CUDA_VISIBLE_DEVICES"] = str(5 + world.rank)
own = hello(str(world.rank))
own.node = "a"
if world.rank:
    follow(world, own)
    sys.exit()
config = Config(name="x", updates=1, model=ModelConfig(path="m"), data=DataConfig(train="t"))
config.machine.device = "cuda"
run = RunFolder(folder)
run.create()
with Nodes(MpiChannel(world, own), 30, lambda process: places[_slot(process)]) as nodes:
    machines, places = slots(nodes.gather(["0", "1"], 60), config)
    for process in allocate(config, machines).processes[1:]:
        order = start_order(config, run, process, nodes.supervisor(process))
        order.command = ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
        nodes.start(order)
        while nodes.by_name[process.name].exit_code is None:
            nodes.refresh()
            time.sleep(0.05)
        print(process.name, "by", order.supervisor, "on", nodes.by_name[process.name].last_lines())
"""


def test_with_one_visible_gpu_a_process_the_pools_take_all_of_them(tmp_path):
    """As with --gpus-per-task=1, where no process sees the GPUs of the others."""
    command = [debian.openmpi().program("mpirun"), "-n", "2", sys.executable, "-c", A_GPU_EACH, tmp_path / "run"]
    environment = debian.mpi_environment(os.environ | {"TMPDIR": "/tmp"})
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["trainer-0 by 0 on 5", "engine-0 by 1 on 6"]


def test_a_dry_run_asks_the_mpi_processes_and_starts_nothing(mpi_run, world, tmp_path):
    run = mpi_run("run", 2, *small(world), "--dry-run")
    assert run.process.wait(60) == 0, run.output
    assert re.search(r"trainer-0 +trainer +\S+:0\nengine-0 +rollout +\S+:1\n", run.output)
    assert f"would start {tmp_path / 'run'}, a new run:" in run.output and not (tmp_path / "run").exists()
