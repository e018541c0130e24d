"""What runs may leave on a machine: temporary files, shared memory, locks and listening ports."""

import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from launch.shared_memory import mapped

CACHES = Path.home() / ".cache"
OF_A_DEAD_SERVER_S = 20
"""Where a launcher was killed, its guardian is at work for so long."""


class Traces:
    """Of the runs of one test. Other tests run beside it and leave what they like: it is not counted."""

    def __init__(self, *folders: Path):
        """`folders`: where runs lock files, beside the caches of this machine's user."""
        self.temporary = Path(tempfile.mkdtemp())
        """To be TMPDIR of the runs."""
        self._folders = (CACHES, *folders)
        self._locks = set(self._lock_files())
        self._shared: set[Path] = set()
        self._ports: set[int] = set()
        self._watched = 0.0

    def watch(self, processes: Iterable[psutil.Process]) -> None:
        """When they have ended, their ports are not to be listened on, and the memory that they share is to be gone."""
        pids = {process.pid: process for process in processes}
        self._shared |= mapped(pids.values())
        self._ports |= {connection.laddr.port for connection in _listening() if connection.pid in pids}
        self._watched = time.time()

    def left(self) -> list[str]:
        """Once the runs have ended."""
        files = {*self.temporary.iterdir(), *filter(Path.exists, self._shared), *self._lock_files()} - self._locks
        return [*map(str, files), *self._open_ports()]

    def check(self, timeout_s: float = OF_A_DEAD_SERVER_S) -> None:
        """Nothing is left, at the latest after timeout_s."""
        deadline = time.monotonic() + timeout_s
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, f"left behind: {left}"
        self.temporary.rmdir()

    def _lock_files(self) -> Iterator[Path]:
        for folder in self._folders:
            yield from folder.rglob("*.lock")

    def _open_ports(self) -> Iterator[str]:
        for connection in _listening():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(connection.pid)
                # one that began later has the number by chance
                if connection.laddr.port in self._ports and process.create_time() < self._watched:
                    yield f"port {connection.laddr.port}, which {process} listens on"


def _listening() -> list:
    return [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid]
