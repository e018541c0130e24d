"""Supervises a run: starts its processes, watches them, restarts them after a failure, and ends them."""

from __future__ import annotations

import enum
import os
import secrets
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace

from areal_megatron.config import SERVED, ConfigError
from areal_megatron.launch.supervision import output, start
from areal_megatron.launch.supervision.failure import REFUSED, Failure, Failures
from areal_megatron.launch.supervision.health import Health
from areal_megatron.launch.supervision.hosts import HostError, Hosts, Remote
from areal_megatron.launch.supervision.lease import Lease
from areal_megatron.launch.supervision.mirrors import Mirrors
from areal_megatron.launch.supervision.orders import start_order
from areal_megatron.launch.supervision.processes import Child
from areal_megatron.launch.supervision.recorder import Recorder
from areal_megatron.launch.supervision.start import Beginning
from areal_megatron.observe.console import Console
from areal_megatron.observe.metrics import STEPS, read_metrics, read_status
from areal_megatron.observe.status import Status
from areal_megatron.planning.pools import Process, whole
from areal_megatron.process.silence import AwakeClock, Repeater
from areal_megatron.programs.closing import closing
from areal_megatron.run.folder import Away, Replaced
from areal_megatron.run.process_names import is_engine, is_server

_POLL_S = 0.1
_RECORD_S = 0.5
_END_S = 30.0
_DISK_S = 1.0
"""The pause before a file system is asked again to take what it has refused."""
_LAST_LOOK_S = 60.0
"""Patience with the last status: it says whether the run is done or was stopped."""


class Outcome(enum.IntEnum):
    """How a run ended; the value is the launcher's exit code."""

    DONE = 0
    FAILED = 1
    REFUSED = 2
    """Wrong input, or a failure that repeats by itself: the user has to fix something first."""
    LOST = 3
    """A node, or the connection to it, is gone, and perhaps its processes."""
    REPLACED = 4
    """The run was started again elsewhere while this launcher was stopped or cut off."""
    STOPPED = 75
    """The run saved a checkpoint and stopped, as it was asked to; resume=auto continues it."""
    INTERRUPTED = 130


def supervise(
    beginning: Beginning,
    hosts: Hosts,
    options: Namespace,
    lease: Lease,
    on_poll: Callable[[], None] = lambda: None,
    term_stops: bool = False,
) -> Outcome:
    """Starts the processes of a run that has begun, watches them, and returns how the run ended; leaves no process.

    `options` are start.parser's. The run survives the failure of a process while there are `restarts` left: an engine
    is restarted alone, a trainer rank together with all trainer ranks and the controller, and if the controller itself
    fails, everything is restarted. What a process refuses, and a failure that repeats by itself (failure.py), ends the
    run whatever restarts are left. SIGUSR1 asks the run to save a checkpoint and stop, and if `term_stops` so does
    SIGTERM; else SIGTERM ends it at once, as do SIGINT and another launcher that takes the next `lease`. `on_poll` is
    called ten times a second.
    """
    output.never_fail()
    lease.guard(hosts.guardian)
    signal.signal(signal.SIGUSR1, lambda *_: _ask_to_stop(beginning))
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGUSR1) if term_stops else interrupt)
    watch, outcome, problem = _Watch(beginning, hosts, options, lease, on_poll), Outcome.FAILED, ""
    try:
        with hosts:
            while (failure := watch.incarnation()) and watch.may_restart(failure):
                watch.begin_again()
    except KeyboardInterrupt:
        problem, outcome = "interrupted: all processes of the run have been ended", Outcome.INTERRUPTED
    except (HostError, ConfigError, Replaced) as e:
        problem = f"error: {e}"
        outcome = {HostError: Outcome.LOST, ConfigError: Outcome.REFUSED, Replaced: Outcome.REPLACED}[type(e)]
    else:
        if failure:
            problem, outcome = failure.text, Outcome.REFUSED if failure.is_final else Outcome.FAILED
        else:
            outcome = Outcome.STOPPED if _phase(beginning, _LAST_LOOK_S) == "stopped" else Outcome.DONE
    finally:
        watch.close(outcome)
    print(problem or watch.console.summary(), file=sys.stderr if problem else sys.stdout, flush=True)
    if outcome is not Outcome.REPLACED:  # else it goes on elsewhere
        print(closing(beginning.run, beginning.config, outcome is Outcome.DONE, options.again), flush=True)
    return outcome


