"""Child processes with an owner: each has a log, dies with its parent and takes its descendants along."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
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
    """Ends all children and every descendant: SIGTERM, then SIGKILL for what is left after grace_s."""
    for child in children:
        if child.exit_code is None:
            os.kill(child.pid, signal.SIGTERM)
    for process in _survivors(children, grace_s):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    _survivors(children, 5)


def _survivors(children: list[Child], timeout_s: float) -> list[psutil.Process]:
    """Waits until no process of the children's sessions is left; those that are after timeout_s."""
    sessions = {child.pid for child in children}
    deadline = time.monotonic() + timeout_s
    while True:
        for child in children:
            _ = child.exit_code  # reaps it
        left = _members(sessions)
        if not left or time.monotonic() > deadline:
            return left
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
