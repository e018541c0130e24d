"""Shared memory of processes: whoever is killed does not remove what he has made."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

_FOLDER = "/dev/shm"
_CLOCK_S = 1.0
"""How far the file system's clock may be behind."""


class SharedMemory:
    """What processes have made of it since this object was.

    Files that others have put there, such as a model, are older or lie in folders, and are left alone.
    """

    def __init__(self):
        self._since = time.time() - _CLOCK_S
        self._paths: set[Path] = set()

    def note(self, processes: Iterable[psutil.Process]) -> None:
        """Remembers what they have mapped."""
        self._paths = {path for path in self._paths | mapped(processes) if self._is_new(path)}

    def remove(self, timeout_s: float = 0.0) -> None:
        """What was noted and no process has mapped; waits for a while until that is so, for others may be ending
        too."""
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
    """Objects of shared memory that they have in their address spaces."""
    paths = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                if _FOLDER in line and not line.endswith(" (deleted)"):
                    path = Path(line[line.index(_FOLDER) :])
                    if str(path.parent) == _FOLDER:
                        paths.add(path)
    return paths
