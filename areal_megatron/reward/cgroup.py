"""A cgroup for each sandbox, where the machine lets its users make them; it counts what resource limits do not.

man page: cgroups(7), about version 2 and delegation.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from pathlib import Path

_PREFIX = "areal-sandbox-"
_REMOVAL_S = 1.0
"""The longest time from the end of the last process in a cgroup to the kernel's notice of it."""
_serial = itertools.count()


class Cgroup:
    """A cgroup with limits of its own, or nothing at all where none can be made."""

    def __init__(self, memory_bytes: int, processes: int):
        """`processes` counts threads too."""
        self._path: Path | None = None
        if (parent := delegated()) is None:
            return
        path = parent / f"{_PREFIX}{os.getpid()}-{next(_serial)}"
        try:
            path.mkdir()
            self._path = path
            (path / "memory.max").write_text(str(memory_bytes), encoding="utf-8")
            (path / "pids.max").write_text(str(processes), encoding="utf-8")
            with contextlib.suppress(OSError):  # a kernel that does not count swap
                (path / "memory.swap.max").write_text("0", encoding="utf-8")
        except OSError:
            self.remove()

    def add(self, pid: int) -> None:
        """Moves a process into the cgroup, and with it all that it will start."""
        if self._path is not None:
            try:
                (self._path / "cgroup.procs").write_text(str(pid), encoding="utf-8")
            except OSError:
                self.remove()

    def remove(self) -> None:
        """Removes the cgroup, whose processes have ended."""
        path, self._path = self._path, None
        deadline = time.monotonic() + _REMOVAL_S
        while path is not None:
            try:
                path.rmdir()
            except OSError:
                if time.monotonic() < deadline:
                    time.sleep(0.005)
                    continue
            return


@functools.cache
def delegated() -> Path | None:
    """Returns the cgroup in which this process may make others, and removes what killed processes have left there.

    This is the parent of the process's own, which must be writable and give its children the controllers of memory and
    of processes; None without.
    """
    try:
        own = next(
            line
            for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
            if line.startswith("0::/")
        )[3:]
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()]
        top = next(words[4] for words in mounts if words[words.index("-") + 1] == "cgroup2" and words[3] == "/")
        parent = Path(top + own).parent
        controllers = (parent / "cgroup.subtree_control").read_text(encoding="utf-8").split()
    except (OSError, StopIteration):
        return None
    writable = os.access(parent, os.W_OK) and os.access(parent / "cgroup.procs", os.W_OK)
    if own == "/" or ".." in own or not writable or not {"memory", "pids"} <= set(controllers):
        return None
    for left in parent.glob(f"{_PREFIX}*"):
        if not Path("/proc", left.name.removeprefix(_PREFIX).partition("-")[0]).exists():
            with contextlib.suppress(OSError):
                left.rmdir()
    return parent
