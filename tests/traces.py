"""What runs may leave on a machine: temporary files, shared memory, locks and listening ports."""

import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from launch.processes import shared_memory

SHARED = Path("/dev/shm")
CACHES = Path.home() / ".cache"
OF_A_DEAD_SERVER_S = 20
"""Where a launcher was killed, its guardian is at work for so long."""


class Traces:
    """Of the runs of one test. Other tests run beside it: what they use is not counted."""

    def __init__(self, *folders: Path):
        """`folders`: where runs lock files, beside the caches of this machine's user."""
        self.temporary = Path(tempfile.mkdtemp())
        """To be TMPDIR of the runs."""
        self._folders = (CACHES, *folders)
        self._shared, self._locks = set(SHARED.iterdir()), set(self._lock_files())
        self._ports: set[int] = set()
        self._watched = 0.0

    def watch(self, processes: Iterable[psutil.Process]) -> None:
        """Their ports are not to be listened on when they have ended."""
        pids = {process.pid for process in processes}
        self._ports |= {connection.laddr.port for connection in _listening() if connection.pid in pids}
        self._watched = time.time()

    def left(self) -> list[str]:
        """Once the runs have ended."""
        used = shared_memory(psutil.process_iter())
        files = [*self.temporary.iterdir(), *(path for path in SHARED.iterdir() if path not in self._shared | used)]
        files += set(self._lock_files()) - self._locks
        return [*map(str, files), *self._open_ports()]

    def check(self, timeout_s: float = OF_A_DEAD_SERVER_S) -> None:
        """Nothing is left, at the latest after timeout_s."""
        deadline = time.monotonic() + timeout_s
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.left() == []
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
