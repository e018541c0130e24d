"""Child processes that have a log and a session each, and that do not outlive their owner."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from areal_megatron.launch.supervision.out_of_memory import OutOfMemory
from areal_megatron.launch.supervision.shared_memory import SharedMemory
from areal_megatron.process.errors import worth_a_line
from areal_megatron.process.lifeline import DESCRIPTOR

NO_PROGRAM = 127
"""The exit code of what cannot be started, as in shells."""
LOG_BYTES = 64 * 2**20
"""The size at which a log is moved aside: a process has at most twice as much on disk."""
_ROTATE_S = 60.0
_NOTE_S = 5.0
_GUARD_S = 1.0
_OTHERS_END_S = 1.0
_KILLED_S = 5.0
_GONE_S = 60.0
"""Longest wait for what was ended before something else is started: to free the memory of GPUs takes seconds."""
_GONE_LOOK_S = 0.5
_NVIDIA_SMI_S = 10.0
_LONGEST_BASE = 48


class Log:
    """The log of a process, wherever that runs."""

    def __init__(self, name: str, log: Path):
        """To be made before the process is started: what its log holds by then is of an earlier one."""
        self.name, self.log = name, log
        self.begin = 0
        """Where in the log the process begins."""
        with suppress(OSError):
            self.begin = log.stat().st_size

    @property
    def last_write(self) -> float:
        """Seconds since the epoch of the last write; 0 if there is no log yet, or none that can be read."""
        try:
            return self.log.stat().st_mtime
        except OSError:
            return 0.0

    def last_lines(self, count: int = 15) -> str:
        """Returns the end of what the process has written; "" if that is nothing, or cannot be read."""
        return "\n".join(self.last_bytes(20000).decode(errors="replace").splitlines()[-count:])

    def last_bytes(self, most: int) -> bytes:
        """Returns so much of the end of what the process has written; b"" if that cannot be read."""
        try:
            with self.log.open("rb") as f:
                size = os.fstat(f.fileno()).st_size
                f.seek(max(0, size - most, self.begin if self.begin <= size else 0))  # it may have been moved aside
                return f.read()
        except OSError:
            return b""


class Child(Log):
    """A child process in a session of its own, with its output in `log`, pinned to `cores` if there are any.

    One that cannot be started has ended already, with exit code NO_PROGRAM, and says why at the end of its log.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        log: Path,
        cores: set[int],
        memory: OutOfMemory,
        inherited: Collection[int] = (),
    ):
        """`inherited`: descriptors that it gets, beside its log."""
        super().__init__(name, log)
        self._memory = memory
        self._process: subprocess.Popen | None = None
        self._code: int | None = None
        self.session: int | None = None
        """The id of its session, until that was ended; None if it could not be started."""
        self.problem = ""
        """Why it could not be started."""
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=tuple(inherited),
                    preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
                )
            self.session = self._process.pid
        except (OSError, ValueError, subprocess.SubprocessError) as e:  # no such program, a full disk, no more memory
            self.problem = f"error: {command[0]} cannot be started: {e}"
            with suppress(OSError):
                log.open("a", encoding="utf-8").write(f"{self.problem}\n")

    @property
    def pid(self) -> int | None:
        """The id of the process; None if it could not be started."""
        return self._process.pid if self._process else None

    @property
    def exit_code(self) -> int | None:
        """None while the process runs; negative if that signal ended it.

        The kernel keeps its id for it until `let_go`: a process that has the id of an ended one, and a session of that
        id, is another's.
        """
        if self._process is None:
            return NO_PROGRAM
        if self._code is None:
            try:
                found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # whoever has started this program ignores SIGCHLD
                return self._process.poll()
            if found:
                self._code = found.si_status * (1 if found.si_code == os.CLD_EXITED else -1)
        return self._code

    def let_go(self) -> int | None:
        """Returns the id of its session, which has been ended, and gives it back to the kernel; None if it has none."""
        if self._process is None or self.session is None or self.exit_code is None:
            return None
        session, self.session = self.session, None
        self._process.poll()
        return session

    def last_bytes(self, most: int) -> bytes:
        return super().last_bytes(most) or self.problem.encode()[:most]

    @property
    def out_of_memory(self) -> bool:
        """Whether it was killed just now, while the kernel was short of memory."""
        return self.exit_code == -signal.SIGKILL and self._memory.look()


