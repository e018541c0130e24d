"""A real Slurm cluster of virtual nodes on this one machine: munged, slurmctld and a slurmd for every node.

Every daemon is a child of the test's process. The processes that they start are found by two environment variables:
SLURM_CONF, of which every cluster has its own, and SLURMD_NODENAME. slurmstepd overwrites its environment with its
title and is found by its working directory.
"""

from __future__ import annotations

import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

from areal_megatron.launch.supervision.processes import Children
from tests.support import debian
from tests.support.living import is_alive

T = TypeVar("T")
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"})

_CONFIGURATION = """
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
{plugins}
AuthInfo=socket={folder}/munge/socket,cred_expire=10
{addresses}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
TmpFS={folder}/tmp
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldDebug=info
SlurmdDebug=info
ProctrackType=proctrack/linuxproc
PlugStackConfig={folder}/plugstack.conf
MailProg=/bin/true
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
JobRequeue=1
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=15
MinJobAge=3600
PropagateResourceLimits=NONE
{gres}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace_s}
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


class ClusterError(RuntimeError):
    """A daemon, a client program or a job that does not do what it should."""


class Cluster:
    """A Slurm cluster. `with Cluster(folder) as cluster:` starts it and waits until its nodes node0, node1, … are idle.

    The daemons' logs go to `folder`. Jobs of partition `high` preempt those of `main`, which get USR1 at once if they
    asked for it by --signal, are killed after grace_s and run again. Leaving ends every daemon and every process that
    jobs have left. Skips the test if there is no Slurm.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int = 4,
        cpus: int = 64,
        gpus: int = 0,
        grace_s: int = 20,
        environment: Mapping[str, str] = os.environ,
    ):
        """`cpus` and `gpus` of every node may exceed the machine's; programs and jobs get `environment`."""
        self._programs, self.logs, self._base = debian.slurm(), folder, environment
        self._cpus, self._gpus, self._grace_s = cpus, gpus, grace_s
        self.nodes = [f"node{number}" for number in range(nodes)]
        #: Nodes that have failed and are not restored.
        self.failed: set[str] = set()

    def __enter__(self) -> Cluster:
        # paths of sockets have 107 characters at most, and munged wants its own to be accessible to everyone
        self._folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        own = {name: value for name, value in self._base.items() if not name.startswith(("SLURM", "SBATCH_", "SRUN_"))}
        #: The environment to run Slurm's programs with.
        self.environment = {**self._programs.environment(own), "SLURM_CONF": str(self._folder / "slurm.conf")}
        self._children = Children().__enter__()
        try:
            self._configure()
            self._start_munged()
            self._start("slurmctld", "-D", "-c")
            for node in self.nodes:
                self._start_node(node)
            self._await(lambda: self.idle() == set(self.nodes), 30, "not every node became idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        try:
            self._cancel_jobs()
            self._kill(self.processes)
        finally:
            self._children.__exit__()
            shutil.rmtree(self._folder)

    def run(self, *command: str, timeout_s: float = 30) -> str:
        """Runs one of Slurm's client programs and returns its output.

        Raises ClusterError with what it wrote to stderr if it fails or takes longer than timeout_s.
        """
        program = self._programs.program(command[0])
        try:
            done = subprocess.run(
                [program, *command[1:]],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{' '.join(command)}: nothing within {timeout_s} s: {error.stderr}") from None
        if done.returncode:
            raise ClusterError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def submit(self, script: Path, *options: str, arguments: Iterable[str] = ()) -> str:
        """Submits a batch script with these arguments; returns the id of the job. Its log is `folder`/JOB.out."""
        output = f"--output={self.logs}/%j.out"
        return self.run("sbatch", "--parsable", "--open-mode=append", output, *options, str(script), *arguments).strip()

    def output(self, job: str) -> str:
        """Returns what a job of `submit` has written so far, in all of its runs."""
        log = self.logs / f"{job}.out"
        return log.read_text() if log.exists() else ""

    def state(self, job: str) -> str:
        """Returns the state that squeue shows (PENDING, RUNNING, COMPLETED, …); all states of a heterogeneous job."""
        states = self.run("squeue", "-h", "-t", "all", "-o", "%T", "-j", job).split()
        return " ".join(sorted(set(states)))

    def wait(self, job: str, states: Collection[str] = ENDED, timeout_s: float = 60) -> str:
        """Waits until the state of the job is one of `states` and returns it. Raises ClusterError after timeout_s."""
        problem = f"job {job} is not {' or '.join(sorted(states))}"
        return self._await(lambda: {self.state(job)} & set(states), timeout_s, problem, job).pop()

    def idle(self) -> set[str]:
        """Returns the names of the nodes that are up and have no job."""
        return self._in_state("idle")

    def fail(self, node: str) -> None:
        """Simulates a power loss: the node's slurmd and all that runs on it end at once.

        Slurm finds out after SlurmdTimeout, 10 s.
        """
        self.failed.add(node)
        self._kill(lambda: self.processes(node))
        _ = self._children.by_name[node].exit_code  # reaps it

    def restore(self, node: str) -> None:
        """Switches a node on again and waits until Slurm may use it.

        Slurm runs the node's jobs again if they are older than 20 s or if it has noticed the loss; a younger one stays
        RUNNING without a process.
        """
        shutil.rmtree(self._folder / "spool" / node)
        self._start_node(node)
        self._await(lambda: node in self._in_state("idle,alloc,mix"), 30, f"{node} is not up")
        self.failed.discard(node)

    def processes(self, node: str = "") -> list[psutil.Process]:
        """Returns daemons and the processes of jobs, on all nodes or on one."""
        variables = {"SLURM_CONF": self.environment["SLURM_CONF"]} | ({"SLURMD_NODENAME": node} if node else {})
        folder = self._folder / "spool" / node
        return _processes(lambda p: Path(p.cwd()).is_relative_to(folder) or variables.items() <= p.environ().items())

    def _configure(self) -> None:
        self._folder.chmod(0o755)
        self.logs.mkdir(parents=True, exist_ok=True)
        for name in ("munge", "key", "state", "spool", "dev", "tmp"):
            (self._folder / name).mkdir()
            (self._folder / name).chmod(0o700 if name in ("key", "state") else 0o755)
        for gpu in range(self._gpus):
            (self._folder / "dev" / f"nvidia{gpu}").symlink_to("/dev/null")  # Slurm wants a device of that name
        host, plugins = socket.gethostname().partition(".")[0], self._programs.folder("usr/lib/*/slurm-wlm")
        port, *ports = _free_ports(1 + len(self.nodes))
        nodes = [
            f"NodeName={name} Port={port} NodeHostname={host} NodeAddr=127.0.0.1 CPUs={self._cpus} RealMemory=200000"
            + (f" Gres=gpu:{self._gpus}" if self._gpus else "")
            for name, port in zip(self.nodes, ports, strict=True)
        ]
        text = _CONFIGURATION.format(
            host=host,
            port=port,
            user=pwd.getpwuid(os.getuid()).pw_name,
            plugins=f"PluginDir={plugins}" if plugins else "",
            folder=self._folder,
            # Slurm listens on the address of its host's name; if that is not loopback, it must listen on all
            addresses="CommunicationParameters=NoCtldInAddrAny,NoInAddrAny" if _is_loopback(host) else "",
            gres="GresTypes=gpu" if self._gpus else "",
            nodes="\n".join(nodes),
            grace_s=self._grace_s,
        )
        (self._folder / "slurm.conf").write_text(text)
        (self._folder / "plugstack.conf").touch()
        devices = f"{self._folder}/dev/nvidia[0-{self._gpus - 1}]"
        gres = f"NodeName={','.join(self.nodes)} Name=gpu File={devices}\n" if self._gpus else ""
        (self._folder / "gres.conf").write_text(f"AutoDetect=off\n{gres}")

    def _start_munged(self) -> None:
        key = self._folder / "key" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        paths = {
            "key-file": key,
            "seed-file": key.with_name("seed"),
            "log-file": key.with_name("log"),
            "pid-file": key.with_name("pid"),
            "socket": self._folder / "munge" / "socket",
        }
        self._start("munged", "--foreground", "--num-threads=2", *(f"--{name}={path}" for name, path in paths.items()))
        self._await(paths["socket"].exists, 10, "munged has no socket")

    def _start_node(self, node: str) -> None:
        (self._folder / "spool" / node).mkdir()
        # -b: report that the node has booted, as after a power loss, however short
        self._start("slurmd", "-D", "-b", "-N", node, "-d", self._programs.program("slurmstepd"), node=node)

    def _start(self, program: str, *arguments: str, node: str = "") -> None:
        environment, name = {**self.environment, "SLURMD_NODENAME": node} if node else self.environment, node or program
        command = ["env", f"--chdir={self._folder / 'spool' / node}", self._programs.program(program), *arguments]
        self._children.start(name, command, environment, self.logs / f"{name}.log", set())

    def _in_state(self, states: str) -> set[str]:
        return set(self.run("sinfo", "-h", "-N", "-t", states, "-o", "%N").split())

    def _cancel_jobs(self) -> None:
        """Cancels all jobs; the caller kills what does not end at once."""
        with suppress(ClusterError):  # there may be no slurmctld to ask
            if jobs := self.run("squeue", "-h", "-o", "%A", timeout_s=5).split():
                self.run("scancel", *sorted(set(jobs)), timeout_s=5)
                deadline = time.monotonic() + 2
                while self.run("squeue", "-h", timeout_s=5) and time.monotonic() < deadline:
                    time.sleep(0.1)

    def _kill(self, find: Callable[[], list[psutil.Process]]) -> None:
        """Kills the processes that `find` returns until it returns none.

        All are stopped first, so that no daemon is left to report the end of another process. Children end before their
        parents: when a stopped process loses a parent in another group, the kernel sends it SIGHUP and SIGCONT, and
        srun would still cancel its step on the other nodes.
        """
        deadline = time.monotonic() + 10
        while processes := find():
            if time.monotonic() > deadline:
                raise ClusterError(f"processes that do not end: {processes}")
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for process in processes:
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(number)
            time.sleep(0.02)

    def _await(self, condition: Callable[[], T], timeout_s: float, problem: str, job: str = "") -> T:
        """Returns the first true value of condition(). Tries again when a client program fails: slurmctld is busy."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with suppress(ClusterError):
                if value := condition():
                    return value
            time.sleep(0.1)
        details = [f"{problem} after {timeout_s} s"]
        with suppress(ClusterError):
            details += [self.run("scontrol", "show", "job", job)] if job else []
            details += [self.run("sinfo", "-N", "-o", "%N %T %E")]
        details += [f"{child.log}:\n{child.last_lines(8)}" for child in self._children.by_name.values()]
        raise ClusterError("\n".join(details))


def _processes(wanted: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """Returns living processes that are wanted, and their descendants, youngest first, without this process."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and wanted(process):
                found |= {process, *process.children(recursive=True)}
    return sorted(filter(is_alive, found), key=lambda p: (p.create_time(), p.pid), reverse=True)


def _is_loopback(host: str) -> bool:
    try:
        return socket.gethostbyname(host) == "127.0.0.1"
    except OSError:
        return False


def _free_ports(count: int) -> list[int]:
    """Returns free ports below the ephemeral range, which are likely to be free a moment later."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(10000, 30000), 1000):
        with socket.socket() as candidate:
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise ClusterError("no free ports between 10000 and 30000")
