"""Removes the shared memory of processes, since those that are killed leave it behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

_FOLDER = "/dev/shm"
_CLOCK_S = 1.0
"""How far the file system's clock may lag behind."""


class SharedMemory:
    """The objects in /dev/shm that given processes have made since this one was made.

    Files that others have put there, such as a model, are older or in folders, and are left alone.
    """

    def __init__(self):
        self._since = time.time() - _CLOCK_S
        self._paths: set[Path] = set()

    def note(self, processes: Iterable[psutil.Process]) -> None:
        """Remembers what the processes have mapped."""
        self._paths = {path for path in self._paths | mapped(processes) if self._is_new(path)}

    def remove(self, timeout_s: float = 0.0) -> None:
        """Removes what was noted and no process has mapped any more; waits up to timeout_s for processes that are about
        to end."""
        deadline = time.monotonic() + timeout_s
        while self._paths:
            kept = self._paths & mapped(psutil.process_iter())
            for path in self._paths - kept:
                path.unlink(missing_ok=True)
            self._paths = kept
            if time.monotonic() >= deadline:
                return
            time.sleep(0.1)

    def _is_new(self, path: Path) -> bool:
        with contextlib.suppress(OSError):
            return path.stat().st_ctime >= self._since
        return False


def mapped(processes: Iterable[psutil.Process]) -> set[Path]:
    """Returns the objects of shared memory in the address spaces of the processes."""
    paths = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8").splitlines():
                if _FOLDER in line and not line.endswith(" (deleted)"):
                    path = Path(line[line.index(_FOLDER) :])
                    if str(path.parent) == _FOLDER:
                        paths.add(path)
    return paths
