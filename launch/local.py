"""Runs everything on this machine: `python -m launch.local CONFIG [key=value …] [--dry-run]`.

Allocates the pools, starts controller, engines and trainer ranks side by side, shows progress and ends
all of them when one fails or at Ctrl-C. Exit code 0: done, 1: a process failed, 2: wrong input,
130: interrupted. Imports neither torch nor vllm.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from areal_megatron import checkpoint_folder
from areal_megatron import config as configuration
from areal_megatron.checkpoint_folder import Checkpoint
from areal_megatron.config import Config, ConfigError
from areal_megatron.data.prompts import check_data
from areal_megatron.observe.console import Console
from areal_megatron.reward.function import load_function
from areal_megatron.run import Run
from launch.plan import plan
from launch.pools import Node, Placement, Process
from launch.processes import Child, Children

_POLL_S = 0.1
_MODULES = {"controller": "areal_megatron.rollout.controller", "rollout": "areal_megatron.rollout.engine"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.local", description=__doc__.split("\n")[0])
    parser.add_argument("config", help="YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the config")
    parser.add_argument(
        "--dry-run", action="store_true", help="print who gets which slots and how much memory; start nothing"
    )
    options = parser.parse_intermixed_args(arguments)
    try:
        config = configuration.load(options.config, options.overrides)
        config.machine.device = _device(config)
        outcome = plan(config, [_node(config)], gpu_gib=_gpu_gib() if config.machine.device == "cuda" else 0)
        check_data(config)
        if config.mode == "rl":
            load_function(config.reward.function)
        run = Run(config.run_dir)
        checkpoint = _resumed(config, run)
        if not options.dry_run and run.folder.exists() and not config.resume:
            raise ConfigError(f"{config.run_dir} exists: choose another name=…, go on with resume=auto, or remove it")
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    if options.dry_run:
        print(outcome.table())
        return 0
    if not run.folder.exists():
        run.create()
    configuration.save(config, run.config)
    if checkpoint:
        print(f"resuming from {checkpoint.folder}, policy version {checkpoint.version}")
        run.begin(version=checkpoint.version, batches=checkpoint.batches, checkpoint=str(checkpoint.folder),
                  after=checkpoint.incarnation if checkpoint.folder.parent == run.checkpoints else None)  # fmt: skip
    else:
        run.begin()
    return _supervise(config, run, outcome.placement)


def _resumed(config: Config, run: Run) -> Checkpoint | None:
    """The checkpoint that `resume` names; None: from the start. Raises ConfigError."""
    if not config.resume:
        return None
    if config.resume != "auto":
        return checkpoint_folder.read(Path(config.resume).absolute())
    checkpoint, problems = checkpoint_folder.newest(run)
    for problem in problems:
        print(f"warning: {problem}; going on from the one before", file=sys.stderr)
    if problems and not checkpoint:
        raise ConfigError(f"resume: no checkpoint in {run.checkpoints} is whole")
    return checkpoint


def _supervise(config: Config, run: Run, placement: Placement) -> int:
    """Starts the processes, watches them until the run is over, and leaves none behind."""
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(run, config)
    failure = None
    try:
        with Children() as children:
            for process in placement.processes:
                _start(config, run, process, children)
            processes = children.by_name
            while not (failure := _failure(processes)) and not _finished(processes):
                console.refresh()
                time.sleep(_POLL_S)
    except KeyboardInterrupt:
        print("interrupted: all processes of the run have been ended", file=sys.stderr)
        return 130
    finally:
        console.close()
    if failure:
        print(_describe(failure), file=sys.stderr)
        return 1
    print(console.summary())
    return 0


def _start(config: Config, run: Run, process: Process, children: Children) -> None:
    module = _MODULES.get(process.pool) or ("areal_megatron.train" if config.mode == "rl" else "areal_megatron.sft")
    command = [sys.executable, "-m", module, "--run", str(run.folder)]
    if process.pool != "controller":
        command += ["--index", str(process.index)]
    environment = dict(os.environ, PYTHONUNBUFFERED="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    if ipaddress.ip_address(config.machine.host).is_loopback:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    cores: set[int] = set()
    if config.machine.device == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(s.index) for s in process.slots)
        if process.pool == "trainer":
            environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron overlaps tp communication only in this order
    elif process.slots:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # torch and vLLM would take a GPU if they saw one
        here = sorted(os.sched_getaffinity(0))
        own = [here[slot.index % len(here)] for slot in process.slots]  # machine.slots may exceed the cores
        cores = set(own)
        environment["AREAL_CPUS"] = ",".join(map(str, own))
        environment["OMP_NUM_THREADS"] = "1"
    children.start(process.name, command, environment, run.log(process.name), cores)


def _failure(children: dict[str, Child]) -> Child | None:
    """The child that ended before it should have, if any; one ended by a signal before one that noticed it."""
    controller = children.get("controller")
    over = controller is not None and controller.exit_code == 0
    ended = [c for c in children.values() if c.exit_code is not None]
    if not any(c.exit_code != 0 or (c.name.startswith("engine-") and not over) for c in ended):
        return None
    time.sleep(3 * _POLL_S)  # a death makes others fail: give them time, so that the first cause is named
    failed = [c for c in children.values() if c.exit_code is not None and c.exit_code != 0]
    failed += [c for c in ended if c.exit_code == 0 and c.name.startswith("engine-") and not over]
    return min(failed, key=lambda c: (c.exit_code >= 0, c.name == "controller", c.last_write))


def _finished(children: dict[str, Child]) -> bool:
    return all(c.exit_code == 0 for c in children.values() if not c.name.startswith("engine-"))


def _describe(child: Child) -> str:
    code = child.exit_code
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{child.last_lines()}\nerror: {child.name} {how}; its log: {child.log}"


def _device(config: Config) -> str:
    if config.machine.device != "auto":
        return config.machine.device
    return "cuda" if _gpus() else "cpu"


def _node(config: Config) -> Node:
    found = _gpus() if config.machine.device == "cuda" else list(range(len(os.sched_getaffinity(0))))
    if config.machine.device == "cuda" and config.machine.slots > len(found):
        raise ConfigError(f"machine.slots={config.machine.slots} but this machine has {len(found)} GPUs")
    indices = (
        range(config.machine.slots) if config.machine.slots > len(found) else found[: config.machine.slots or None]
    )
    return Node("localhost", tuple(indices))


def _gpus() -> list[int]:
    """GPU numbers that this process may use, found without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [int(v) for v in visible.split(",") if v.strip().isdigit()]
    folder = Path("/proc/driver/nvidia/gpus")
    return list(range(len(list(folder.iterdir())))) if folder.is_dir() else []


def _gpu_gib() -> float:
    """Memory of this machine's smallest GPU in GiB; 0 where the driver's own tool does not say."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return min((int(mebibytes) for mebibytes in found if mebibytes.isdigit()), default=0) / 1024


def _interrupt(*_) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