class _Watch:
    """Starts, watches and ends the processes of a run."""

    def __init__(
        self, beginning: Beginning, hosts: Hosts, options: Namespace, lease: Lease, on_poll: Callable[[], None]
    ):
        self.console = Console(beginning.run, beginning.config)
        self._beginning, self._hosts, self._lease, self._on_poll = beginning, hosts, lease, on_poll
        self._restarts, self._python = options.restarts, options.python
        placement = beginning.plan.placement
        self._processes = {p.name: p for p in placement.processes}
        self._recorder = Recorder(beginning.run, placement, options.again)
        # On a thread: a record every few seconds shows that this process lives, also while it waits for others to end.
        self._recording = Repeater(self._record, _RECORD_S).__enter__()
        self._health = Health(beginning.run)
        self._failures = Failures()
        self._ended: dict[str, str] = {}
        """Why this launcher has ended an engine that has not been started again yet."""
        self._mirrors = Mirrors(beginning.run, beginning.config.track.names, lease.number)

    def incarnation(self) -> Failure | None:
        """Starts the processes that are not running. Returns None when all have ended as they should, or how one has
        failed."""
        self._health.begin(self._hosts.by_name)
        for name in [name for name in self._processes if name not in self._hosts.by_name]:
            self._start(name)
        while True:
            self._hosts.refresh()
            processes = self._hosts.by_name
            left = self.parts(self._health.drained) | self._hosts.lost
            if failed := _failure(processes, self._hosts, left):
                was_away = self._wait_for_folder()  # what it says of the run decides
                name, alone = whole(failed.name), self._is_dispensable(failed.name)
                if alone and was_away:  # which may be all that the engine failed of
                    text = Failure.of(failed, self._ended.get(name, "")).text
                    print(f"{text}\nstarting it again, with the run folder there", file=sys.stderr, flush=True)
                    self._end_parts(name)
                    self._start(name)
                    continue
                failure = self._failure(failed, alone)
                if alone and self.may_restart(failure):
                    self._end_parts(name)
                    self._start(name)
                else:
                    return failure
            if all(c.exit_code == 0 for c in processes.values() if not is_server(c.name)):
                return None
            self.console.refresh()
            self._mirrors.look()
            self._lease.check()
            self._lease.guard(self._hosts.guardian)
            self._on_poll()
            for name, why in self._health.to_end().items():
                self._end(name, why)
            time.sleep(_POLL_S)

    def begin_again(self) -> None:
        """Ends the processes that the next incarnation cannot use and begins it, once the disk accepts its files.

        Raises HostError if a node is lost, and if the run folder cannot be written for machine.gather_s; ConfigError if
        others may have written what the run trusts.
        """
        if self._hosts.lost:
            raise HostError(f"{', '.join(sorted(self._hosts.lost))} cannot be started again: their node is lost")
        self._when_possible(self._begin)

    def _begin(self) -> None:
        run = self._beginning.run
        run.look()
        checkpoint, replaced = start.newest(run), run.make_private()
        keep = self.kept() if checkpoint and not replaced else set()
        self._hosts.end(self.parts(keep))
        if replaced:  # the engines that hold the one before have been ended
            run.renew_secret()
        start.begin(run, checkpoint, keep | self.added())

    def _wait_for_folder(self) -> bool:
        """Waits while the run folder is away or cannot be looked at. Returns whether it was. Raises HostError as
        begin_again does."""
        return self._when_possible(self._beginning.run.look)

    def _when_possible(self, act: Callable[[], None]) -> bool:
        """Acts, again and again until the disk lets it. Returns whether that took a wait. Raises HostError after
        machine.gather_s, and Replaced, as after machine.lease_s without the run folder."""
        run = self._beginning.run
        deadline, waited = time.monotonic() + self._beginning.config.machine.gather_s, False
        while True:
            try:
                act()
                return waited
            except OSError as e:  # as of a full disk, or a folder that is away
                problem = str(e) if isinstance(e, Away) else f"{run.folder} cannot be written: {e.strerror or e}"
                if time.monotonic() > deadline:
                    raise HostError(f"{problem}; fix that, and the same command resumes the run") from None
            if not waited:
                print(f"warning: {problem}; the run goes on when it can", file=sys.stderr, flush=True)
            waited = True
            self._lease.check()
            self._on_poll()
            time.sleep(_DISK_S)

    def kept(self) -> set[str]:
        """Returns the engines that the next incarnation can use: living ones that the controller has not given up, but
        none if the controller itself failed, or is missing."""
        processes = self._hosts.by_name
        controller = processes.get("controller")
        if controller is None or (controller.exit_code or 0) > 0:
            return set()
        engines = {whole(name) for name in processes if is_engine(name)} - self._health.given_up
        return {name for name in engines if all(processes[part].exit_code is None for part in self.parts({name}))}

    def parts(self, names: Collection[str]) -> set[str]:
        """Returns the names of the engines' processes: an engine on several nodes has several."""
        return {part.name for name in names if name in self._processes for part in self._processes[name].parts}

    def added(self) -> set[str]:
        """Returns the engines that others have started for this run (launch/engines.py)."""
        return set(self._beginning.run.announced_engines()) - self._processes.keys()

    def may_restart(self, failure: Failure) -> bool:
        """Uses up a restart and says so. Returns False if it would only fail again, if there is none left, or if the
        run is to stop."""
        stop = self._beginning.run.stop
        if failure.is_final or not self._restarts or os.path.exists(stop):  # Path.exists raises for a stale handle
            return False
        self._restarts -= 1
        print(f"{failure.text}\nstarting again, {self._restarts} restarts are left", file=sys.stderr, flush=True)
        return True

    def _failure(self, failed: Child | Remote, alone: bool) -> Failure:
        """Returns how a process has failed, after which it is started again `alone` or with others, if at all."""
        name = whole(failed.name)
        failure = Failure.of(failed, self._ended.get(name, ""))
        whose, served = name if alone else self._processes[name].pool, not alone or name in self._health.served
        return replace(failure, repeated=self._failures.repeats(whose, failure, self._reached(), served))

    def _reached(self) -> int:
        """Returns the last version that this incarnation has trained; else the one that it began with."""
        run = self._beginning.run
        version, status = run.start.version, read_status(run)
        if status != Status():  # the process that writes the metrics has begun, and has left out what is done again
            with suppress(OSError, ValueError):
                trained = [line["version"] for line in read_metrics(run) if line["kind"] in STEPS]
                version = max(version, status.version, *trained[-1:])
        return version

    def close(self, outcome: Outcome) -> None:
        self.console.close()
        self._recording.__exit__()
        self._record(outcome.name.lower())
        self._mirrors.close(wait=outcome is not Outcome.INTERRUPTED)

    def _record(self, outcome: str = "") -> None:
        with suppress(Replaced):  # the lease says so, too
            self._recorder.write(dict(self._hosts.by_name), self._restarts, outcome)

    def _start(self, name: str) -> None:
        self._wait_for_folder()  # in which its log is
        self._health.started(name)
        self._ended.pop(name, None)
        process, rendezvous = self._processes[name], f"rendezvous-{name}-{secrets.token_hex(4)}"
        pool = "rollout" if process.pool in SERVED else process.pool  # both run vLLM
        python, shares = self._python.get(pool, ()), self._beginning.plan.memory.shares
        for part in process.parts:
            supervisor = self._hosts.supervisor(part)
            self._hosts.start(
                start_order(self._beginning.config, self._beginning.run, part, supervisor, python, rendezvous, shares)
            )

    def _end(self, name: str, why: str) -> None:
        if living := self._living(name):
            self._ended[name] = why
            print(f"{name} {why}: it is ended", file=sys.stderr, flush=True)
            for part in living:
                self._hosts.kill(part)

    def _end_parts(self, name: str) -> None:
        """Ends what is left of an engine that has lost a part. Raises HostError if it does not end."""
        silence_s = self._beginning.config.machine.silence_s
        clock, longest_s = AwakeClock(silence_s), silence_s + _END_S
        for part in self._living(name):
            self._hosts.kill(part)
        while living := self._living(name):
            if clock.now() > longest_s:
                raise HostError(f"{', '.join(part.name for part in living)} did not end within {longest_s:.0f} s")
            time.sleep(_POLL_S)
            self._hosts.refresh()

    def _living(self, name: str) -> list[Process]:
        """Returns the parts of an engine that are running."""
        processes, lost = self._hosts.by_name, self._hosts.lost
        return [
            part
            for part in self._processes[name].parts
            if processes[part.name].exit_code is None and part.name not in lost
        ]

    def _is_dispensable(self, name: str) -> bool:
        """Returns whether this is an engine of a run that generates already: the others can do without it for a
        while, or wait for its scores."""
        return is_server(name) and _phase(self._beginning) == "training"