class Children:
    """The child processes of this one. A context manager: leaving it ends them and all their descendants.

    It also removes their temporary files, which share a folder, and their shared memory. If this process is killed, a
    guardian process (guardian.py), which notices the end of a pipe, does all that in its place. If both are killed, the
    processes of a run notice the end of another pipe (lifeline.py).
    """

    def __init__(self):
        self.by_name: dict[str, Child] = {}
        self._rotated = self._noted = self._guarded = time.monotonic()
        self._shared = SharedMemory()
        base = tempfile.gettempdir()  # paths of sockets in it have 107 characters at most
        self._ended: set[psutil.Process] = set()
        self._temporary = tempfile.mkdtemp(prefix="areal-", dir=base if len(base) < _LONGEST_BASE else "/tmp")
        self._memory = OutOfMemory()
        self._lifeline = os.pipe()
        self._guardian, self._guardians = self._new_guardian(), 1

    @property
    def guardian(self) -> int:
        """The id of the guardian process, of which there may be one after the other."""
        return self._guardian.pid

    def _new_guardian(self) -> subprocess.Popen:
        command = [sys.executable, "-m", "areal_megatron.launch.supervision.guardian", self._temporary]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert process.stdin is not None
        self._guardian_hears = process.stdin
        return process

    def _tell_guardian(self, session: int | None) -> None:
        """Tells it of a session, or by a negative id of one that was ended."""
        if session is None:
            return
        with suppress(BrokenPipeError):  # it has just been killed: the next one learns of all
            self._guardian_hears.write(f"{session}\n".encode())
            self._guardian_hears.flush()

    def _keep_guardian(self) -> None:
        """Starts another guardian if that was killed."""
        if self._guardian.poll() is None:
            return
        if worth_a_line(self._guardians):
            print(
                f"process {self.guardian}, which ends all others if this one is killed, has ended: another is started",
                file=sys.stderr,
                flush=True,
            )
        with suppress(BrokenPipeError):
            self._guardian_hears.close()
        self._guardian, self._guardians = self._new_guardian(), self._guardians + 1
        for child in self.by_name.values():
            self._tell_guardian(child.session)

    def start(self, name: str, command: list[str], environment: dict[str, str], log: Path, cores: set[int]) -> Child:
        if earlier := self.by_name.get(name):
            self.kill(earlier.name)  # it may have left descendants
        self._await_ended(name)
        held, _ = self._lifeline
        environment = environment | {"TMPDIR": self._temporary, DESCRIPTOR: str(held)}
        child = self.by_name[name] = Child(name, command, environment, log, cores, self._memory, {held})
        self._tell_guardian(child.session)
        return child

    def kill(self, name: str) -> None:
        """Ends a child, which gets one second to end by itself, and its descendants."""
        self._end([self.by_name[name]], grace_s=1.0)

    def end(self, keep: Collection[str] = ()) -> None:
        """Ends all children but those to `keep`, with all their descendants."""
        self._end([child for name, child in self.by_name.items() if name not in keep])

    def _end(self, children: Collection[Child], grace_s: float = 3.0) -> None:
        self._ended |= end_sessions({child.session for child in children}, self._shared, grace_s)
        for child in children:
            if (session := child.let_go()) is not None:
                self._tell_guardian(-session)

    def _await_ended(self, name: str) -> None:
        """Waits until the processes that were ended are gone, and the memory of GPUs that they had: `name`, which is
        about to start, needs it. Says what it waits for, and gives up after _GONE_S."""
        deadline, said = time.monotonic() + _GONE_S, False
        while left := [process.pid for process in self._ended if _is_alive(process)] or self._on_gpus():
            what = f"earlier processes that are ending or have memory of a GPU: {', '.join(map(str, left))}"
            if time.monotonic() > deadline:
                print(f"{name} is started after {_GONE_S:.0f} s beside {what}", file=sys.stderr, flush=True)
                break
            if not said:
                print(f"{name} waits for {what}", file=sys.stderr, flush=True)
                said = True
            time.sleep(_GONE_LOOK_S)
        self._ended.clear()

    def _on_gpus(self) -> list[int]:
        """Returns the ids of ended processes that GPUs still know."""
        return sorted({process.pid for process in self._ended} & gpu_processes()) if self._ended else []

    def look_after(self) -> None:
        """Moves long logs aside, notes shared memory, since children may end by themselves, and sees to the guardian.
        To be called often."""
        now = time.monotonic()
        if now - self._guarded >= _GUARD_S:
            self._guarded = now
            self._keep_guardian()
            self._memory.look()
        if now - self._noted >= _NOTE_S:
            self._noted = now
            self._shared.note(_members({child.session for child in self.by_name.values()}))
        if now - self._rotated >= _ROTATE_S:
            self._rotated = now
            self._rotate_logs()

    def _rotate_logs(self) -> None:
        """Moves the contents of long logs aside, in place of what was there."""
        for child in self.by_name.values():
            with suppress(OSError):  # a full disk, or a shared one that is not there: a minute later again
                if child.log.stat().st_size > LOG_BYTES:
                    shutil.copyfile(child.log, child.log.with_name(f"{child.log.name}.1"))
                    os.truncate(child.log, 0)  # the process appends, and so continues at the new end
                    child.begin = 0

    def forget(self, keep: Collection[str] = ()) -> None:
        """Forgets children that have ended: all but those to `keep`."""
        for name in self.by_name.keys() - keep:
            del self.by_name[name]

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_) -> None:
        with _uninterrupted():
            self.end()
            self._shared.remove(_OTHERS_END_S)
            shutil.rmtree(self._temporary, ignore_errors=True)  # first: a SIGKILL for everybody may follow soon
            self._guardian.communicate(timeout=60)  # closes its pipe: it finds no process left and ends
            for descriptor in self._lifeline:
                os.close(descriptor)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignores SIGTERM and SIGINT: asking this process to end once more, as Slurm and people do, must not interrupt its
    ending."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_sessions(sessions: Collection[int | None], shared: SharedMemory, grace_s: float = 3.0) -> set[psutil.Process]:
    """Ends every process of the sessions: SIGTERM to their leaders, then SIGKILL to all that are left. Returns them;
    some may not be gone yet, as the kernel first frees their memory, on GPUs too.

    A leader has grace_s to end by itself, its descendants a second more. Their shared memory is removed.
    """
    members = set(_members(sessions))
    shared.note(members)
    for process in members:
        if process.pid in sessions:
            _signal(process, signal.SIGTERM)
    _wait(lambda: not any(process.pid in sessions for process in _members(sessions)), grace_s)
    _wait(lambda: not _members(sessions), 1.0)
    left = set(_members(sessions))
    for process in left:
        _signal(process, signal.SIGKILL)
    _wait(lambda: not _members(sessions), _KILLED_S)
    shared.remove()
    return members | left


def gpu_processes() -> set[int]:
    """Returns the ids of the processes that have memory of this machine's GPUs; none if nvidia-smi does not say."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, encoding="utf-8", errors="replace"
        ).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return {int(pid) for pid in found if pid.isdigit()}


def _is_alive(process: psutil.Process) -> bool:
    """Whether any thread of the process is left: its first one is a zombie while the others still end."""
    try:
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        return False


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _wait(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def _members(sessions: Collection[int | None]) -> list[psutil.Process]:
    """Returns the living processes that belong to one of the sessions."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) in sessions and _is_alive(process):
                members.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess, PermissionError):
            continue
    return members
