"""Adds engines to a running run, or takes some away: `areal engines add RUN`, `… drain RUN engine-2`.

`add` starts engines on this machine, as many as its GPUs hold, and looks after them until the run is over, they are
drained, or it is interrupted; as a Slurm job: `sbatch slurm/add_engines.sh RUN`. With `--address` this machine is at
another site (docs/sites.md). `drain` lets engines answer the requests that they have and then leave; the launcher that
started them ends them. Exit code 0: the run is over or all are drained, 1: the engines have failed, 2: wrong input, or
a failure that repeats by itself, 130: interrupted. Imports neither torch nor vllm.
"""

from __future__ import annotations

import argparse
import errno
import ipaddress
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.engine.server import reserve_ports
from areal_megatron.launch.supervision import gpus, start
from areal_megatron.launch.supervision.failure import Failure, Failures
from areal_megatron.launch.supervision.health import Health
from areal_megatron.launch.supervision.hosts import Here
from areal_megatron.launch.supervision.orders import start_order
from areal_megatron.launch.supervision.supervise import Outcome, interrupt
from areal_megatron.observe.metrics import read_status
from areal_megatron.observe.records import LaunchRecord, Pulse, last_record, read_record, state_of
from areal_megatron.observe.status import EngineState
from areal_megatron.planning.pools import Process, Slot
from areal_megatron.process.shown import guard
from areal_megatron.run.arguments import Parser, count
from areal_megatron.run.folder import RunError, RunFolder
from areal_megatron.run.network import Site, join_address, split_address
from areal_megatron.run.process_names import engine_index, engine_name

_POLL_S = 0.5
_LOOK_S = 5.0
"""Interval between two looks at what the controller reaches."""
_UNREACHED_S = 60.0
"""How long the controller may take to reach an engine that serves."""


