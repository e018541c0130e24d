"""Files that a thread writes, so that a slow, hung or full disk neither holds up nor ends the process.

All files of a process share one thread. What may be lost is best effort: if it cannot be written now it never is. What
must not be lost is kept in memory and tried again until the disk takes it. Either way a file that cannot be written is
named once in the log, and once a minute while something is kept for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from areal_megatron.process.files import drop_torn_line
from areal_megatron.run.folder import Away, Replaced

log = logging.getLogger(__name__)
FLUSH_S = 10.0
"""How long a process waits at its end for a disk that does not take what has yet to be written."""
_GATHER_S = 0.05
"""What is written within this time is written at once."""
_RETRY_S = 1.0
_REMIND_S = 60.0
_MOST_WAITING = 1 << 18
"""Most bytes that wait for a file that is best effort, while its disk hangs."""


class BackgroundFile(ABC):
    """A file that the writing thread looks after, from its making to `close`.

    `check` is called by that thread before each write. Once it has raised Replaced nothing is written any more, and
    `write` raises it too.
    """

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None):
        self._path, self._check = path, check
        self._replaced: Replaced | None = None
        self._lock = threading.Lock()
        """Guards what is waiting; never held during a call to the disk."""
        self._failed_at: float | None = None
        self._told_at = 0.0
        self.failures = 0
        """How often something could not be written."""
        _thread.add(self)

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Waits until everything is written, at most timeout_s. Returns whether it is. Raises Replaced."""
        written = self._settle(timeout_s)
        self._refuse()
        return written

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Waits as `flush` does, and says so if something cannot be written."""
        if not self._settle(timeout_s):
            log.error("%s: %s could not be written", self._path, self._waiting())
        _thread.remove(self)

    def _settle(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._waiting() and time.monotonic() < deadline:
            time.sleep(_GATHER_S / 5)
        return not self._waiting()

    def _refuse(self) -> None:
        if self._replaced:
            raise self._replaced

    @abstractmethod
    def _waiting(self) -> str:
        """What has yet to be written, in words; "" if nothing has."""

    @abstractmethod
    def _write(self) -> None:
        """Writes what is waiting."""

    @abstractmethod
    def _drop(self) -> None:
        """Forgets what is waiting."""

    @abstractmethod
    def _give_up(self) -> str:
        """What becomes of that if it cannot be written, in words."""

    def attempt(self) -> None:
        """Called by the writing thread alone."""
        if not self._waiting():
            return
        try:
            self._check()
            self._write()
        except Replaced as e:
            self._replaced = e
            self._drop()
        except Away as e:  # said once for all files, which wait in memory or show what was before
            if not _thread.is_away:
                log.warning("%s; nothing is written until it is back", e)
            _thread.is_away = True
            self._give_up()
        except Exception as e:  # the thread serves other files too
            self.failures += 1
            outcome, now = self._give_up(), time.monotonic()
            if self._failed_at is None or (self._waiting() and now - self._told_at >= _REMIND_S):
                log.error("%s cannot be written: %s; %s", self._path, getattr(e, "strerror", None) or repr(e), outcome)
                self._told_at = now
            self._failed_at = self._failed_at or now
        else:
            _thread.is_away = False
            if self._failed_at is not None:
                log.warning("%s can be written again, after %.0f s", self._path, time.monotonic() - self._failed_at)
                self._failed_at = None


class AppendedFile(BackgroundFile):
    """A file that only grows, and that nobody else writes. With `kept` nothing that is written gets lost.

    `lines`: an unfinished last line, left by a writer that died, is removed first.

    Example:
        file = AppendedFile(run.metrics, kept=True)
        file.write(b'{"version": 1}\n')
        file.close()
    """

    def __init__(self, path: Path, *, kept: bool, lines: bool = True, check: Callable[[], None] = lambda: None):
        self._kept, self._lines = kept, lines
        self._data = bytearray()
        self._file: int | None = None
        self._end = 0
        """The size of the file without what is waiting: where that goes, and goes again if it was refused."""
        super().__init__(path, check)

    def write(self, data: bytes) -> None:
        """Has `data` appended soon. Never waits for the disk. Raises Replaced."""
        self._refuse()
        with self._lock:
            if self._kept or len(self._data) + len(data) <= _MOST_WAITING:
                self._data += data
            else:
                self.failures += 1
        _thread.wake()

    def close(self, timeout_s: float = FLUSH_S) -> None:
        super().close(timeout_s)
        if self._file is not None and not self._waiting():
            os.close(self._file)
            self._file = None

    def _waiting(self) -> str:
        with self._lock:
            return f"{len(self._data):,} bytes" if self._data else ""

    def _write(self) -> None:
        with self._lock:
            data = bytes(self._data)
        file = self._file if self._file is not None else self._open()
        if not self._kept:  # a process that was replaced may write there too, and knows nothing of it
            self._end = os.fstat(file).st_size
        rest = memoryview(data)
        while rest:
            rest = rest[os.pwrite(file, rest, self._end + len(data) - len(rest)) :]
        if self._kept:
            os.fsync(file)  # a file server may refuse now what it seemed to have taken
        self._end += len(data)
        with self._lock:
            del self._data[: len(data)]

    def _open(self) -> int:
        if self._lines and self._path.is_file():
            drop_torn_line(self._path)
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666)
        self._end = os.fstat(file).st_size
        self._file = file
        return file

    def _give_up(self) -> str:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)  # a part of a line would spoil the next one
        if self._kept:
            return f"{self._waiting()} wait in memory until it can"
        self._drop()
        return "what it would have held is left out"

    def _drop(self) -> None:
        with self._lock:
            self._data.clear()


class LatestFile(BackgroundFile):
    """A file of which only the present content matters: a newer one replaces one that has yet to be written."""

    def __init__(self, path: Path, store: Callable[[Any], None]):
        """`store` writes a content into the file, or raises Replaced."""
        self._store, self._content = store, None
        super().__init__(path)

    def write(self, content: Any) -> None:
        """Has `content`, which nobody may change any more, stored soon. Never waits for the disk. Raises Replaced."""
        self._refuse()
        with self._lock:
            self._content = content
        _thread.wake()

    def _waiting(self) -> str:
        with self._lock:
            return "" if self._content is None else "its last content"

    def _write(self) -> None:
        with self._lock:
            content = self._content
        self._store(content)
        with self._lock:
            if self._content is content:
                self._content = None

    def _drop(self) -> None:
        with self._lock:
            self._content = None

    def _give_up(self) -> str:
        return "it shows what was before until it can"


class Closable(Protocol):
    def close(self, timeout_s: float) -> None: ...


def close_all(files: Iterable[Closable], timeout_s: float = FLUSH_S) -> None:
    """Closes files; waits at most timeout_s for all of them together."""
    deadline = time.monotonic() + timeout_s
    for file in files:
        file.close(max(0.0, deadline - time.monotonic()))


class _Thread:
    """The thread that writes, which starts with the first file."""

    def __init__(self):
        self._files: list[BackgroundFile] = []
        self._lock = threading.Lock()
        self._work = threading.Event()
        self.is_away = False
        """Whether the run folder was away at the last look."""
        self._thread: threading.Thread | None = None

    def add(self, file: BackgroundFile) -> None:
        with self._lock:
            self._files = [*self._files, file]
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
                self._thread.start()

    def remove(self, file: BackgroundFile) -> None:
        with self._lock:
            self._files = [other for other in self._files if other is not file]

    def wake(self) -> None:
        self._work.set()

    def _run(self) -> None:
        while True:
            retry = any(file._waiting() for file in self._files)
            self._work.wait(_RETRY_S if retry else None)
            time.sleep(_GATHER_S)
            self._work.clear()
            for file in self._files:
                file.attempt()


_thread = _Thread()
