"""The lease on a run folder: at most one launcher runs it, from its first look at the folder until its processes ended.

`leases/00002.json` says who holds the second lease. It appears whole and only once, also on NFS (files.write_once), and
the greatest number counts. The holder beats: once a second it counts up the time stamp of that file, which needs no
space on a full disk. No clock decides anything but the monotonic one of whoever watches: a heartbeat that moves
refuses another start; one that has stalled for machine.lease_s no longer does. A launcher releases its lease when
it ends; if it was killed, others on its machine notice at once.

Whoever takes the next lease thereby replaces the holder before: RunFolder.check_current, which every writer of the run
calls, raises Replaced from then on. A holder whose run folder has gone, renamed or unmounted, writes nothing
meanwhile, cannot be seen to live, and ends the run after machine.lease_s.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import msgspec

from areal_megatron.config import ConfigError
from areal_megatron.process.files import numbered, numbers, write_atomically, write_once
from areal_megatron.run.folder import Away, Replaced, RunFolder, this_process
from areal_megatron.run.json_input import read_record

BEAT_S = 1.0
_LOOK_S = 0.25
_SILENT_S = 3.0
"""Silence after which a start says that it waits."""
_CLEARED_S = 60.0
"""Longest wait for the guardian of a launcher that was killed: ending processes takes it ten seconds."""
_TRIES = 100
"""How often a start tries to take the lease while others take it and release it."""
_RELEASED = 0
_Process = tuple[int, int]
"""A process of this machine: its id, and when it began, in clock ticks since the machine's start."""


class Holder(msgspec.Struct):
    """The launcher that took a lease."""

    launcher: str
    """Node, process and Slurm job, for people."""
    since: str
    """When it took it, for people."""
    machine: str
    """An id of the machine, its start and the container: process ids mean the same where it is the same."""
    process: _Process
    folder: int
    """Inode of the folder, which a copy of the run does not have,"""
    device: int = 0
    """unless it is on another device."""

    @classmethod
    def here(cls, folder: Path) -> Holder:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(this_process(), now, _machine(), (os.getpid(), _begun(os.getpid())), *_place(folder))

    @property
    def is_here(self) -> bool:
        return self.machine == _machine()


class Lease:
    """A held lease. A context manager: leaving it releases the lease.

    Example:
        with Lease(run, lease_s=90) as lease:  # raises ConfigError if another launcher holds it
            ...
            lease.check()
    """

    def __init__(self, run: RunFolder, lease_s: float):
        """Takes the next lease, after a wait of lease_s and more if nobody can tell whether its holder lives.

        Raises ConfigError, which names the holder, if that lives.
        """
        self.run = run
        self._folder = run.leases
        self.number, silent = _take(run, lease_s)
        self._path = numbered(self._folder, self.number)
        taken = read(self._path)
        self._taken = taken.launcher, taken.since
        self._lease_s, self._away_s = lease_s, 0.0
        self._count, self._guarded_by = _RELEASED, 0
        self._replaced: Replaced | None = None
        self._ended = threading.Event()
        self._beat()
        run.hold(self.number)
        self._thread = threading.Thread(target=self._live, name="lease", daemon=True)
        self._thread.start()
        if silent:
            _end(silent, numbered(self._folder, self.number - 1))

    def check(self) -> None:
        """Raises Replaced if another launcher has taken the next lease. Costs nothing: to be called often."""
        if self._replaced:
            raise self._replaced

    def guard(self, process: int | None) -> None:
        """Names the process that ends all others of this machine if this one is killed: a start waits for it, too.

        Costs nothing while it is the same: to be called often.
        """
        if process and process != self._guarded_by:
            with suppress(OSError):  # as of a full disk: the next call writes it
                write_atomically(_guardian(self._path), msgspec.json.encode((process, _begun(process))))
                self._guarded_by = process

    def __enter__(self) -> Lease:
        return self

    def rest(self) -> None:
        """Beats and looks no more: what becomes of the folder now is this launcher's own doing."""
        self._ended.set()
        self._thread.join(_CLEARED_S)  # its file server may be away

    def __exit__(self, *_) -> None:
        self.rest()
        with suppress(OSError):
            self._look()  # it may have become another folder's
            os.utime(self._path, (_RELEASED, _RELEASED))

    def _live(self) -> None:
        while not self._ended.wait(BEAT_S) and not self._replaced:
            try:
                self._look()
                self._beat()
                self._is_back()
            except Away as e:
                self._is_away(e)
            except OSError:
                continue  # the file server is away: whoever watches does not see it either

    def _is_away(self, problem: Away) -> None:
        if not self._away_s:
            print(
                f"warning: {problem}; nothing is written until it is back, and in {self._lease_s:.0f} s the run ends",
                file=sys.stderr,
                flush=True,
            )
        self._away_s += BEAT_S
        if self._away_s > self._lease_s:
            self._replaced = Replaced(
                f"{problem}; it did not come back within {self._lease_s:.0f} s, and the run has been ended; "
                "put it back, and with resume=auto the same command goes on from the newest checkpoint"
            )

    def _is_back(self) -> None:
        if self._away_s:
            print(f"{self.run.folder} is back after {self._away_s:.0f} s", file=sys.stderr, flush=True)
        self._away_s = 0.0

    def _beat(self) -> None:
        self._count += 1  # whole seconds: Lustre keeps no fractions
        os.utime(self._path, (self._count, self._count))

    def _look(self) -> None:
        """Raises Away, and OSError."""
        try:
            self.run.check_lease()
            with suppress(ConfigError):  # a damaged file is no other launcher's
                holder = read(self._path)
                if (holder.launcher, holder.since) != self._taken:  # removed, and taken anew
                    self._replaced = self.run.replaced_by(holder.launcher)
        except Replaced as e:
            self._replaced = e


