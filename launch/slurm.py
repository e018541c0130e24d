"""Launches a run in a Slurm job: `python -m areal_megatron.launch.slurm CONFIG [key=value …]`, from a batch script.

The scripts in slurm/, and those that `areal submit` writes, call it on the first node of the job. It starts a
supervisor on each node with srun, divides the nodes into pools, and watches the run. In a heterogeneous job group 0 has
the trainers' nodes and group 1 the engines'.

SIGUSR1, which `sbatch --signal=B:USR1@600` sends ahead of the time limit and at preemption, makes the run save a
checkpoint and requeues the job. A job that has lost a node, or whose nodes do not all answer at its start, is requeued
without a checkpoint; if the launcher's node is lost, by the supervisors of the others (node.py). With resume=auto the
run then continues where it was. Exit code 0: done, 1: a process failed, 2: wrong input, or a failure that repeats by
itself, 4: replaced, 130: cancelled. Imports neither torch nor vllm.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import msgspec

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.launch.supervision import dry_run, node, start
from areal_megatron.launch.supervision.hosts import HostError, Nodes
from areal_megatron.launch.supervision.lease import Lease
from areal_megatron.launch.supervision.orders import Event, Leave, Order, Present
from areal_megatron.launch.supervision.start import Beginning
from areal_megatron.launch.supervision.supervise import Outcome, supervise
from areal_megatron.process.files import read_replaced, write_atomically
from areal_megatron.process.shown import guard
from areal_megatron.process.silence import Repeater, sign_interval
from areal_megatron.programs.fetch import fetch_all
from areal_megatron.run.folder import Replaced, RunFolder
from areal_megatron.run.json_input import read_record

_POOLS = ("trainer", "rollout")
_CLIENT_TIMEOUT_S = 60.0
_FRUITLESS = 3
_REQUEUE_S = 120.0
_AGAIN_S = 5.0
_KILLED_S = 120.0
"""How long Slurm may take to end a job that has been requeued."""


def main(arguments: list[str] | None = None) -> int:
    guard()
    parser = start.parser("areal_megatron.launch.slurm", __doc__)
    parser.add_argument(
        "--grace-s",
        type=float,
        default=480.0,
        help="most seconds from USR1 until the job is queued again",
    )
    dry_run.add_flags(parser)
    options = parser.parse_intermixed_args(arguments)
    if options.dry_run or options.nodes is not None or options.gpus is not None:
        return _dry_run(options)
    signal.signal(signal.SIGUSR1, _again)
    lease = None
    try:
        job = Job.of(os.environ)
        config = config_file.load(options.config, options.overrides)
        with start.lease(config) as lease:
            outcome = _run(job, config, options, lease)
    except _Again:
        outcome = Outcome.STOPPED
    except (ConfigError, Replaced) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else Outcome.REPLACED
    except HostError as e:
        print(f"error: {e}", file=sys.stderr)
        outcome = Outcome.LOST
    if outcome not in (Outcome.STOPPED, Outcome.LOST):
        return outcome
    return queue_again(lease.run) if lease else requeue()


class _Again(BaseException):
    """Slurm asks the job to stop before it has started anything."""


def _again(*_) -> None:
    raise _Again


def _dry_run(options: argparse.Namespace) -> int:
    """Prints what would be started in this job or, outside of one, on nodes of the sizes that the flags give."""
    try:
        if sizes := dry_run.imagined(options, here="SLURM_JOB_ID" in os.environ):
            return dry_run.show_imagined(options, sizes)
        job, config = Job.of(os.environ), config_file.load(options.config, options.overrides)
        with Nodes(srun(job, config.machine.silence_s), config.machine.silence_s) as nodes:
            print(dry_run.text(_check(job, config, options, nodes), options.python))
    except (ConfigError, HostError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else Outcome.LOST
    return 0


def _run(job: Job, config: Config, options: argparse.Namespace, lease: Lease) -> Outcome:
    """Starts the run on the job's nodes and returns how it ended; STOPPED and LOST: the job is to be queued again.

    Raises ConfigError, HostError or Replaced before it has started anything.
    """
    fetch_all(config, lease.run)
    start.check_input(config)
    nodes = Nodes(srun(job, config.machine.silence_s), config.machine.silence_s)
    try:
        beginning = _check(job, config, options, nodes, lease.run)
        print(beginning.plan.table(), flush=True)
        beginning.begin()
    except BaseException:
        nodes.__exit__()
        raise
    return supervise(beginning, nodes, options, lease, TimeLimit(beginning.run.stop, options.grace_s).check)


def _check(
    job: Job, config: Config, options: argparse.Namespace, nodes: Nodes, run: RunFolder | None = None
) -> Beginning:
    """Waits for the job's nodes and checks everything; `run`: None if nothing is to be started. Raises ConfigError or
    HostError."""
    found = nodes.gather(job.names, config.machine.gather_s)
    return start.check_nodes(config, found, run, options.python)


class Job(msgspec.Struct):
    """The Slurm allocation that this process runs in."""

    groups: list[list[str]]
    """Names of the nodes; a heterogeneous job has several groups."""

    @property
    def names(self) -> list[str]:
        return [name for group in self.groups for name in group]

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Job:
        """Reads the job from Slurm's environment. Raises ConfigError outside a job, or for a malformed node list."""
        if "SLURM_JOB_ID" not in environment:
            raise ConfigError(
                "areal_megatron.launch.slurm runs inside a Slurm job: submit one of the scripts in slurm/, e.g. "
                "'sbatch slurm/train_32b.sh', or use 'areal submit'; on one machine use areal train; what would run "
                "on nodes that are not there yet is shown by --dry-run --nodes N --gpus N"
            )
        count = int(environment.get("SLURM_HET_SIZE", 0))
        if count not in (0, len(_POOLS)):
            raise ConfigError(
                f"the job has {count} heterogeneous groups; it may have two: trainers' and engines' nodes"
            )
        lists = [environment[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"] for group in range(count)]
        return cls([expand(nodes) for nodes in lists or [environment["SLURM_JOB_NODELIST"]]])


def expand(nodes: str) -> list[str]:
    """Returns the names in a node list such as node[0-3,7]. Raises ConfigError if Slurm cannot read it."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            capture_output=True,
            text=True,
            check=True,
            timeout=_CLIENT_TIMEOUT_S,
            encoding="utf-8",
            errors="replace",
        )
    except FileNotFoundError:
        raise ConfigError(
            "there is no scontrol on this node: areal_megatron.launch.slurm needs Slurm's client programs"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"scontrol did not answer within {_CLIENT_TIMEOUT_S:.0f} s") from None
    except subprocess.CalledProcessError as e:
        raise ConfigError(f"the node list {nodes!r} is malformed: {e.stderr.strip()}") from None
    names = done.stdout.split()
    if not names or any("[" in name or "]" in name for name in names):  # scontrol repeats what it cannot read
        raise ConfigError(f"the node list {nodes!r} is malformed")
    return names


class Srun:
    """The connection to the supervisors: stdin and stdout of an srun for each group of nodes, which passes both on."""

    def __init__(self, commands: list[list[str]], silence_s: float):
        pipe = subprocess.PIPE
        self._processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe) for command in commands]
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        self._decode = msgspec.json.Decoder(Event).decode
        self._sending = threading.Lock()
        for process in self._processes:
            threading.Thread(target=self._read, args=(process,), daemon=True).start()
        self._alive = Repeater(self._say_alive, sign_interval(silence_s)).__enter__()

    def send(self, order: Order) -> None:
        for process in self._processes:
            assert process.stdin is not None
            try:
                with self._sending:
                    process.stdin.write(msgspec.json.encode(order) + b"\n")
                    process.stdin.flush()
            except BrokenPipeError:
                raise HostError(_ended(process)) from None

    def receive(self) -> list[Event]:
        for process in self._processes:
            if process.poll() is not None and self._lines.empty():
                raise HostError(_ended(process))
        lines = [self._lines.get() for _ in range(self._lines.qsize())]
        try:
            return [self._decode(line) for line in lines if line.startswith(b"{")]
        except msgspec.DecodeError as e:  # torn by the end of its node, perhaps with another's in it
            raise HostError(f"srun passed on a line that is no event: {e}") from None

    def close(self) -> None:
        self._alive.__exit__()
        with suppress(HostError):
            self.send(Leave())
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError), self._sending:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_CLIENT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.terminate()  # srun ends its step

    def _say_alive(self) -> None:
        """Tells the supervisors that this process is alive, since they may not notice its end."""
        with suppress(HostError, ValueError):  # stdin has just been closed
            self.send(Present())

    def _read(self, process: subprocess.Popen) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.put(line)


def _ended(process: subprocess.Popen) -> str:
    return f"srun, which holds the nodes' supervisors, ended with exit code {process.poll()}; see its messages above"


def srun(job: Job, silence_s: float) -> Srun:
    """Starts a supervisor on each node. One srun for both groups would pass its stdin on to the last one only."""
    commands = []
    for number, names in enumerate(job.groups):
        several = len(job.groups) > 1
        command = ["srun", *([f"--het-group={number}"] if several else [])]
        command += [
            "--overlap",
            f"--nodes={len(names)}",
            f"--ntasks={len(names)}",
            "--ntasks-per-node=1",
            "--cpu-bind=none",
            "--kill-on-bad-exit=0",
            "--no-kill",
            "--unbuffered",
        ]
        command += [sys.executable, "-m", "areal_megatron.launch.supervision.node", f"--silence-s={silence_s}"]
        commands.append([*command, *(["--pool", _POOLS[number]] if several else [])])
    return Srun(commands, silence_s)


class TimeLimit:
    """The limit of the wait for a run that was asked to stop."""

    def __init__(self, asked: Path, grace_s: float):
        self._asked, self._grace_s = asked, grace_s
        self._since: float | None = None

    def check(self) -> None:
        """Raises HostError if the run was asked to stop more than grace_s ago."""
        if self._since is None and os.path.exists(self._asked):  # Path.exists raises for a stale handle
            self._since = time.monotonic()
        if self._since is not None and time.monotonic() - self._since > self._grace_s:
            raise HostError(f"the run did not stop within {self._grace_s:.0f} s; the job is queued again without it")


class Faults(msgspec.Struct):
    """faults.json in the run folder: how often a job was queued again without having been stopped for another job."""

    job: str
    saved: str
    """The last checkpoint of the run; empty before the first."""
    count: int
    """The times since it was saved."""


def queue_again(run: RunFolder) -> int:
    """Requeues this job and returns the exit code. A job that fails again and again before it saves anything ends here;
    one that only makes room for others does not."""
    try:
        stuck = not is_preempted() and count_fault(run) >= _FRUITLESS
    except OSError as e:
        print(f"warning: this end of the job cannot be counted: {e}", file=sys.stderr)
        stuck = False
    if stuck:
        print(
            f"error: the job has ended {_FRUITLESS} times in a row before it had saved anything, and is not queued "
            "again; after a stop, give it more time than the first number of its --signal",
            file=sys.stderr,
        )
        return Outcome.FAILED
    return requeue()


def count_fault(run: RunFolder) -> int:
    """Notes that this job ends without having been preempted. Returns how often it has since the last checkpoint.

    Raises OSError, also if the run had begun and its folder is away.
    """
    if not run.had_begun and not run.folder.exists():  # the nodes of a new run have not come together
        run.create()
    saved = checkpoint_folder.complete(run)  # unread: the time limit may be near
    faults = Faults(os.environ["SLURM_JOB_ID"], saved[-1].name if saved else "", 1)
    before = read_replaced(run.faults, lambda content: read_record(content, Faults, run.faults))
    if before and (before.job, before.saved) == (faults.job, faults.saved):
        faults.count += before.count
    write_atomically(run.faults, msgspec.json.encode(faults))
    return faults.count


def is_preempted() -> bool:
    """Returns whether Slurm is stopping this job for another one; False if Slurm does not say."""
    shown = node.slurm_client("scontrol", "--oneliner", "show", "job", os.environ["SLURM_JOB_ID"])
    times = {name: value for name, _, value in (field.partition("=") for field in shown.split())}
    preempted = times.get("PreemptTime", "None")
    return preempted[:1].isdigit() and preempted >= times.get("StartTime", "")  # not one of an earlier start


def requeue(longest_s: float = _REQUEUE_S, again_s: float = _AGAIN_S) -> int:
    """Requeues this job and waits for Slurm to end it. Returns the exit code if Slurm refuses for longest_s."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    print("queueing the job again", flush=True)  # said before: Slurm may end this process at once
    deadline = time.monotonic() + longest_s
    while problem := _refusal(os.environ["SLURM_JOB_ID"]):  # a busy slurmctld refuses for a while
        if time.monotonic() > deadline:
            print(
                f"error: the job cannot be queued again: {problem}; submit it once more: resume=auto continues",
                file=sys.stderr,
            )
            return Outcome.STOPPED
        time.sleep(again_s)
    time.sleep(_KILLED_S)
    return Outcome.STOPPED


def _refusal(job: str) -> str:
    """Returns why Slurm does not requeue the job; "" if it does."""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_CLIENT_TIMEOUT_S, encoding="utf-8", errors="replace"
        )
    except subprocess.TimeoutExpired:
        return f"scontrol did not answer within {_CLIENT_TIMEOUT_S:.0f} s"
    return "" if done.returncode == 0 else done.stderr.strip() or f"scontrol ended with exit code {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
