"""Runs an untrusted Python program, isolated by the Linux kernel; docs/sandbox.md lists what it is isolated from.

sandbox_init.py is the part that runs inside. Needs no root, no helper program and no package.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from areal_megatron.config import ConfigError
from areal_megatron.reward.cgroup import Cgroup
from areal_megatron.reward.sandbox_init import PROGRAM_ID
from areal_megatron.reward.system_calls import seccomp_filter

_INIT = str(Path(__file__).with_name("sandbox_init.py"))
_NOBODY = 65534
_STDERR_BYTES = 64 << 10
_GRACE_S = 5.0
"""The longest time from the order to end a sandbox to its end, in which the kernel frees its memory."""
_OWN_MB = 64
"""The memory of the sandbox's own processes, which share a cgroup with the program."""
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")


class SandboxError(RuntimeError):
    """A failure of the sandbox itself, which says nothing about the program."""


@dataclass(frozen=True)
class Limits:
    """The limits of one program, which is a single process."""

    wall_s: float = 10.0
    """Wall time from the call to the end of the program, including the start of the sandbox."""
    cpu_s: int = 0
    """CPU seconds over all threads; a program that ignores the signal gets one more. 0: wall_s, rounded up."""
    memory_mb: int = 1024
    """Address space; allocations beyond it fail."""
    threads: int = 32
    scratch_mb: int = 64
    """Total size of the files that the program writes; they are lost when it ends."""
    output_mb: int = 8
    """Size of the standard output; a program that prints more is ended."""


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended, and what it printed."""

    ended: str
    """`exit`, `signal`, or the limit that ended the program: `wall_s`, `cpu_s` or `output_mb`."""
    status: int | None
    """The exit status, or the negative number of the signal; None for wall_s and output_mb."""
    stdout: str
    stderr: str
    """The first 64 KiB."""

    @property
    def good(self) -> bool:
        return self.ended == "exit" and self.status == 0


def run(program: str, stdin: str = "", limits: Limits | None = None) -> ProgramResult:
    """Runs the source text of a program until it ends or reaches a limit; all its processes are dead on return.

    Output that is not UTF-8 is decoded with replacement characters. Several threads may call this at once. Raises
    SandboxError if the kernel refuses a part of the isolation; no part of the program has run then.

    Example:
        result = run("print(int(input()) ** 2)", stdin="12\\n", limits=Limits(wall_s=2))
        assert result.good and result.stdout == "144\\n"
    """
    with _Guard(program, stdin, limits or Limits()) as guard:
        guard.watch()
    if "problem" in guard.report:
        raise SandboxError(guard.report["problem"])
    if guard.ended is None and "status" not in guard.report:
        said = guard.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise SandboxError(said or "it was ended from outside")
    return guard.outcome()


def check_isolation(key: str = "reward.function") -> None:
    """Runs one program that probes the limits.

    Raises ConfigError if this machine does not offer the isolation; `key` is the config key, named in the error, that
    requires it.
    """
    try:
        outcome = run(_PROBE, limits=Limits(wall_s=30, threads=8))
        problem = "" if outcome.good else outcome.stderr.strip().rpartition("\n")[2] or f"ended by {outcome.ended}"
    except (SandboxError, OSError, AttributeError) as e:
        problem = str(e)
    if problem:
        raise ConfigError(
            f"{key}: programs cannot be isolated on this machine, so none is run: it needs "
            "Linux 5.14 on x86_64 or aarch64 that lets its users make user namespaces "
            "(docs/sandbox.md says which settings forbid it); "
            f"what failed: {problem}"
        )


_PROBE = """
import ctypes, errno, os, resource, threading
try:
    os.fork()
except PermissionError:
    pass
else:
    raise SystemExit("a program can start processes")
started, end = 0, threading.Event()
try:
    for started in range(64):
        threading.Thread(target=end.wait, daemon=True).start()
except RuntimeError:
    pass
if not 1 <= started < 8:
    raise SystemExit(f"a limit of 8 threads lets {started} start")
libc = ctypes.CDLL(None, use_errno=True)
for name, arguments in {"semget": (0, -1, 0), "inotify_init1": (-1,), "unshare": (-1,), "flock": (-1, -1)}.items():
    # the kernel's own answers to these arguments are others
    if getattr(libc, name)(*arguments) >= 0 or ctypes.get_errno() != errno.EPERM:
        raise SystemExit(f"a program can call {name}")
if libc.fsync(-1):
    raise SystemExit("a program can write what is in the machine's caches")
for name, limit in {"SIGPENDING": 64, "MEMLOCK": 0, "MSGQUEUE": 0, "NICE": 0, "RTPRIO": 0, "NOFILE": 64}.items():
    if resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1] > limit:
        raise SystemExit(f"a program has another limit of {name} than {limit}")