def _take(run: RunFolder, lease_s: float) -> tuple[int, Holder | None]:
    """Returns the number of the lease that this process has taken, and who held the one before if it fell silent."""
    known = False
    for tries in count():
        try:
            if not known:  # again: a start whose run cannot begin removes the folder that it made
                run.create(exist_ok=True)
                known = run.has_begun()
            with _kept_open(run.leases) as leases:
                taken = numbers(run.leases)
                number = max([*taken, *(begun.lease for begun in run.starts()[-1:])], default=0)
                silent = _watch(run, number, lease_s) if number in taken else None
                _write(run.leases, leases, number + 1)
            return number + 1, silent
        except (FileExistsError, FileNotFoundError):  # another start was faster, or has just removed its folder
            if tries == _TRIES and known:
                raise ConfigError(f"{run.folder} went away as this start looked at it: put it back first") from None
            if tries == _TRIES:
                raise
            time.sleep(_LOOK_S / 10)
    raise AssertionError


@contextmanager
def _kept_open(folder: Path) -> Iterator[Path]:
    """Gives a path that leads to this folder also when another has taken its place."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _write(folder: Path, seen: Path, number: int) -> None:
    """Takes a lease in the folder whose previous lease was `seen` to be over. Raises FileNotFoundError if another start
    has removed that folder since and holds the first lease of a new one.
    """
    path, holder = numbered(seen, number), Holder.here(seen)
    write_once(path, msgspec.json.encode(holder).decode())
    place = None
    with suppress(FileNotFoundError):
        place = _place(folder)
    if place != (holder.folder, holder.device):
        path.unlink(missing_ok=True)
        raise FileNotFoundError(errno.ENOENT, "another start has removed it", str(folder))


def _watch(run: RunFolder, number: int, lease_s: float) -> Holder | None:
    """Returns when a lease may be followed by the next: with its holder, if that has only fallen silent.

    Raises ConfigError if its holder lives, or if processes of a holder that was killed here do not end.
    """
    path = numbered(run.leases, number)
    holder, first, silent_s, gone_s, told = read(path), _count(path), 0.0, 0.0, False
    while max(numbers(run.leases), default=0) == number:
        begun, count = time.monotonic(), _count(path)
        if count == _RELEASED:
            return None
        if count not in (first, None):
            raise ConfigError(
                f"{run.folder} is being run by {holder.launcher} since {holder.since}: wait until it has ended, stop "
                f"it ('touch {run.stop}' saves a checkpoint), or choose another name=…"
            )
        if holder.is_here and not _lives(holder.process):
            guardian = _read_guardian(path)
            if not guardian or not _lives(guardian):
                return None
            if gone_s > _CLEARED_S:
                raise ConfigError(
                    f"{run.folder}: process {guardian[0]} has not ended the processes of {holder.launcher}, which was "
                    f"killed, within {_CLEARED_S:.0f} s: end what is left of them, then start again"
                )
        elif silent_s >= lease_s:
            return holder
        elif silent_s >= _SILENT_S and not told:
            told = True
            print(
                f"{run.folder} was left by {holder.launcher}, which does not say whether it lives: taking over in "
                f"{lease_s - silent_s:.0f} s if it stays silent",
                flush=True,
            )
        time.sleep(_LOOK_S)
        passed = min(time.monotonic() - begun, 2 * _LOOK_S)  # not the time in which this process did not look
        silent_s, gone_s = silent_s + passed, gone_s + passed
    return None


def _end(holder: Holder, path: Path) -> None:
    """Ends a silent launcher on this machine, which was stopped or hangs, and waits until its processes have ended."""
    if not holder.is_here or (holder.folder, holder.device) != _place(path.parent):
        return
    with suppress(OSError):  # it is gone by now, or another user's
        descriptor = os.pidfd_open(holder.process[0])
        try:
            if _lives(holder.process):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                print(f"ended {holder.launcher}, which was silent", flush=True)
        finally:
            os.close(descriptor)
    deadline = time.monotonic() + _CLEARED_S
    while (guardian := _read_guardian(path)) and _lives(guardian) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _place(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_ino, status.st_dev


def read(path: Path) -> Holder:
    """Returns who took a lease. Raises ConfigError if its file is damaged."""
    try:
        return read_record(path.read_bytes(), Holder, path)
    except ConfigError as e:
        raise ConfigError(f"{e}; remove it if no launcher runs {path.parent.parent}") from None


def _count(path: Path) -> int | None:
    """Returns the heartbeat; None while it cannot be read. Opened, since an NFS client then asks its server."""
    with suppress(OSError), path.open("rb") as file:
        return int(os.fstat(file.fileno()).st_mtime)
    return None


def _guardian(path: Path) -> Path:
    return path.with_suffix(".guardian")


def _read_guardian(path: Path) -> _Process | None:
    with suppress(FileNotFoundError, ConfigError):
        return read_record(_guardian(path).read_bytes(), _Process, path)
    return None


def _machine() -> str:
    started = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{started} {os.readlink('/proc/self/ns/pid')}"


def _lives(process: _Process) -> bool:
    return _begun(process[0]) == process[1]


def _begun(pid: int) -> int:
    """Returns when a process of this machine began, in clock ticks since the machine's start; -1 if it has ended.

    Not psutil's create_time, which is reckoned from the wall clock.
    """
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        if state not in "ZX":  # dead, and its parent has not noticed
            return int(fields[18])
    return -1
