"""Lives through a run: starts its processes, watches them, starts them again after a failure, ends them."""

from __future__ import annotations

import enum
import secrets
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping

from areal_megatron.config import ConfigError
from areal_megatron.observe.console import Console
from areal_megatron.observe.metrics import read_status
from areal_megatron.run import is_engine
from launch import start
from launch.health import Health
from launch.hosts import HostError, Hosts
from launch.orders import start_order
from launch.pools import Process, whole
from launch.processes import Child, Log
from launch.records import Recorder
from launch.start import Beginning

_POLL_S = 0.1
_END_S = 30.0


class Outcome(enum.IntEnum):
    """Of a run; the value is the launcher's exit code."""

    DONE = 0
    FAILED = 1
    LOST = 3
    """A node, or the way to it, is gone; its processes may be, too."""
    STOPPED = 75
    """After a checkpoint, as asked: resume=auto goes on."""
    INTERRUPTED = 130


def supervise(
    beginning: Beginning, hosts: Hosts, options: Namespace, on_poll: Callable[[], None] = lambda: None
) -> Outcome:
    """From the start of the run that has begun to its end; `hosts` is left without processes.

    `options`, of start.parser: with `restarts` left a process that fails is survived: an engine is started again by
    itself, a trainer rank takes all trainer ranks and the controller along, and what fails by itself in the controller
    takes all processes. USR1 asks the run to save a checkpoint and stop, SIGTERM and SIGINT end it at once. Says how it
    ended. `on_poll` is called ten times a second.
    """
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGUSR1, lambda *_: beginning.run.stop.touch())
    watch, outcome, failure = _Watch(beginning, hosts, options, on_poll), Outcome.FAILED, ""
    try:
        with hosts:
            while (failure := watch.incarnation()) and watch.may_restart(failure):
                if hosts.lost:
                    raise HostError(f"{', '.join(sorted(hosts.lost))} cannot be started again: their node is lost")
                checkpoint = start.newest(beginning.run)
                keep = watch.kept() if checkpoint else set()
                hosts.end(watch.parts(keep))
                start.begin(beginning.run, checkpoint, keep | watch.added())
    except KeyboardInterrupt:
        print("interrupted: all processes of the run have been ended", file=sys.stderr)
        outcome = Outcome.INTERRUPTED
        return outcome
    except (HostError, ConfigError) as e:
        failure = f"{failure}\nerror: {e}".lstrip()
        outcome = Outcome.LOST if isinstance(e, HostError) else Outcome.FAILED
    else:
        if not failure:
            outcome = Outcome.STOPPED if _phase(beginning) == "stopped" else Outcome.DONE
    finally:
        watch.close(outcome)
    print(failure or watch.console.summary(), file=sys.stderr if failure else sys.stdout)
    return outcome


