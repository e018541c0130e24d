"""Adds engines to a running run, or takes some away: `python -m launch.engines add RUN`, `… drain RUN engine-2`.

`add` starts engines on this machine, as many as its GPUs hold, and looks after them until the run is over, they are
drained, or it is interrupted; as a Slurm job: `sbatch slurm/add_engines.sh RUN`. `drain` lets engines answer the
requests that they have and then leave; the launcher that started them ends them. Exit code 0: the run is over or all
are drained, 1: the engines have failed, 2: wrong input, 130: interrupted. Imports neither torch nor vllm.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from areal_megatron import config_file
from areal_megatron.command import program
from areal_megatron.config import Config, ConfigError
from areal_megatron.observe.metrics import read_status
from areal_megatron.observe.status import EngineState, engines_of
from areal_megatron.run import Run, engine_index, engine_name
from launch import gpus, start
from launch.health import Health
from launch.hosts import Here
from launch.orders import start_order
from launch.pools import Process, Slot
from launch.records import Pulse, read_record, state_of
from launch.supervise import Outcome, describe, interrupt

_POLL_S = 0.5


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=program("launch.engines"), description=__doc__.split("\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    adding = actions.add_parser("add", help="start engines on this machine for the run")
    adding.add_argument("--count", type=int, default=0, help="engines; default: as many as this machine's GPUs hold")
    adding.add_argument(
        "--restarts", type=int, default=10, metavar="N", help="start one that dies again, N times in all"
    )
    start.add_python(adding)
    draining = actions.add_parser("drain", help="have engines leave the run")
    draining.add_argument("--timeout-s", type=float, default=3600, help="longest wait for their last answers")
    for action in (adding, draining):
        action.add_argument("run", type=Path, help="run folder, e.g. runs/tiny")
    draining.add_argument("engines", nargs="+", metavar="engine-E")
    options = parser.parse_args(arguments)
    run = Run(options.run)
    try:
        check_running(run)
        config = config_file.load(run.config)
        if options.action == "add":
            start.check_packages(config, options.python, ["rollout"])
            check_not_shared(run, config)
            return add(run, config, options)
        return drain(run, options.engines, options.timeout_s, config.machine.silence_s)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


def check_running(run: Run) -> None:
    """Raises ConfigError if there is no such run, if others may write its folder, or if it is over."""
    record = read_record(run)
    if record is None:
        raise ConfigError(f"{run.folder} is no run folder; give one such as runs/tiny")
    run.check_private()
    if (state := state_of(run, record)) != "running":
        raise ConfigError(f"{run.folder} is not running: it is {state}")


def check_not_shared(run: Run, config: Config) -> None:
    """Raises ConfigError if the trainers and engines of the run have divided the memory of this machine's GPUs."""
    if not config.shares_gpus:
        return
    record = read_record(run)
    here = {socket.gethostname(), os.environ.get("SLURMD_NODENAME")}
    if here & {record.launcher, *(process.node for process in record.processes)}:
        raise ConfigError(
            "machine.shared: the run's trainers and engines have divided the memory of this machine's GPUs; add "
            "engines on another machine"
        )


def add(run: Run, config: Config, options: argparse.Namespace) -> int:
    """Starts engines, looks after them and returns the exit code. Raises ConfigError if they do not fit."""
    signal.signal(signal.SIGTERM, interrupt)
    try:
        with Here() as here:
            return _Added(run, config, here, options).outcome()
    except KeyboardInterrupt:
        print("interrupted: the engines have been ended", file=sys.stderr)
        return Outcome.INTERRUPTED


