"""Supervises the processes of one node: `python -m areal_megatron.launch.supervision.node --silence-s S`, which
slurm.py starts with srun.

Orders come in on stdin and events go out on stdout, a line of JSON each (orders.py). The supervisor ends all its
processes when it is told to, at SIGTERM, and when its launcher is gone: at the end of stdin, or after a long silence.
When the launcher is gone it also makes sure that the Slurm job is requeued. Signs of life come from a thread of their
own: the others open logs, on a shared folder that may not answer for a while.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from areal_megatron.launch.supervision import gpus
from areal_megatron.launch.supervision.orders import (
    Alive,
    Cleared,
    End,
    EndAll,
    Ended,
    Event,
    Leave,
    NodeHello,
    Order,
    StartOrder,
    carry_out,
)
from areal_megatron.launch.supervision.processes import Children
from areal_megatron.process.shown import guard
from areal_megatron.process.silence import AwakeClock, Repeater, sign_interval
from areal_megatron.run import descriptors

POLL_S = 0.1
LAUNCHER_SILENCE = 2
"""A launcher may be silent this many times longer than a supervisor: it is the one that decides who is lost."""
_STRANDED_LOOK_S = 5.0
_STRANDED_LONGEST_S = 1800.0
"""Slurm finds a lost node after its SlurmdTimeout, usually 300 s."""
_CLIENT_TIMEOUT_S = 60.0


class Supervisor:
    """Carries out the orders that bear its name. A context manager: leaving it ends its processes."""

    def __init__(self, name: str):
        self._name = name
        self._children = Children()
        self._reported: set[str] = set()

    def step(self, orders: Iterable[Order]) -> Iterator[Event]:
        """Carries out orders and yields the events since the last call. Waits for processes that it ends, and for the
        folder of the logs."""
        for order in orders:
            match order:
                case StartOrder() if order.supervisor == self._name:
                    self._reported.discard(order.name)
                    if problem := carry_out(order, self._children).problem:
                        print(f"{self._name}: {order.name}: {problem}", file=sys.stderr, flush=True)
                case End() if order.supervisor == self._name and order.name in self._children.by_name:
                    self._children.kill(order.name)
                case EndAll():
                    self._children.end(order.keep)
                    yield from self._ended()
                    self._children.forget(order.keep)
                    yield Cleared(self._name)
        yield from self._ended()
        self._children.look_after()

    def _ended(self) -> Iterator[Ended]:
        for child in self._children.by_name.values():
            if child.name not in self._reported and (code := child.exit_code) is not None:
                self._reported.add(child.name)
                yield Ended(self._name, child.name, code, child.out_of_memory)

    def __enter__(self) -> Supervisor:
        self._children.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._children.__exit__(*error)


def hello(name: str, pool: str = "") -> NodeHello:
    """Returns what this node has, found without torch."""
    cpus = int(os.environ.get("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0)))
    machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    own = gpus.visible()
    size, uuids, files = gpus.smallest_gib(own), gpus.uuids(own), descriptors.hard_limit()
    return NodeHello(name, own, size, cpus, machine, pool=pool, uuids=uuids, files=files)


def main() -> int:
    guard()
    parser = argparse.ArgumentParser(
        prog="python -m areal_megatron.launch.supervision.node", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--pool", default="", choices=["", "trainer", "rollout"])
    parser.add_argument("--silence-s", type=float, required=True, help="machine.silence_s of the run")
    options = parser.parse_args()
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _say(hello(name, options.pool))
    alive = Repeater(lambda: _say(Alive(name)), sign_interval(options.silence_s))
    with alive, Supervisor(name) as supervisor:
        dismissed = follow(supervisor, _orders(), LAUNCHER_SILENCE * options.silence_s)
    if not dismissed and "SLURM_JOB_ID" in os.environ:
        requeue_stranded_job()
    return 0


def follow(supervisor: Supervisor, orders: queue.Queue[Order | None], silence_s: float) -> bool:
    """Carries out orders. Returns True when it is told to leave, False when the launcher is gone: at the end of the
    orders, or after silence_s without one."""
    clock = AwakeClock(silence_s)
    heard = clock.now()
    while clock.now() < heard + silence_s:
        taken = _take(orders)
        if any(isinstance(order, Leave) for order in taken):
            return True
        told = [order for order in taken if order is not None]
        if len(told) < len(taken):
            return False
        if told:
            heard = clock.now()
        for event in supervisor.step(told):
            _say(event)
    return False


def _orders() -> queue.Queue[Order | None]:
    """Returns a queue of the orders on stdin, with None at their end."""
    orders: queue.Queue[Order | None] = queue.Queue()
    threading.Thread(target=_read, args=(orders,), daemon=True).start()
    return orders


def _read(orders: queue.Queue[Order | None]) -> None:
    decode = msgspec.json.Decoder(Order).decode
    # Not sys.stdin: Python aborts if this thread holds its lock, waiting, when the process ends.
    with open(0, "rb", closefd=False) as stdin:
        for line in stdin:
            orders.put(decode(line))
    orders.put(None)


def _take(orders: queue.Queue[Order | None]) -> list[Order | None]:
    """Returns the orders that are there; waits up to POLL_S for the first."""
    try:
        taken = [orders.get(timeout=POLL_S)]
    except queue.Empty:
        return []
    while not orders.empty():
        taken.append(orders.get())
    return taken


def _say(event: Event) -> None:
    # Not sys.stdout: several threads write, and a short line reaches a pipe as a whole.
    with suppress(BrokenPipeError):  # the launcher is gone, which the orders tell
        os.write(1, msgspec.json.encode(event) + b"\n")


def requeue_stranded_job(longest_s: float = _STRANDED_LONGEST_S, look_s: float = _STRANDED_LOOK_S) -> None:
    """Requeues this Slurm job if the launcher's node was taken out of it. Returns when the job no longer runs,
    or after longest_s.

    With --no-kill Slurm takes a lost node out of the job and keeps the others, even if the lost one was the
    launcher's: those would then idle until the job's time is over. Therefore their supervisors requeue it.
    """
    job, deadline = os.environ["SLURM_JOB_ID"], time.monotonic() + longest_s
    while time.monotonic() < deadline:
        state, _, rest = slurm_client("squeue", "--noheader", f"--jobs={job}", "--format=%T %B %N").partition(" ")
        host, _, nodes = rest.partition(" ")
        if state and state != "RUNNING":
            return
        if nodes and host not in slurm_client("scontrol", "show", "hostnames", nodes).split():
            with suppress(OSError):  # srun, which passes stderr on, was on that node
                print(
                    f"node {host}, which the launcher was on, is lost: the job is queued again",
                    file=sys.stderr,
                    flush=True,
                )
            slurm_client("scontrol", "requeue", job)  # again and again until the job stops: a busy slurmctld refuses
        time.sleep(look_s)


def slurm_client(*command: str) -> str:
    """Returns what the program prints; "" if it fails, as it does while Slurm records the end of the job."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_CLIENT_TIMEOUT_S, encoding="utf-8", errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