"""


class _Guard:
    """The guard process of one sandbox, and its output."""

    def __init__(self, program: str, stdin: str, limits: Limits):
        self._limits, self._deadline = limits, time.monotonic() + limits.wall_s
        self.stdout, self.stderr, self._reported = bytearray(), bytearray(), bytearray()
        self.ended: str | None = None
        """The limit for which the guard was told to end the sandbox, if any."""
        self.report: dict[str, str] = {}
        """The guard's reports: `unshared`, then `status` or `problem` with its value."""
        numbers = [limits.cpu_s or math.ceil(limits.wall_s), limits.memory_mb, limits.threads, limits.scratch_mb]
        texts = [program.encode(errors="replace"), stdin.encode(errors="replace"), _calls()]
        held_bytes = (limits.memory_mb + limits.scratch_mb + _OWN_MB << 20) + sum(map(len, texts))
        with _memory_file(texts[0]) as text, _memory_file(texts[1]) as given, _memory_file(texts[2]) as calls:
            self._reports, report = os.pipe()
            passed = (text, given, calls, report)
            python = sys._base_executable  # pyright: ignore[reportAttributeAccessIssue]: typeshed lacks it
            command = [python, "-I", "-S", _INIT, *map(str, passed), *map(str, numbers), *_visible()]
            pipe = subprocess.PIPE
            try:
                self._process = subprocess.Popen(
                    command,
                    bufsize=0,
                    stdin=pipe,
                    stdout=pipe,
                    stderr=pipe,
                    env={},
                    cwd="/",
                    pass_fds=passed,
                    start_new_session=True,
                )
            except BaseException:
                os.close(self._reports)
                raise
            finally:
                os.close(report)
        process = self._process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._cgroup = Cgroup(held_bytes, limits.threads + 2)

    def __enter__(self) -> _Guard:
        return self

    def __exit__(self, *failure) -> None:
        process = self._process
        self._stdin.close()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()  # the kernel kills init then
            raise SandboxError(f"its processes did not end within {_GRACE_S:g} s") from None
        finally:
            self._cgroup.remove()
            self._stdout.close()
            self._stderr.close()
            os.close(self._reports)

    def watch(self) -> None:
        """Reads the output until the sandbox has ended, and ends it at a limit. Raises SandboxError."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ, self._take_stdout)
            selector.register(self._stderr, selectors.EVENT_READ, self._take_stderr)
            selector.register(self._reports, selectors.EVENT_READ, self._take_report)
            while selector.get_map():
                left = self._deadline - time.monotonic()
                if self.ended is None and left <= 0:
                    self._end("wall_s")
                elif left <= 0:
                    raise SandboxError(f"its output stayed open for {_GRACE_S:g} s after its end")
                for key, _ in selector.select(max(left, 0)):
                    chunk = os.read(key.fd, 1 << 16)
                    if not chunk:
                        selector.unregister(key.fileobj)
                    key.data(chunk)

    def outcome(self) -> ProgramResult:
        ended, status = self.ended, None
        if ended is None:
            status = int(self.report["status"])
            ended = "exit" if status >= 0 else "cpu_s" if status == -signal.SIGXCPU else "signal"
        return ProgramResult(ended, status, self.stdout.decode(errors="replace"), self.stderr.decode(errors="replace"))

    def _end(self, limit: str) -> None:
        self.ended = limit
        self._stdin.close()
        self._deadline = time.monotonic() + _GRACE_S

    def _take_stdout(self, chunk: bytes) -> None:
        room = (self._limits.output_mb << 20) - len(self.stdout)
        self.stdout += chunk[:room]
        if len(chunk) > room and self.ended is None:
            self._end("output_mb")

    def _take_stderr(self, chunk: bytes) -> None:
        self.stderr += chunk[: _STDERR_BYTES - len(self.stderr)]

    def _take_report(self, chunk: bytes) -> None:
        *lines, self._reported = (self._reported + chunk).split(b"\n")
        for line in lines:
            kind, _, value = line.decode().partition(" ")
            self.report[kind] = value
            if kind == "unshared" and self.ended is None:
                self._cgroup.add(self._process.pid)
                _map_ids(self._process.pid)
                with contextlib.suppress(BrokenPipeError):  # the guard has died: the report will lack a status
                    self._stdin.write(b"\n")


@contextlib.contextmanager
def _memory_file(content: bytes) -> Iterator[int]:
    """Yields the descriptor of an anonymous file."""
    with open(os.memfd_create("sandbox"), "wb") as file:
        file.write(content)
        file.flush()
        yield file.fileno()


@functools.cache
def _calls() -> bytes:
    """Returns the filter of system calls for this machine. Raises SandboxError if there is none."""
    try:
        return seccomp_filter(os.uname().machine)
    except ValueError as e:
        raise SandboxError(str(e)) from None


def _visible() -> list[str]:
    """Returns the paths that a program may read: the Python installation and the system's libraries.

    They are sorted, and none is inside of another.
    """
    paths: list[str] = []
    for path in sorted([os.path.realpath(sys.base_prefix), *filter(os.path.exists, _LIBRARIES)]):
        if not any(Path(path).is_relative_to(above) for above in paths):
            paths.append(path)
    return paths


def _map_ids(pid: int) -> None:
    """Maps root and the program of a new user namespace to users outside. Raises SandboxError."""
    folder, user, group = Path("/proc", str(pid)), os.geteuid(), os.getegid()
    try:
        if user == 0:
            # the kernel does not limit the threads of the machine's root, so the program is mapped to nobody
            try:
                for name in ("uid_map", "gid_map"):
                    (folder / name).write_text(f"0 0 1\n{PROGRAM_ID} {_NOBODY} 1\n", encoding="utf-8")
                return
            except OSError:
                pass  # root of a container without other users, who is not the machine's root
        (folder / "setgroups").write_text("deny", encoding="utf-8")
        (folder / "uid_map").write_text(f"{PROGRAM_ID} {user} 1\n", encoding="utf-8")
        (folder / "gid_map").write_text(f"{PROGRAM_ID} {group} 1\n", encoding="utf-8")
    except OSError as e:
        raise SandboxError(f"mapping users: {e.strerror}") from None
