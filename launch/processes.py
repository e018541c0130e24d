"""Child processes with an owner: each has a log, dies with its parent and takes its descendants along."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Child:
    """One process of a run, in a session of its own, its output in `log`, pinned to `cores` if there are any."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log: Path, cores: set[int]):
        def before_exec() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if cores:
                os.sched_setaffinity(0, cores)

        self.name, self.log = name, log
        with log.open("ab") as output:
            self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                                             stderr=subprocess.STDOUT, start_new_session=True,
                                             preexec_fn=before_exec)  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: ended by that signal."""
        return self._process.poll()

    @property
    def last_write(self) -> float:
        """When the log was written to for the last time."""
        return self.log.stat().st_mtime

    def last_lines(self, count: int = 15) -> str:
        with self.log.open("rb") as f:
            f.seek(max(0, os.path.getsize(self.log) - 20000))
            return "\n".join(f.read().decode(errors="replace").splitlines()[-count:])


def stop(children: list[Child], grace_s: float = 10.0) -> None:
    """Ends all children and every descendant: SIGTERM to the children, SIGKILL for whoever is left.

    A child has grace_s to end by itself, its descendants a second more.
    """
    for child in children:
        if child.exit_code is None:
            os.kill(child.pid, signal.SIGTERM)
    _wait(lambda: all(child.exit_code is not None for child in children), grace_s)
    sessions = {child.pid for child in children}
    _wait(lambda: not _members(sessions), 1.0)
    for process in _members(sessions):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    _wait(lambda: all(child.exit_code is not None for child in children) and not _members(sessions), 5.0)


def _wait(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def _members(sessions: set[int]) -> list[psutil.Process]:
    """Living processes that belong to one of the sessions."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess, PermissionError):
            continue
    return members
