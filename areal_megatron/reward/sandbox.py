"""Runs a Python program that nobody has read, isolated by the Linux kernel: docs/rewards.md says from what.

What happens inside is in sandbox_init.py. No root, no helper program and no package is needed.
"""

from __future__ import annotations

import contextlib
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
from areal_megatron.reward.sandbox_init import PROGRAM_ID

_INIT = str(Path(__file__).with_name("sandbox_init.py"))
_NOBODY = 65534
_STDERR_BYTES = 64 << 10
_GRACE_S = 5.0
"""Longest time between the order to end a sandbox and its end: what the kernel needs to free its memory."""
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")


class SandboxError(RuntimeError):
    """The sandbox itself failed; says nothing about the program."""


@dataclass(frozen=True)
class Limits:
    """The program is one process: all but `threads` and `output_mb` are its own and the kernel's to hold."""

    wall_s: float = 10.0
    """Between the call and the end of the program, the start of the sandbox included."""
    cpu_s: int = 0
    """CPU seconds over all threads; a program that ignores the signal has one more. 0: wall_s, rounded up."""
    memory_mb: int = 1024
    """Address space; beyond it allocations fail."""
    threads: int = 32
    scratch_mb: int = 64
    """All files that it writes; lost when it ends."""
    output_mb: int = 8
    """Standard output; it is ended when it prints more."""


@dataclass(frozen=True)
class ProgramResult:
    ended: str
    """`exit`, `signal`, or the limit that ended it: `wall_s`, `cpu_s`, `output_mb`."""
    status: int | None
    """Exit status, or the signal's number below 0; None for wall_s and output_mb."""
    stdout: str
    stderr: str
    """Its first 64 KiB."""

    @property
    def good(self) -> bool:
        return self.ended == "exit" and self.status == 0


def run(program: str, stdin: str = "", limits: Limits | None = None) -> ProgramResult:
    """Runs the text of a program to its end or limit; every process of it is dead on return.

    Output that is no UTF-8 is decoded with replacement characters. May be called by several threads at once. Raises
    SandboxError where the kernel refuses a part of the isolation; nothing of the program has run then.
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
    """Runs one program that tries the limits. Raises ConfigError, naming the config's key that wants it, where the
    machine does not offer the isolation."""
    try:
        outcome = run(_PROBE, limits=Limits(wall_s=30, threads=8))
        problem = "" if outcome.good else outcome.stderr.strip().rpartition("\n")[2] or f"ended by {outcome.ended}"
    except (SandboxError, OSError, AttributeError) as e:
        problem = str(e)
    if problem:
        raise ConfigError(
            f"{key}: programs cannot be isolated on this machine, so none is run: it needs "
            "Linux 5.14 on x86_64 or aarch64 that lets its users make user namespaces "
            "(docs/rewards.md says which settings forbid it); "
            f"what failed: {problem}"
        )


_PROBE = """
import os, threading
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
"""


class _Guard:
    """The guard process of one sandbox, and what comes out of it."""

    def __init__(self, program: str, stdin: str, limits: Limits):
        self._limits, self._deadline = limits, time.monotonic() + limits.wall_s
        self.stdout, self.stderr, self._reported = bytearray(), bytearray(), bytearray()
        self.ended: str | None = None
        """The limit that was reached, if the guard was told to end the sandbox."""
        self.report: dict[str, str] = {}
        """`unshared`; `status` or `problem` with what it is."""
        numbers = [limits.cpu_s or math.ceil(limits.wall_s), limits.memory_mb, limits.threads, limits.scratch_mb]
        with _memory_file(program) as text, _memory_file(stdin) as given:
            self._reports, report = os.pipe()
            passed = (text, given, report)
            command = [sys._base_executable, "-I", "-S", _INIT, *map(str, passed), *map(str, numbers), *_visible()]
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

    def __enter__(self) -> _Guard:
        return self

    def __exit__(self, *failure) -> None:
        process = self._process
        process.stdin.close()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()  # the kernel kills init then
            raise SandboxError(f"its processes did not end within {_GRACE_S:g} s") from None
        finally:
            process.stdout.close()
            process.stderr.close()
            os.close(self._reports)

    def watch(self) -> None:
        """Reads what comes until the sandbox is over; ends it at a limit. Raises SandboxError."""
        process = self._process
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ, self._take_stdout)
            selector.register(process.stderr, selectors.EVENT_READ, self._take_stderr)
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
        self._process.stdin.close()
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
                _map_ids(self._process.pid)
                with contextlib.suppress(BrokenPipeError):  # it has died: the report will lack a status
                    self._process.stdin.write(b"\n")


@contextlib.contextmanager
def _memory_file(text: str) -> Iterator[int]:
    """Descriptor of a file that is in no folder and holds the text."""
    with open(os.memfd_create("sandbox"), "wb") as file:
        file.write(text.encode(errors="replace"))
        file.flush()
        yield file.fileno()


def _visible() -> list[str]:
    """What a program may read: the Python installation and the system's libraries; parents before children."""
    paths: list[str] = []
    for path in sorted([os.path.realpath(sys.base_prefix), *filter(os.path.exists, _LIBRARIES)]):
        if not any(Path(path).is_relative_to(above) for above in paths):
            paths.append(path)
    return paths


def _map_ids(pid: int) -> None:
    """Says who root and the program of a new user namespace are outside. Raises SandboxError."""
    folder, user, group = Path("/proc", str(pid)), os.geteuid(), os.getegid()
    try:
        if user == 0:
            # the kernel does not hold the machine's root to a number of threads, so the program is nobody then
            try:
                for name in ("uid_map", "gid_map"):
                    (folder / name).write_text(f"0 0 1\n{PROGRAM_ID} {_NOBODY} 1\n")
                return
            except OSError:
                pass  # the root of a container that has no other user: somebody else outside
        (folder / "setgroups").write_text("deny")
        (folder / "uid_map").write_text(f"{PROGRAM_ID} {user} 1\n")
        (folder / "gid_map").write_text(f"{PROGRAM_ID} {group} 1\n")
    except OSError as e:
        raise SandboxError(f"mapping users: {e.strerror}") from None
