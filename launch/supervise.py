"""Lives through a run: starts its processes, watches them, starts them again after a failure, ends them."""

from __future__ import annotations

import enum
import signal
import sys
import time
from collections.abc import Callable, Mapping

from areal_megatron.config import ConfigError
from areal_megatron.observe.console import Console
from areal_megatron.observe.metrics import read_status
from launch import start
from launch.hosts import HostError, Hosts
from launch.orders import start_order
from launch.processes import Child, Log
from launch.records import Recorder
from launch.start import Beginning

_POLL_S = 0.1


class Outcome(enum.IntEnum):
    """Of a run; the value is the launcher's exit code."""

    DONE = 0
    FAILED = 1
    STOPPED = 75
    """After a checkpoint, as asked: resume=auto goes on."""
    INTERRUPTED = 130


def supervise(beginning: Beginning, hosts: Hosts, restarts: int, on_poll: Callable[[], None] = lambda: None) -> Outcome:
    """From the start of the run that has begun to its end; `hosts` is left without processes.

    USR1 asks the run to save a checkpoint and stop, SIGTERM and SIGINT end it at once. Says how it ended. `on_poll` is
    called ten times a second.
    """
    config, run = beginning.config, beginning.run
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGUSR1, lambda *_: run.stop.touch())
    console, failure, outcome = Console(run, config), "", Outcome.FAILED
    recorder = Recorder(run, beginning.plan.placement)

    def poll() -> None:
        console.refresh()
        recorder.write(hosts.by_name, restarts)
        on_poll()

    try:
        with hosts:
            while failure := _incarnation(beginning, hosts, poll):
                recorder.write(hosts.by_name, restarts)
                if not restarts or run.stop.exists():
                    break
                restarts -= 1
                print(f"{failure}\nstarting again, {restarts} restarts are left", file=sys.stderr, flush=True)
                hosts.end()
                start.begin(run, start.newest(run))
    except KeyboardInterrupt:
        print("interrupted: all processes of the run have been ended", file=sys.stderr)
        outcome = Outcome.INTERRUPTED
        return outcome
    except (HostError, ConfigError) as e:
        failure = f"{failure}\nerror: {e}".lstrip()
    else:
        if not failure:
            outcome = Outcome.STOPPED if read_status(run).get("phase") == "stopped" else Outcome.DONE
    finally:
        console.close()
        recorder.write(hosts.by_name, restarts, outcome.name.lower())
    print(failure or console.summary(), file=sys.stderr if failure else sys.stdout)
    return outcome


def _incarnation(beginning: Beginning, hosts: Hosts, on_poll: Callable[[], None]) -> str:
    """Starts every process and returns when all are through, "", or with what is to be said of one that failed."""
    for process in beginning.plan.placement.processes:
        hosts.start(start_order(beginning.config, beginning.run, process, hosts.supervisor(process)))
    while True:
        hosts.refresh()
        if failed := _failure(hosts.by_name, hosts):
            return _describe(failed)
        if all(c.exit_code == 0 for c in hosts.by_name.values() if not c.name.startswith("engine-")):
            return ""
        on_poll()
        time.sleep(_POLL_S)


def _failure(processes: Mapping[str, Child | Log], hosts: Hosts) -> Child | None:
    """The process that ended before it should have, if any; one ended by a signal before one that noticed it."""
    controller = processes.get("controller")
    over = controller is not None and controller.exit_code == 0

    def bad() -> list[Child]:
        return [c for c in processes.values() if c.exit_code is not None
                and (c.exit_code != 0 or (c.name.startswith("engine-") and not over))]  # fmt: skip

    if not bad():
        return None
    time.sleep(3 * _POLL_S)  # a death makes others fail: give them time, so that the first cause is named
    hosts.refresh()
    return min(bad(), key=lambda c: (c.exit_code == 0, c.exit_code > 0, c.name == "controller", c.last_write))


def _describe(child: Child) -> str:
    code = child.exit_code
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{child.last_lines()}\nerror: {child.name} {how}; its log: {child.log}"


def _interrupt(*_) -> None:
    raise KeyboardInterrupt