def _ask_to_stop(beginning: Beginning) -> None:
    try:
        beginning.run.stop.touch()
    except OSError as e:  # as of a run folder that is away
        print(f"warning: {beginning.run.stop} cannot be written: {e.strerror}; ask again", file=sys.stderr, flush=True)


def _phase(beginning: Beginning, patience_s: float = 1.0) -> str:
    """Returns the phase of the run, as the controller reports it; "" if that cannot be read within patience_s."""
    return read_status(beginning.run, patience_s).phase


def _failure(processes: Mapping[str, Child | Remote], hosts: Hosts, left: Collection[str]) -> Child | Remote | None:
    """Returns the process that ended too early, if any; of several, one that refused its input or was killed by a
    signal comes before failures in consequence.

    `left`: processes of engines that have left the run.
    """
    controller = processes.get("controller")
    over = controller is not None and controller.exit_code == 0

    def bad() -> list[Child | Remote]:
        return [
            c
            for c in processes.values()
            if c.exit_code is not None and c.name not in left and (c.exit_code != 0 or (is_server(c.name) and not over))
        ]

    if not bad():
        return None
    time.sleep(3 * _POLL_S)  # a death makes others fail: give them time, so that the cause is named
    hosts.refresh()

    def lateness(c: Child | Remote) -> tuple:
        code = c.exit_code or 0  # it has ended
        return code != REFUSED, code == 0, code > 0, c.name == "controller", c.last_write

    return min(bad(), key=lateness)


def interrupt(*_) -> None:
    raise KeyboardInterrupt
