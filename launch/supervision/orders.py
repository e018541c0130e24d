"""The messages between launchers and supervisors, a JSON object each, and how an order starts a process.

A launcher addresses a supervisor by its name, the node's or the MPI slot's. No shell reads any part of an order.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from areal_megatron.checkpoint import peft
from areal_megatron.config import SERVED, Config
from areal_megatron.engine import adapters
from areal_megatron.engine.adapters import Named
from areal_megatron.engine.environment import ADAPTERS, CPUS, GPU_SHARE, KV_CACHE_BYTES, PART, RENDEZVOUS, SERVED_MODEL
from areal_megatron.launch.supervision import caches, gpus
from areal_megatron.launch.supervision.gpus import VISIBLE
from areal_megatron.launch.supervision.processes import Child, Children
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.planning.memory.parts import GpuShares
from areal_megatron.planning.pools import Process
from areal_megatron.run import gpu_settings
from areal_megatron.run.folder import RunFolder
from areal_megatron.run.network import Site
from areal_megatron.run.process_names import is_server

MODULES = {
    "controller": "areal_megatron.controller.controller",
    "trainer": "areal_megatron.train",
    "rollout": "areal_megatron.engine.server",
} | dict.fromkeys(SERVED, "areal_megatron.engine.served")
"""Pool → the module that its processes run."""
ON_CPU = {
    VISIBLE: "",  # torch and vLLM would take a GPU if they saw one
    "OMP_NUM_THREADS": "1",
    "THP_MEM_ALLOC_ENABLE": "1",  # huge pages: training is a sixth faster, a commit takes half the time
    # copies of a mebibyte and more bypass the caches: a commit pauses for two thirds as long
    "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x100000",
}
"""Environment of trainer ranks and engines on CPU."""
_MOST_THREADS = 8
"""Most OpenMP threads of a trainer rank on a GPU, and compiling processes: its cores only pack batches and write
checkpoints."""
_MPI_VARIABLES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "MPI_")


class StartOrder(msgspec.Struct, tag=True):
    """Makes a supervisor start a process of the run."""

    supervisor: str
    name: str
    command: list[str]
    settings: dict[str, str]
    """Environment variables, in addition to the supervisor's own."""
    log: str
    cores: list[int]
    """Cores to pin the process to, as indices into the supervisor's own, modulo their number; empty: do not pin it."""


class End(msgspec.Struct, tag=True):
    """Makes a supervisor end a process, which gets little time to end by itself, and its descendants. Answer: Ended."""

    supervisor: str
    name: str


class EndAll(msgspec.Struct, tag=True):
    """Makes every supervisor end its processes. Answers: Ended for each of them, then Cleared."""

    keep: list[str] = []
    """Names of the processes that stay alive."""


class Present(msgspec.Struct, tag=True):
    """Tells every supervisor, now and then, that the launcher is alive."""


class Leave(msgspec.Struct, tag=True):
    """Makes every supervisor end its processes and itself."""


class NodeHello(msgspec.Struct, tag=True):
    """A supervisor's first event: what its node has."""

    supervisor: str
    gpus: list[int | str]
    """Their numbers or names, as in CUDA_VISIBLE_DEVICES."""
    gpu_gib: float
    """Memory of the smallest GPU in GiB; 0 if unknown."""
    cpus: int
    machine: str
    """An id of the machine: several nodes may be virtual ones of the same machine."""
    node: str = ""
    """Name of the node, where a node has several supervisors."""
    pool: str = ""
    """`trainer` or `rollout` where the pools have nodes of their own."""
    uuids: list[str] = []
    """The UUID of each GPU, empty if unknown: in a cgroup of its own a supervisor may call another GPU 0 than others
    do."""
    files: int = 0
    """How many files a process may have open there; 0 if unknown."""


class Ended(msgspec.Struct, tag=True):
    """A process has ended."""

    supervisor: str
    name: str
    code: int
    """Exit code; negative if that signal ended the process."""
    out_of_memory: bool = False
    """Whether it was killed while the node's kernel was short of memory."""


class Cleared(msgspec.Struct, tag=True):
    """The supervisor has carried out EndAll."""

    supervisor: str


class Alive(msgspec.Struct, tag=True):
    """Now and then: the supervisor is alive."""

    supervisor: str


Order = StartOrder | End | EndAll | Present | Leave
Event = NodeHello | Ended | Cleared | Alive


