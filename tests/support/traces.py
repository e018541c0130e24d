"""What runs may leave on a machine: temporary files, shared memory, locks and listening ports."""

import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from areal_megatron.launch.supervision.shared_memory import mapped

CACHES = Path.home() / ".cache"
_LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp."""
GUARDIAN_S = 20
"""How long the guardian of a killed launcher may take to clean up."""


class Traces:
    """What the runs of one test leave behind. What other tests leave that run at the same time is not counted."""

    def __init__(self, *folders: Path):
        """`folders`: where runs lock files, besides the caches of this machine's user."""
        self.temporary = Path(tempfile.mkdtemp())
        """The folder that must be TMPDIR of the runs."""
        self._folders = (CACHES, *folders)
        self._locks = set(self._lock_files())
        self._shared: set[Path] = set()
        self._sockets: set[str] = set()
        self.wildcards: set[str] = set()
        """Ports on which watched processes have listened on every address of the machine."""

    def watch(self, processes: Iterable[psutil.Process]) -> None:
        """Notes the listening sockets and the shared memory of these processes, which must be gone when they have
        ended."""
        processes, listening = list(processes), _listening()
        self._shared |= mapped(processes)
        for process in processes:
            for socket in listening.keys() & _sockets(process):
                self._sockets.add(socket)
                address, port = listening[socket]
                if not address.strip("0"):
                    self.wildcards.add(f"port {port} of {_command(process)}")

    def left(self) -> list[str]:
        """Returns what is left behind; call it once the runs have ended."""
        files = {*self.temporary.iterdir(), *filter(Path.exists, self._shared), *self._lock_files()} - self._locks
        return [*map(str, files), *self._open_ports()]

    def check(self, timeout_s: float = GUARDIAN_S) -> None:
        """Asserts that nothing is left after at most timeout_s."""
        deadline = time.monotonic() + timeout_s
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, f"left behind: {left}"
        self.temporary.rmdir()

    def _lock_files(self) -> Iterator[Path]:
        for folder in self._folders:
            for base, _, names in os.walk(folder):  # continues if another test removes what it walks
                yield from (Path(base, name) for name in names if name.endswith(".lock"))

    def _open_ports(self) -> Iterator[str]:
        """Yields sockets that are still listened on; a port number alone may soon be another process's."""
        if left := {socket: port for socket, (_, port) in _listening().items() if socket in self._sockets}:
            for process in psutil.process_iter():
                yield from (
                    f"port {left[socket]}, which {process} listens on" for socket in left.keys() & _sockets(process)
                )


def _listening() -> dict[str, tuple[str, int]]:
    """Returns socket → address, as the kernel writes it, and port of each TCP socket that is listened on."""
    lines = [line for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    sockets = (line.split() for line in lines)
    places = {fields[9]: fields[1].split(":") for fields in sockets if fields[3] == _LISTEN}
    return {socket: (address, int(port, 16)) for socket, (address, port) in places.items()}


def _command(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())[:200]
    return f"process {process.pid}"


def _sockets(process: psutil.Process) -> set[str]:
    """Returns the numbers (inodes) of the sockets that a process holds."""
    found = set()
    with suppress(OSError):
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):
                kind, _, number = os.readlink(link).partition(":")
                found |= {number.strip("[]")} if kind == "socket" else set()
    return found