def main(arguments: list[str] | None = None) -> int:
    guard()
    parser = Parser("areal_megatron.launch.engines", __doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    adding = actions.add_parser("add", help="start engines on this machine for the run")
    adding.add_argument("--count", type=count, default=0, help="engines; default: as many as this machine's GPUs hold")
    adding.add_argument(
        "--address",
        metavar="HOST[:PORT]",
        default="",
        help="where the run reaches this machine at another site; an engine takes rollout.tp + 1 ports in a row, from "
        "PORT on (default: any that are free)",
    )
    adding.add_argument(
        "--listen",
        metavar="ADDRESS",
        default="",
        help="this machine's own address, where HOST is translated to it or forwarded (default: HOST)",
    )
    adding.add_argument(
        "--restarts", type=count, default=10, metavar="N", help="start one that dies again, N times in all"
    )
    start.add_python(adding)
    draining = actions.add_parser("drain", help="have engines leave the run")
    draining.add_argument("--timeout-s", type=float, default=3600, help="longest wait for their last answers")
    for action in (adding, draining):
        action.add_argument("run", type=Path, help="run folder, e.g. runs/demo")
    draining.add_argument("engines", nargs="+", metavar="engine-E", help="its name, as areal status shows it")
    options = parser.parse_args(arguments)
    run = RunFolder(options.run)
    try:
        if options.action == "drain" and not os.path.exists(options.run) and os.path.exists(options.engines[-1]):
            raise ConfigError(f"{options.run} is no run folder, which goes first: drain {options.engines[-1]} …")
        check_running(run)
        config = config_file.load(run.config)
        if options.action == "add":
            start.check_packages(config, options.python, ["rollout"])
            check_not_shared(run, config)
            if options.listen and not options.address:
                raise ConfigError("--listen: goes with --address, by which the run reaches this machine")
            if options.address:
                check_elsewhere(run)
            return add(run, config, options)
        return drain(run, options.engines, options.timeout_s, config.machine.silence_s)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


def check_running(run: RunFolder) -> None:
    """Raises ConfigError if there is no such run, if others may write its folder, or if it is over."""
    record = last_record(run, run.folder)
    if run.make_private():
        raise ConfigError(
            f"others may have replaced a secret of {run.folder}: start the run again, which draws another"
        )
    if (state := state_of(run, record)) != "running":
        raise ConfigError(f"{run.folder} is not running: it is {state}")


def check_not_shared(run: RunFolder, config: Config) -> None:
    """Raises ConfigError if the trainers and engines of the run have divided the memory of this machine's GPUs."""
    if not config.shares_gpus:
        return
    if _here() & _machines(read_record(run)):
        raise ConfigError(
            "machine.shared: the run's trainers and engines have divided the memory of this machine's GPUs; add "
            "engines on another machine"
        )


def check_elsewhere(run: RunFolder) -> None:
    """Raises ConfigError if this machine is one of the run's own, which need no other address."""
    if _here() & _machines(read_record(run)):
        raise ConfigError("--address: this machine has processes of the run already; leave --address out")


def _here() -> set[str | None]:
    """The names that this machine may have in a record."""
    return {socket.gethostname(), os.environ.get("SLURMD_NODENAME")}


def _machines(record: LaunchRecord | None) -> set[str]:
    return {record.launcher, *(process.node for process in record.processes)} if record else set()


def sites_of(text: str, listens: str, engines: int, tp: int) -> list[Site]:
    """Returns the place of each engine, from the HOST[:PORT] at which the run reaches the first, and the address at
    which they listen ("": the same).

    Raises ConfigError if it is no address of this machine that other sites can reach, or if a port is taken.
    """
    option, said = ("--listen", listens) if listens else ("--address", text)
    try:
        host, port = split_address(text)
        said = listens or host
        found = str(socket.getaddrinfo(said, None, type=socket.SOCK_STREAM)[0][4][0])
        own = ipaddress.ip_address(found.partition("%")[0])
    except ValueError as e:
        raise ConfigError(f"--address: {e}") from None
    except OSError as e:
        raise ConfigError(f"{option}: {said} is not known here: {e.strerror}") from None
    if own.is_unspecified or own.is_multicast or (own.is_loopback and not listens):
        raise ConfigError(f"{option}: no other site can reach {said}; give this machine's own address")
    if port + engines * (tp + 1) > 1 << 16:
        raise ConfigError(f"--address: {engines} engines take {tp + 1} ports each, and there are too few after {port}")
    sites = [Site(host, port and port + n * (tp + 1), str(own)) for n in range(engines)]
    for site in sites:
        try:
            for reservation in reserve_ports(site.listens, site.port, tp + 1)[1]:
                reservation.close()
        except OSError as e:
            if e.errno == errno.EADDRNOTAVAIL:
                here = ", ".join(sorted(_own_addresses()))
                raise ConfigError(f"{option}: {said} is no address of this machine; it has {here}") from None
            raise ConfigError(f"--address: ports {site.port} to {site.port + tp} of {said}: {e.strerror}") from None
    return sites


def _own_addresses() -> set[str]:
    found = (one for interface in psutil.net_if_addrs().values() for one in interface)
    return {one.address.partition("%")[0] for one in found if one.family in (socket.AF_INET, socket.AF_INET6)}


def add(run: RunFolder, config: Config, options: argparse.Namespace) -> int:
    """Starts engines, looks after them and returns the exit code. Raises ConfigError if they do not fit."""
    groups = slots(config, options.count)
    sites: list[Site] | list[None] = [None] * len(groups)
    if options.address:
        sites = sites_of(options.address, options.listen, len(groups), config.rollout.tp)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        with Here() as here:
            return _Added(run, config, options, groups, sites, here).outcome()
    except KeyboardInterrupt:
        print("interrupted: the engines have been ended", file=sys.stderr)
        return Outcome.INTERRUPTED


class _Added:
    """The engines that one call adds, one on each of the GPUs or cores `groups`, at `sites` if these are others."""

    def __init__(
        self,
        run: RunFolder,
        config: Config,
        options: argparse.Namespace,
        groups: Sequence[list[int | str]],
        sites: Sequence[Site | None],
        here: Here,
    ):
        self._run, self._config, self._here = run, config, here
        self._python, self._restarts = options.python.get("rollout", ()), options.restarts
        self._health, self._incarnation, self._lease = Health(run), run.incarnation, run.lease
        self._sites: dict[str, Site | None] = {}
        """Engine that has not left → where it is, None at the site of the run."""
        self._processes: dict[str, Process] = {}
        for group, site in zip(groups, sites, strict=True):
            name, host = claim(run, config.rollout.engines), socket.gethostname()
            own = tuple(Slot(host, i) for i in group)
            self._sites[name], self._processes[name] = site, Process(name, "rollout", engine_index(name), host, own)
        self._failures, self._refused = Failures(), False
        self._ended: dict[str, str] = {}
        """Why this launcher has ended an engine that has not been started again yet."""

    def outcome(self) -> int:
        for name in self._sites:
            self._start(name)
        print(f"started {', '.join(self._sites)} for {self._run.folder}", flush=True)
        pulse, reach = Pulse(self._run, self._config.machine.silence_s), Reach(self._run)
        while self._sites:
            if (state := pulse.state()) != "running":
                print(f"the run is over: it is {state}")
                return Outcome.DONE
            with suppress(OSError, ValueError):  # it is read again soon
                if (incarnation := self._run.incarnation) != self._incarnation:
                    self._incarnation = incarnation
                    self._health.begin(self._sites)
                    if (lease := self._run.lease) != self._lease:  # another launcher: its controller has another secret
                        self._lease = lease
                        for name in self._sites:
                            self._start(name)
            for name, why in self._health.to_end().items():
                self._end(name, why)
            for news in reach.look({name: site for name, site in self._sites.items() if site}):
                print(f"warning: {news}", file=sys.stderr, flush=True)
            for name in [*self._sites]:
                if self._here.by_name[name].exit_code is not None:
                    self._again(name)
            time.sleep(_POLL_S)
        if self._refused:
            return Outcome.REFUSED
        return Outcome.FAILED if self._processes.keys() - self._health.drained else Outcome.DONE

    def _start(self, name: str) -> None:
        process = self._processes[name]
        supervisor, site = self._here.supervisor(process), self._sites[name]
        self._here.start(start_order(self._config, self._run, process, supervisor, self._python, site=site))
        self._health.started(name)

    def _end(self, name: str, why: str) -> None:
        if name in self._sites and self._here.by_name[name].exit_code is None:
            self._ended[name] = why
            print(f"{name} {why}: it is ended", flush=True)
            self._here.kill(self._processes[name])
        if name in self._health.drained:
            self._sites.pop(name, None)

    def _again(self, name: str) -> None:
        """Starts an engine again that has failed, if that may help."""
        failure = Failure.of(self._here.by_name[name], self._ended.pop(name, ""))
        version, served = read_status(self._run).version, name in self._health.served
        failure = replace(failure, repeated=self._failures.repeats(name, failure, version, served))
        print(failure.text, file=sys.stderr, flush=True)
        self._refused |= failure.is_final
        if self._restarts and not failure.is_final:
            self._restarts -= 1
            self._start(name)
        else:
            del self._sites[name]


class Reach:
    """Tells once of an engine at another site that serves, but that the run's controller has not reached."""

    def __init__(self, run: RunFolder):
        self._run = run
        self._since: dict[str, float] = {}
        """When each was first found to serve, by this machine's monotonic clock."""
        self._told: set[str] = set()
        self._looked = 0.0

    def look(self, sites: Mapping[str, Site]) -> list[str]:
        """Returns what there is to tell of these engines. To be called often."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return []
        self._looked = now
        reached = {engine.name for engine in read_status(self._run).engines if not engine.state.gone}
        news = []
        for name in sorted(sites.keys() - reached - self._told):
            with suppress(OSError, RunError, ValueError):
                host, port = split_address(self._run.endpoint(name).partition("://")[2])
                socket.create_connection((sites[name].listens, port), 1).close()
                if now - self._since.setdefault(name, now) >= _UNREACHED_S:
                    self._told.add(name)
                    news.append(
                        f"{name} serves at {join_address(host, port)}, but in {_UNREACHED_S:.0f} s the run has not "
                        f"reached it: can its nodes connect to that port and the next ones of {host}?"
                    )
        return news


def claim(run: RunFolder, first: int) -> str:
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


def ask_to_leave(run: RunFolder, engine: str) -> None:
    """Has an engine answer the requests that it has, and then leave."""
    path = run.drain(engine)
    path.parent.mkdir(exist_ok=True)
    path.touch()


def states_of(run: RunFolder) -> dict[str, EngineState]:
    """Returns the state of each engine, as the controller says."""
    return {engine.name: engine.state for engine in read_status(run).engines}


def slots(config: Config, count: int) -> list[list[int | str]]:
    """Returns this machine's GPUs (or cores) for each of `count` engines; 0: as many as fit. Raises ConfigError."""
    tp = config.rollout.tp
    return consecutive(config, [tp] * (count or max(1, len(_places(config)) // tp)))


def consecutive(config: Config, sizes: Sequence[int]) -> list[list[int | str]]:
    """Returns this machine's GPUs for engines of these sizes, or its cores, which several may share. Raises
    ConfigError."""
    found, on_gpus = _places(config), config.machine.device == "cuda"
    if max(sizes) > len(found) or (on_gpus and sum(sizes) > len(found)):
        asked, kind = " + ".join(map(str, sizes)), "GPUs" if on_gpus else "cores"
        raise ConfigError(f"engines of tp={asked} do not fit the {len(found)} {kind} of this machine")
    ends = itertools.accumulate(sizes)
    return [[found[n % len(found)] for n in range(end - size, end)] for end, size in zip(ends, sizes, strict=True)]


def _places(config: Config) -> list[int | str]:
    return gpus.visible() if config.machine.device == "cuda" else [*range(len(os.sched_getaffinity(0)))]


def drain(run: RunFolder, names: list[str], timeout_s: float, silence_s: float) -> int:
    """Asks engines to leave the run, waits until they have, and returns the exit code.

    Raises ConfigError for engines that cannot leave, if the run ends, or if its launcher writes nothing for silence_s.
    """
    states = states_of(run)
    if unknown := [name for name in names if name not in states]:
        raise ConfigError(f"{', '.join(unknown)}: no such engine; the run has {', '.join(states) or 'none yet'}")
    if not {name for name, state in states.items() if not state.gone} - set(names):
        raise ConfigError("no engine would be left to generate; stop the run instead")
    for name in names:
        ask_to_leave(run, name)
    pulse, deadline = Pulse(run, silence_s), time.monotonic() + timeout_s
    waiting = set(names)
    while waiting:
        for name in sorted(name for name in waiting if states_of(run).get(name) == EngineState.DRAINED):
            print(f"{name} is drained", flush=True)
            waiting.discard(name)
        if waiting and time.monotonic() > deadline:
            print(f"error: {', '.join(sorted(waiting))} still answer after {timeout_s:.0f} s", file=sys.stderr)
            return Outcome.FAILED
        if (state := pulse.state()) != "running":
            raise ConfigError(f"{run.folder} is not running: it is {state}")
        time.sleep(_POLL_S)
    return Outcome.DONE


if __name__ == "__main__":
    sys.exit(main())