def start_order(
    config: Config,
    run: RunFolder,
    process: Process,
    supervisor: str,
    python: Sequence[str] = (),
    rendezvous: str = "",
    shares: GpuShares | None = None,
    site: Site | None = None,
) -> StartOrder:
    """Returns the order that starts a process of the placement; machine.device must be decided.

    `python`: the command of another interpreter than this one. `rendezvous`: the name by which the parts of an engine
    find each other, a new one for every start. `shares`: how the pools divide their GPUs' memory, if they share GPUs.
    `site`: where it is, if it is an engine at another one.
    """
    command = [*(python or [sys.executable]), "-m", MODULES[process.pool], "--run", str(run.folder)]
    if process.pool == "rollout":  # engines live on while the others are started again
        command += ["--lease", str(run.lease)]
    else:
        command += ["--incarnation", str(run.incarnation)]
    if process.pool != "controller":
        command += ["--index", str(process.index)]
    settings = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a crash in a library's own code leaves the stacks of all threads in the log
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if site:
        settings |= site.settings
    if process.pool in SERVED:
        settings[SERVED_MODEL] = process.pool
    if named := _adapters(config, process) if site is None else []:
        settings[ADAPTERS] = adapters.told(named)
    if process.of > 1:
        settings |= {PART: f"{process.part}/{process.of}", RENDEZVOUS: rendezvous}
    cores: list[int] = []
    if config.machine.device == "cuda":
        settings[VISIBLE] = ",".join(str(slot.id) for slot in process.slots)
        settings |= gpu_settings.SETTINGS
        if shares and process.pool == "trainer":
            most = f"per_process_memory_fraction:{shares.trainer:.4f}"
            settings["PYTORCH_ALLOC_CONF"] = f"expandable_segments:True,{most}"
        if shares and process.pool == "rollout":
            settings |= {GPU_SHARE: f"{shares.engine:.4f}", KV_CACHE_BYTES: str(shares.kv_cache)}
    elif process.slots:
        settings |= ON_CPU
        cores = [int(slot.id) for slot in process.slots]
    return StartOrder(supervisor, process.name, command, settings, str(run.log(process.name)), cores)


def _adapters(config: Config, process: Process) -> list[Named]:
    """The adapters in files that a process serves. Raises ConfigError."""
    models = config.lodgers if process.pool == "rollout" else config.served_models
    names = [name for name in models if process.pool in (name, "rollout") and models[name].adapter]
    base = {name: architecture(read_config(models[name].path)) for name in names}
    folders = {name: Path(models[name].adapter) for name in names}
    return [Named(name, str(folders[name]), peft.for_engines(folders[name], base[name])) for name in names]


def carry_out(order: StartOrder, children: Children) -> Child:
    """Starts the process as one of `children`, if that can be done."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_MPI_VARIABLES)}
    environment = own | {"PYTHONUTF8": "1"} | order.settings  # torch and vLLM end in a locale that is not UTF-8
    here, cores = sorted(os.sched_getaffinity(0)), set()
    if order.cores:
        pinned = [here[core % len(here)] for core in order.cores]  # machine.slots may exceed the cores
        cores = set() if is_server(order.name) else set(pinned)  # what computes in a server stays there (plugin.py)
        environment[CPUS] = ",".join(map(str, pinned))
    elif order.settings.get(VISIBLE):
        names = gpus.read(order.settings[VISIBLE])
        share = max(1, len(here) * len(names) // max(len(gpus.visible()), len(names)))
        environment = _on_gpus(order.name, own, share) | environment
        near = gpus.near_cores(names) & set(here)
        cores = near if len(near) >= share else set()  # a job that has few of those cores needs its others too
    return children.start(order.name, order.command, environment, Path(order.log), cores)


def _on_gpus(name: str, own: Mapping[str, str], cores: int) -> dict[str, str]:
    """The settings of a process that computes on GPUs and has `cores` cores of its node. Settings in the supervisor's
    environment `own` take precedence."""
    settings = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | caches.settings()  # numbers mean what they do for nvidia-smi
    if not is_server(name):  # vLLM chooses these for itself
        settings["OMP_NUM_THREADS"] = str(min(cores, _MOST_THREADS))
        # each rank would start a compiling process for each core of the node, up to 32
        settings["TORCHINDUCTOR_COMPILE_THREADS"] = settings["OMP_NUM_THREADS"]
        if "PYTORCH_CUDA_ALLOC_CONF" not in own:  # the older name of the same
            # otherwise micro-batches of varying length fragment the allocator
            settings["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return settings