class _Watch:
    """Keeps an eye on the processes."""

    def __init__(self, beginning: Beginning, hosts: Hosts, options: Namespace, on_poll: Callable[[], None]):
        self.console = Console(beginning.run, beginning.config)
        self._beginning, self._hosts, self._on_poll = beginning, hosts, on_poll
        self._restarts, self._python = options.restarts, options.python
        self._processes = {process.name: process for process in beginning.plan.placement.processes}
        self._recorder = Recorder(beginning.run, beginning.plan.placement)
        self._health = Health(beginning.run)

    def incarnation(self) -> str:
        """Starts what is not there and returns when all are through, "", or with what is to be said of one that
        failed."""
        self._health.begin(self._hosts.by_name)
        for name in [name for name in self._processes if name not in self._hosts.by_name]:
            self._start(name)
        while True:
            self._hosts.refresh()
            processes = self._hosts.by_name
            if failed := _failure(processes, self._hosts, self.parts(self._health.drained) | self._hosts.lost):
                said = describe(failed)
                if not self._is_running(failed.name) or not self.may_restart(said):
                    return said
                self._end_parts(whole(failed.name))
                self._start(whole(failed.name))
            if all(c.exit_code == 0 for c in processes.values() if not is_engine(c.name)):
                return ""
            self.console.refresh()
            self._recorder.write(processes, self._restarts)
            self._on_poll()
            for name, why in self._health.to_end().items():
                self._end(name, why)
            time.sleep(_POLL_S)

    def kept(self) -> set[str]:
        """Engines that can go on without trainers and controller: the living ones, unless the controller gave up."""
        processes = self._hosts.by_name
        if (processes["controller"].exit_code or 0) > 0:
            return set()
        engines = {whole(name) for name in processes if is_engine(name)} - self._health.given_up
        return {name for name in engines if all(processes[part].exit_code is None for part in self.parts({name}))}

    def parts(self, names: Collection[str]) -> set[str]:
        """The processes of those engines, which are several where an engine lies on several nodes."""
        return {part.name for name in names if name in self._processes for part in self._processes[name].parts}

    def added(self) -> set[str]:
        """Engines that others have started for this run (launch/engines.py)."""
        return set(self._beginning.run.announced_engines()) - self._processes.keys()

    def may_restart(self, failure: str) -> bool:
        """Takes one of the restarts, if there is one left, and says so."""
        if not self._restarts or self._beginning.run.stop.exists():
            return False
        self._restarts -= 1
        print(f"{failure}\nstarting again, {self._restarts} restarts are left", file=sys.stderr, flush=True)
        return True

    def close(self, outcome: Outcome) -> None:
        self.console.close()
        self._recorder.write(self._hosts.by_name, self._restarts, outcome.name.lower())

    def _start(self, name: str) -> None:
        self._health.started(name)
        process, rendezvous = self._processes[name], f"rendezvous-{name}-{secrets.token_hex(4)}"
        python = self._python.get(process.pool, ())
        for part in process.parts:
            supervisor = self._hosts.supervisor(part)
            self._hosts.start(
                start_order(self._beginning.config, self._beginning.run, part, supervisor, python, rendezvous)
            )

    def _end(self, name: str, why: str) -> None:
        if living := self._living(name):
            print(f"{name} {why}: it is ended", file=sys.stderr, flush=True)
            for part in living:
                self._hosts.kill(part)

    def _end_parts(self, name: str) -> None:
        """Of an engine that has lost one of them. Raises HostError where they do not end."""
        deadline = time.monotonic() + _END_S
        for part in self._living(name):
            self._hosts.kill(part)
        while living := self._living(name):
            if time.monotonic() > deadline:
                raise HostError(f"{', '.join(part.name for part in living)} did not end within {_END_S:.0f} s")
            time.sleep(_POLL_S)
            self._hosts.refresh()

    def _living(self, name: str) -> list[Process]:
        """The parts of an engine that run."""
        processes, lost = self._hosts.by_name, self._hosts.lost
        return [
            part
            for part in self._processes[name].parts
            if processes[part.name].exit_code is None and part.name not in lost
        ]

    def _is_running(self, name: str) -> bool:
        """Whether it is an engine of a run that has begun to generate: then the others can do without it for a
        while."""
        return is_engine(name) and _phase(self._beginning) == "training"


def _phase(beginning: Beginning) -> str | None:
    """Of the run, as the controller says."""
    return read_status(beginning.run).get("phase")


def _failure(processes: Mapping[str, Child | Log], hosts: Hosts, left: Collection[str]) -> Child | None:
    """The process that ended before it should have, if any; one ended by a signal before one that noticed it.

    `left`: engines that have left the run.
    """
    controller = processes.get("controller")
    over = controller is not None and controller.exit_code == 0

    def bad() -> list[Child]:
        return [
            c
            for c in processes.values()
            if c.exit_code is not None and c.name not in left and (c.exit_code != 0 or (is_engine(c.name) and not over))
        ]

    if not bad():
        return None
    time.sleep(3 * _POLL_S)  # a death makes others fail: give them time, so that the first cause is named
    hosts.refresh()
    return min(bad(), key=lambda c: (c.exit_code == 0, c.exit_code > 0, c.name == "controller", c.last_write))


def describe(child: Child) -> str:
    code = child.exit_code
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{child.last_lines()}\nerror: {child.name} {how}; its log: {child.log}"


def interrupt(*_) -> None:
    raise KeyboardInterrupt
