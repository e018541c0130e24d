"""What launchers and the supervisors of nodes tell each other, a line of JSON each, and how a process is started.

A launcher orders by name of a supervisor: a node, or an MPI slot. Nothing in an order is read by a shell.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from areal_megatron.config import Config
from areal_megatron.engine.environment import CPUS, PART, RENDEZVOUS
from areal_megatron.run import Run
from launch.pools import Process
from launch.processes import Child, Children

_MODULES = {"controller": "areal_megatron.controller.controller", "rollout": "areal_megatron.engine.server"}
ON_CPU = {
    "CUDA_VISIBLE_DEVICES": "",  # torch and vLLM would take a GPU if they saw one
    "OMP_NUM_THREADS": "1",
    "THP_MEM_ALLOC_ENABLE": "1",  # huge pages: training is a sixth faster, a commit takes half the time
    # Copies from a mebibyte on bypass the caches: a commit stands still for two thirds of the time
    # (docs/measurements.md).
    "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x100000",
}
"""Environment of trainer ranks and engines on CPU."""
_OF_MPI = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "MPI_")


class StartOrder(msgspec.Struct, tag=True):
    """One process of the run."""

    supervisor: str
    name: str
    command: list[str]
    settings: dict[str, str]
    """Of its environment, in addition to the supervisor's own."""
    log: str
    cores: list[int]
    """It is pinned to these of the cores that the supervisor has, counted modulo their number; empty: to none."""


class End(msgspec.Struct, tag=True):
    """End one process, which has little time for it, and its descendants; answered with Ended."""

    supervisor: str
    name: str


class EndAll(msgspec.Struct, tag=True):
    """To every supervisor: end your processes; answered with Ended for each and Cleared."""

    keep: list[str] = []
    """Names of those that go on."""


class Present(msgspec.Struct, tag=True):
    """To every supervisor, now and then: the launcher lives."""


class Leave(msgspec.Struct, tag=True):
    """To every supervisor: end your processes and yourself."""


class NodeHello(msgspec.Struct, tag=True):
    """What a supervisor has."""

    supervisor: str
    gpus: list[int]
    gpu_gib: float
    """Of the smallest GPU; 0: not known."""
    cpus: int
    machine: str
    """Different on every machine: nodes may be virtual."""
    node: str = ""
    """Where a node has several supervisors: its name."""
    pool: str = ""
    """`trainer` or `rollout` where the pools have nodes of their own."""


class Ended(msgspec.Struct, tag=True):
    supervisor: str
    name: str
    code: int
    """Negative: ended by that signal."""


class Cleared(msgspec.Struct, tag=True):
    supervisor: str


class Alive(msgspec.Struct, tag=True):
    supervisor: str


Order = StartOrder | End | EndAll | Present | Leave
Event = NodeHello | Ended | Cleared | Alive


def start_order(
    config: Config, run: Run, process: Process, supervisor: str, python: Sequence[str] = (), rendezvous: str = ""
) -> StartOrder:
    """What starts a process of the placement; machine.device is chosen. `python`: how, if not by this interpreter.

    `rendezvous`: the name under which the parts of an engine find each other, of this one start.
    """
    module = _MODULES.get(process.pool) or ("areal_megatron.sft" if config.mode == "sft" else "areal_megatron.train")
    command = [*(python or [sys.executable]), "-m", module, "--run", str(run.folder)]
    if process.pool != "controller":
        command += ["--index", str(process.index)]
    settings = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if process.of > 1:
        settings |= {PART: f"{process.part}/{process.of}", RENDEZVOUS: rendezvous}
    cores: list[int] = []
    if config.machine.device == "cuda":
        settings["CUDA_VISIBLE_DEVICES"] = ",".join(str(s.index) for s in process.slots)
        if process.pool == "trainer":
            settings["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron overlaps tp communication only in this order
    elif process.slots:
        settings |= ON_CPU
        cores = [slot.index for slot in process.slots]
    return StartOrder(supervisor, process.name, command, settings, str(run.log(process.name)), cores)


def carry_out(order: StartOrder, children: Children) -> Child:
    """Starts the process as one of `children`. Raises OSError where its program or log is not there."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_MPI)} | order.settings
    cores: set[int] = set()
    if order.cores:
        here = sorted(os.sched_getaffinity(0))
        own = [here[core % len(here)] for core in order.cores]  # machine.slots may exceed the cores
        cores = set(own)
        environment[CPUS] = ",".join(map(str, own))
    return children.start(order.name, order.command, environment, Path(order.log), cores)