class _Added:
    """The engines that one call has added."""

    def __init__(self, run: Run, config: Config, here: Here, options: argparse.Namespace):
        self._run, self._config, self._here = run, config, here
        self._python, self._restarts = options.python.get("rollout", ()), options.restarts
        self._health, self._incarnation, self._lease = Health(run), run.incarnation, run.lease
        groups = slots(config, options.count)
        self._processes = {p.name: p for p in (self._process(own) for own in groups)}
        self._ended: set[str] = set()

    def outcome(self) -> int:
        for name in self._processes:
            self._start(name)
        print(f"started {', '.join(self._processes)} for {self._run.folder}", flush=True)
        pulse = Pulse(self._run, self._config.machine.silence_s)
        while len(self._ended) < len(self._processes):
            if (state := pulse.state()) != "running":
                print(f"the run is over: it is {state}")
                return Outcome.DONE
            with suppress(OSError, ValueError):  # it is read again soon
                if (incarnation := self._run.incarnation) != self._incarnation:
                    self._incarnation = incarnation
                    self._health.begin(self._processes.keys() - self._ended)
                    if (lease := self._run.lease) != self._lease:  # another launcher: its controller has another secret
                        self._lease = lease
                        for name in self._processes.keys() - self._ended:
                            self._start(name)
            for name, why in self._health.to_end().items():
                self._end(name, why)
            for name in self._processes.keys() - self._ended:
                if self._here.by_name[name].exit_code is not None:
                    self._again(name)
            time.sleep(_POLL_S)
        return Outcome.FAILED if self._ended - self._health.drained else Outcome.DONE

    def _process(self, own: list[int | str]) -> Process:
        name, here = claim(self._run, self._config.rollout.engines), socket.gethostname()
        return Process(name, "rollout", engine_index(name), here, tuple(Slot(here, i) for i in own))

    def _start(self, name: str) -> None:
        process = self._processes[name]
        self._here.start(start_order(self._config, self._run, process, self._here.supervisor(process), self._python))
        self._health.started(name)

    def _end(self, name: str, why: str) -> None:
        if name not in self._ended and self._here.by_name[name].exit_code is None:
            print(f"{name} {why}: it is ended", flush=True)
            self._here.kill(self._processes[name])
        if name in self._health.drained:
            self._ended.add(name)

    def _again(self, name: str) -> None:
        print(describe(self._here.by_name[name]), file=sys.stderr, flush=True)
        if self._restarts:
            self._restarts -= 1
            self._start(name)
        else:
            self._ended.add(name)


def slots(config: Config, count: int) -> list[list[int | str]]:
    """Returns this machine's GPUs (or cores) for each of `count` engines; 0: as many as fit. Raises ConfigError."""
    tp, on_gpus = config.rollout.tp, config.machine.device == "cuda"
    found = gpus.visible() if on_gpus else sorted(range(len(os.sched_getaffinity(0))))
    fitting = len(found) // tp
    if (count > fitting and on_gpus) or not fitting:
        kind = "GPUs" if on_gpus else "cores"
        raise ConfigError(
            f"{max(count, 1)} engines of rollout.tp={tp} do not fit the {len(found)} {kind} of this machine"
        )
    return [[found[(n * tp + i) % len(found)] for i in range(tp)] for n in range(count or fitting)]


def claim(run: Run, first: int) -> str:
    """Returns a name that no other engine of the run has or will have. `first`: the least number to try."""
    folder = run.folder / "added"
    folder.mkdir(exist_ok=True)
    index = first
    while True:
        try:
            (folder / engine_name(index)).touch(exist_ok=False)
            return engine_name(index)
        except FileExistsError:
            index += 1


def drain(run: Run, names: list[str], timeout_s: float, silence_s: float) -> int:
    """Asks engines to leave the run, waits until they have, and returns the exit code.

    Raises ConfigError for engines that cannot leave, if the run ends, or if its launcher writes nothing for silence_s.
    """
    states = _states(run)
    if unknown := [name for name in names if name not in states]:
        raise ConfigError(f"{', '.join(unknown)}: no such engine; the run has {', '.join(states) or 'none yet'}")
    if not {name for name, state in states.items() if not state.gone} - set(names):
        raise ConfigError("no engine would be left to generate; stop the run instead")
    for name in names:
        path = run.drain(name)
        path.parent.mkdir(exist_ok=True)
        path.touch()
    pulse, deadline = Pulse(run, silence_s), time.monotonic() + timeout_s
    waiting = set(names)
    while waiting:
        for name in sorted(name for name in waiting if _states(run).get(name) == EngineState.DRAINED):
            print(f"{name} is drained", flush=True)
            waiting.discard(name)
        if waiting and time.monotonic() > deadline:
            print(f"error: {', '.join(sorted(waiting))} still answer after {timeout_s:.0f} s", file=sys.stderr)
            return Outcome.FAILED
        if (state := pulse.state()) != "running":
            raise ConfigError(f"{run.folder} is not running: it is {state}")
        time.sleep(_POLL_S)
    return Outcome.DONE


def _states(run: Run) -> dict[str, EngineState]:
    return {engine.name: engine.state for engine in engines_of(read_status(run))}


if __name__ == "__main__":
    sys.exit(main())
