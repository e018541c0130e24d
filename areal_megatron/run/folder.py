"""A run's folder and how its processes find each other in it.

```
runs/NAME/ (0700) config.yaml · secret, *.key, site.pem, agents.pem (0600) · endpoints/PROCESS · logs/PROCESS.log
           timeline/PROCESS.jsonl · leases/00002.json (launch/supervision/lease.py) · incarnations/00003.json
           ledger/trainer-REPLICA.00003.jsonl · metrics.jsonl · status.json · processes.json · tensorboard/ · hf/
           report.html · trackers/ · trajectories/ (data/dumps.py) · checkpoints/ (checkpoint/folder.py)
           exports/version-000012/ · evaluations/00012.json · faults.json · stop
```
PROCESS is a name as in process_names.py.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import os
import re
import secrets
import socket
import stat
import sys
import time
import weakref
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from areal_megatron.config import ConfigError
from areal_megatron.process import lifeline
from areal_megatron.process.files import numbered, numbers, write_atomically, write_once
from areal_megatron.run import descriptors, private
from areal_megatron.run.credentials import Credentials, new_credentials
from areal_megatron.run.json_input import Number, read_record
from areal_megatron.run.private import Rights
from areal_megatron.run.process_names import engine_index, is_whole_engine, trainer_name

_SECRET = "secret"
_KEYS = ("controller.key", "trainers.key")
_CREDENTIALS, _OF_AGENTS = "site.pem", "agents.pem"
_PRIVATE = (_SECRET, *_KEYS, _CREDENTIALS, _OF_AGENTS)
_FOLDERS = ("endpoints", "logs", "timeline", "ledger", "tensorboard", "incarnations", "leases")
_LEDGER = re.compile(r".+\.(\d+)\.jsonl")
_AWAY_S = 600.0
"""How long a writer waits for a run folder that is away. The launcher ends the run after machine.lease_s; this bound is
for a node that alone has lost its file system."""
_AGAIN_S = 0.5
log = logging.getLogger(__name__)


class RunError(RuntimeError):
    """A process of the run did not do what others wait for."""


class Replaced(RunError):
    """The run was started again while this process could not notice, stopped or cut off from the run folder."""


class Away(OSError):
    """The run folder is not where it was, or has lost its records: renamed, unmounted, replaced or cleared; or what a
    process needs of it cannot be read."""

    def __init__(self, problem: str):
        super().__init__(errno.ENOENT, problem)

    def __str__(self) -> str:
        return str(self.strerror)


class SecretKeys(NamedTuple):
    """The Curve25519 secret keys of an incarnation, by which controller and trainers know each other. The bearer secret
    is no substitute: requests to engines carry it in clear."""

    controller: bytes
    trainers: bytes


@dataclass(frozen=True)
class IncarnationStart:
    """Where an incarnation of a run (one launch of it) begins."""

    incarnation: Number
    """Its number; the first is 0."""
    version: Number = 0
    """The policy version that it begins with."""
    batches: Number = 0
    """The number of batches trained before it."""
    checkpoint: str = ""
    """Folder of the checkpoint that it begins from; empty: it begins from the model of model.path."""
    after: Number | None = None
    """The incarnation of this run that wrote the checkpoint; None if there is none, or if it is another run's."""
    time: float = field(default=0.0, compare=False)
    """When the launcher began it, in seconds since the epoch."""
    launcher: str = field(default="", compare=False)
    """The launcher that began it, see `this_process`."""
    lease: Number = field(default=0, compare=False)
    """Number of the lease that the launcher held."""


class _Began(msgspec.Struct):
    """What records of incarnations and leases have in common."""

    launcher: str


def line_of(starts: list[IncarnationStart]) -> list[tuple[IncarnationStart, int | None]]:
    """Returns the incarnations whose work counts, oldest first, each with the number of the batch before which it ends.

    That number is None for the last one.
    """
    numbered = {start.incarnation: start for start in starts}
    line, end = [], None
    start = starts[-1] if starts else None
    while start:
        line.append((start, end))
        if start.after is None or start.after >= start.incarnation:
            break
        start, end = numbered.get(start.after), start.batches
    return line[::-1]


class RunFolder:
    """A run folder: its paths, and how processes announce themselves. Cheap: every process makes its own.

    A process of the run is bound to the incarnation it was started for, and a launcher to its lease and to the
    incarnation it began. Once a newer one exists, it writes nothing more (`check_current`). It is bound to the folder,
    too, which it holds open: nothing is written where another one, or none, has taken its place.

    Example:
        run = RunFolder("runs/tiny")
        run.create()
        run.begin()  # the first incarnation
        run.announce("controller", "tcp://127.0.0.1:4711")
        run.endpoint("controller", timeout_s=60)  # "tcp://127.0.0.1:4711", also in other processes
    """

    def __init__(self, folder: str | Path, incarnation: int | None = None, lease: int | None = None):
        """`incarnation`, `lease`: those that this process was started for. An engine lives on in later incarnations of
        a lease, and has no incarnation; a process that only reads, whatever the newest is, has neither."""
        self._bound, self._lease = incarnation, lease
        self._start: IncarnationStart | None = None
        self._held: int | None = None
        """Descriptor of the folder to which a bound process keeps."""
        self._held_checkpoints: int | None = None
        """Descriptor of the folder of its checkpoints, once there is one."""
        self.folder = Path(folder).absolute()
        self.config = self.folder / "config.yaml"
        self.metrics = self.folder / "metrics.jsonl"
        self.status = self.folder / "status.json"
        self.hf = self.folder / "hf"
        self.adapter = self.folder / "adapter"
        self.checkpoints = self.folder / "checkpoints"
        self.exports = self.folder / "exports"
        self.evaluations = self.folder / "evaluations"
        self.trajectories = self.folder / "trajectories"
        self.incarnations = self.folder / "incarnations"
        self.leases = self.folder / "leases"
        self.processes = self.folder / "processes.json"
        self.faults = self.folder / "faults.json"
        self.stop = self.folder / "stop"
        """While this file exists, the run is to save a checkpoint and end."""

    def create(self, exist_ok: bool = False) -> None:
        """Makes the folders and the secret, for this user alone. Raises FileExistsError if the run exists, and is not
        to be completed."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=exist_ok)
        for name in _FOLDERS:
            (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        if not self.has_begun():  # else they were moved away, and a run would begin anew as if there had been none
            self.checkpoints.mkdir(mode=0o700, exist_ok=True)
        for name in _PRIVATE:
            if not (self.folder / name).exists():
                self._draw(name)

    def has_begun(self) -> bool:
        """Whether there is work in the folder, also if the records of its incarnations are lost."""
        try:
            begun = self._last_incarnation() >= 0
        except FileNotFoundError:  # `create` makes leases/ last: they have been there, and who knows with what
            begun = self.leases.exists()
        return begun or self.metrics.exists() or (self.checkpoints.exists() and any(self.checkpoints.iterdir()))

    @property
    def had_begun(self) -> bool:
        """Whether the run had begun when this object was bound: if its folder is not there now, it is away."""
        return self._bound is not None and self._bound >= 0

    @property
    def began(self) -> bool:
        """Whether this object is bound to an incarnation that has begun; a launcher's, to one that it began itself."""
        return self._start is not None

    def discard(self) -> None:
        """Removes a run that this launcher made and that never began: the files of `create`, of the lease and of a
        failed beginning. A folder with anything else in it stays as it is."""
        lease, next_lease = (numbered(self.leases, (self._lease or 0) + more) for more in (0, 1))
        files = {self.config, lease, lease.with_suffix(".guardian"), *(self.folder / name for name in _PRIVATE)}
        folders = {self.checkpoints, *(self.folder / name for name in _FOLDERS)}
        aside = self.folder.with_name(f".{self.folder.name}.discarded.{secrets.token_hex(4)}")
        with contextlib.suppress(OSError, Replaced):
            self.look()
            if set(self.folder.rglob("*")) - files - folders:
                return
            write_once(next_lease, lease.read_text(encoding="utf-8"))  # no other start takes one in what is removed
            files.add(next_lease)
            os.rename(self.folder, aside)  # as a whole: another start makes a folder of its own meanwhile
            for path in files:
                (aside / path.relative_to(self.folder)).unlink(missing_ok=True)
            for path in folders:
                (aside / path.name).rmdir()
            aside.rmdir()

    def renew_secret(self) -> None:
        """Makes another secret, and other credentials. Not while a process of the run lives that is still needed: it
        holds those before."""
        self._draw(_SECRET)
        self._draw(_CREDENTIALS)
        self._draw(_OF_AGENTS)

    def _draw(self, name: str) -> None:
        """Writes 256 random bits, or new credentials, to a file that only its owner can read."""
        temporary = self.folder / f".{name}.{os.getpid()}"
        with open(os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
            file.write(new_credentials() if name in (_CREDENTIALS, _OF_AGENTS) else secrets.token_hex(32).encode())
        os.replace(temporary, self.folder / name)

    def make_private(self) -> bool:
        """Takes from others, with one line, the rights that `chmod -R` has given them: to write what the processes of
        the run trust, and to use its secrets. Returns whether they may have replaced a secret: then it has to be drawn
        anew, and nothing reads it before.

        Raises ConfigError if they may have written anything else that is trusted, or if it is another user's.
        """
        trusted = [self.folder, self.config, *(self.folder / name for name in ("endpoints", "incarnations", "leases"))]
        folder, open_to_others = self.folder.stat().st_mode, []
        for path in (path for path in trusted if path.exists()):
            status = path.stat()
            if status.st_uid != os.geteuid():
                raise ConfigError(f"{path} belongs to another user: choose another name=…")
            reach = private.reach(status.st_mode, private.WRITE, folder)
            if reach == Rights.WRITTEN:
                raise ConfigError(f"others may write {path}: forbid it with 'chmod -R go-w {self.folder}'")
            open_to_others += [path] * bool(reach)
        private.take_back(open_to_others, private.WRITE)
        if open_to_others:  # so has all else, checkpoints too, perhaps: others may be let in later to read logs
            private.take_back_below(self.folder, private.WRITE)
        secret = [self.folder / name for name in _PRIVATE if os.path.lexists(self.folder / name)]
        reaches = {path: private.reach(_mode_of_own(path, path.lstat()), private.USE, folder) for path in secret}
        shut = [path for path, reach in reaches.items() if Rights.NONE < reach < Rights.WRITTEN]
        private.take_back(shut, private.USE)
        if open_to_others or shut:
            names = ", ".join(path.name for path in [*open_to_others, *shut])
            read = "; whoever has read a secret may use it until the run is started again"
            more = read * (Rights.READ in reaches.values())
            print(f"warning: {self.folder}: others had rights on {names}, which are taken back{more}", file=sys.stderr)
        return Rights.WRITTEN in reaches.values()

    def begin(
        self,
        *,
        version: int = 0,
        batches: int = 0,
        checkpoint: str = "",
        after: int | None = None,
        keep: Collection[str] = (),
    ) -> None:
        """Begins the next incarnation and binds this object to it. Forgets the announcements of processes in the one
        before, except those to `keep`.

        Raises Replaced if another launcher has begun that incarnation or has taken a newer lease.
        """
        self.check_lease()
        before = self._last_incarnation() if self._bound is None else self._bound
        number, lease = max(before, -1 if after is None else after) + 1, self._lease or 0
        while True:
            start = IncarnationStart(number, version, batches, checkpoint, after, time.time(), this_process(), lease)
            try:
                write_once(numbered(self.incarnations, number), json.dumps(asdict(start)) + "\n")
                break
            except FileExistsError:
                other = self._read_start(number)
                if other.lease >= lease:
                    raise self.replaced_by(other.launcher) from None
                number += 1  # begun by a launcher at the moment at which it was replaced by this one
        self._bound, self._start = number, start
        self._hold_folder()
        for endpoint in (self.folder / "endpoints").iterdir():
            if endpoint.name not in keep:
                endpoint.unlink()
        for name in _KEYS:
            self._draw(name)
        self.status.unlink(missing_ok=True)
        self.stop.unlink(missing_ok=True)

    def hold(self, lease: int) -> None:
        """Binds this object to the lease that this launcher has taken: the next incarnation is its own."""
        self._lease, self._bound = lease, self._last_incarnation()
        self._hold_folder()

    def check_current(self) -> None:
        """To be called before anything is written that outlives the process. Costs two looks into small folders.

        While the folder is away, or cannot be looked at, waits ten minutes at most; then it raises OSError, as `look`
        does at once. Raises Replaced.
        """
        deadline, told = time.monotonic() + _AWAY_S, False
        while True:
            try:
                self.look()
            except OSError as e:
                if time.monotonic() > deadline:
                    raise
                if not told:
                    log.warning("%s; nothing is written until it is back", e if isinstance(e, Away) else self._bad(e))
                told = True
                time.sleep(_AGAIN_S)
            else:
                return

    def look(self) -> None:
        """Raises Replaced if a newer incarnation has begun than the one to which this object is bound, or if another
        launcher has taken the next lease and is about to begin one; and Away and OSError as check_lease does."""
        self.check_lease()
        if self._bound is not None and (newest := max(self._numbers(self.incarnations), default=-1)) > self._bound:
            raise self.replaced_by(_launcher(numbered(self.incarnations, newest)))

    def check_lease(self) -> None:
        """Raises Replaced if there is a newer lease than the one to which this object, or its incarnation, is bound.

        Raises Away if the folder, or the checkpoints' folder in it, is not the one in which this process began, or if
        the records of its lease or incarnation are gone; OSError while the file system does not tell.
        """
        if self._lease is None and self._bound is not None:
            self._lease = self.start.lease
        if self._lease is None:
            return
        self._check_folder()
        taken = self._numbers(self.leases)
        if (newest := max(taken, default=0)) > self._lease:
            raise self.replaced_by(_launcher(numbered(self.leases, newest)))
        if self._lease and self._lease not in taken:
            raise self._away(f"leases/{self._lease:05}.json is gone")
        if self._start and self._start.incarnation not in self._numbers(self.incarnations):
            raise self._away(f"incarnations/{self._start.incarnation:05}.json is gone")
        self._check_checkpoints()

    def _hold(self, folder: Path) -> int:
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def _hold_folder(self) -> int:
        if self._held is None:
            self._held = self._hold(self.folder)
        return self._held

    def _check_folder(self) -> None:
        """Raises Away if the path leads to another folder than the one that this process holds open, or to none."""
        try:
            same = _is_at(self._hold_folder(), self.folder)
        except (FileNotFoundError, NotADirectoryError):
            raise self._away("it is not there") from None
        if not same:
            raise self._away("another folder is in its place")

    def _check_checkpoints(self) -> None:
        """As _check_folder, for the folder of the checkpoints, which may be on another disk: from the first one on."""
        if self._held_checkpoints is None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if any(name.startswith("version-") for name in os.listdir(self.checkpoints)):
                    self._held_checkpoints = self._hold(self.checkpoints)
            return
        try:
            same = _is_at(self._held_checkpoints, self.checkpoints)
        except (FileNotFoundError, NotADirectoryError):
            raise self._away(f"{self.checkpoints.name}/ is not there") from None
        if not same:
            raise self._away(f"another folder is in the place of {self.checkpoints.name}/")

    def _numbers(self, folder: Path) -> list[int]:
        try:
            return numbers(folder)
        except (FileNotFoundError, NotADirectoryError):
            raise self._away(f"{folder.name}/ is not there") from None

    def _away(self, problem: str) -> Away:
        return Away(f"{self.folder}: {problem} (renamed, unmounted or cleared?)")

    def _bad(self, error: OSError) -> str:
        return f"{self.folder} cannot be looked at: {error.strerror or error}"

    @property
    def lease(self) -> int:
        """Number of the lease to which this object is bound; else the newest incarnation's."""
        return self.start.lease if self._lease is None else self._lease

    def replaced_by(self, launcher: str) -> Replaced:
        """Returns the error of a process whose run another launcher has taken over."""
        return Replaced(
            f"{self.folder} was started again by {launcher} while this process was stopped or cut off: it ends and "
            "writes nothing more"
        )

    def starts(self) -> list[IncarnationStart]:
        """Returns where each incarnation so far begins."""
        return [self._read_start(number) for number in numbers(self.incarnations)]

    def _read_start(self, number: int) -> IncarnationStart:
        path = numbered(self.incarnations, number)
        try:
            start = read_record(path.read_bytes(), IncarnationStart, path)
            if start.incarnation != number:
                raise ConfigError(f"{path} is of another release or damaged: it says another number")
            return start
        except ConfigError as e:  # without this one alone, work that came after it would not count
            raise ConfigError(
                f"{e}; put a copy of it back, or rename {self.incarnations}: resume=auto then goes on from the newest "
                "checkpoint"
            ) from None

    @property
    def start(self) -> IncarnationStart:
        """Where this incarnation begins; IncarnationStart(0) if no launcher has begun one yet."""
        if self._start is not None:
            return self._start
        number = self._newest() if self._bound is None else self._bound
        start = IncarnationStart(0) if number < 0 else self._read_start(number)
        if self._bound is not None and number >= 0:  # one's own does not change
            self._start = start
        return start

    @property
    def incarnation(self) -> int:
        """The incarnation to which this object is bound; else the newest, 0 before the first."""
        return max(0, self._newest() if self._bound is None else self._bound)

    def _newest(self) -> int:
        """Returns the newest incarnation, -1 before the first."""
        return max(numbers(self.incarnations), default=-1)

    def _last_incarnation(self) -> int:
        """Returns the newest incarnation, -1 before the first, also by the ledgers that it has left: its number is not
        to be given again, even if the records are lost."""
        ledgers = (_LEDGER.fullmatch(name) for name in os.listdir(self.folder / "ledger"))
        return max(self._newest(), *(int(found[1]) for found in ledgers if found), -1)

    @property
    def token(self) -> str:
        """The run's secret. Raises ConfigError if others may have written it, and Away if it cannot be read."""
        return self._read_private(_SECRET)

    @property
    def keys(self) -> SecretKeys:
        """Raises ConfigError if others may have written them, and Away if they cannot be read."""
        return SecretKeys(*map(self._read_key, _KEYS))

    @property
    def credentials(self) -> Credentials:
        """Those by which engines of other sites and this one know each other. Raises ConfigError if others may have
        written them, and Away if they cannot be read."""
        self._read_private(_CREDENTIALS)
        return Credentials(self.folder / _CREDENTIALS)

    @property
    def credentials_of_agents(self) -> Credentials:
        """Those by which agents on other machines and the endpoint of their episodes know each other; nobody else of
        the run accepts them. Raises as `credentials` does."""
        self._read_private(_OF_AGENTS)
        return Credentials(self.folder / _OF_AGENTS)

    def _read_key(self, name: str) -> bytes:
        text = self._read_private(name)
        try:
            return bytes.fromhex(text)
        except ValueError:
            raise ConfigError(f"{self.folder / name} is damaged: remove it") from None

    def _read_private(self, name: str) -> str:
        path = self.folder / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if _mode_of_own(path, os.fstat(descriptor)) & private.USE and self.make_private():
                    raise ConfigError(f"others may have replaced {path}: start the run again, which draws another")
                return os.read(descriptor, 10_000).decode("ascii", "replace")
            finally:
                os.close(descriptor)
        except OSError as e:
            raise self._unread(path, e) from None

    def _unread(self, path: Path, error: OSError) -> ConfigError | Away:
        """Returns why a private file cannot be read. What may be the run's own is not to be removed."""
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return self._away(f"{path.name} is not there")
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            return _not_own(path)
        if error.errno in (errno.EACCES, errno.EPERM):
            with contextlib.suppress(OSError):
                if path.lstat().st_uid != os.geteuid():
                    return _not_own(path)
            return ConfigError(f"{path} may not be read by this user: allow it with 'chmod -R u+rwX {self.folder}'")
        return Away(
            f"{path} cannot be read: {error.strerror}; leave it, and start again when its disk or server answers"
        )

    def log(self, process: str) -> Path:
        return self.folder / "logs" / f"{process}.log"

    def timeline(self, process: str) -> Path:
        return self.folder / "timeline" / f"{process}.jsonl"

    def ledger(self, replica: int, incarnation: int | None = None) -> Path:
        """Returns the ledger of a replica in an incarnation, by default this one's. Each incarnation has its own: two
        machines that append to one file on NFS overwrite each other's lines."""
        number = self.incarnation if incarnation is None else incarnation
        return self.folder / "ledger" / f"{trainer_name(replica)}.{number:05}.jsonl"

    def announce(self, process: str, endpoint: str) -> None:
        """Publishes where `process` listens, e.g. `tcp://127.0.0.1:4711`. Raises Replaced."""
        self.check_current()
        write_atomically(self.folder / "endpoints" / process, endpoint)

    def announced_engines(self) -> list[str]:
        """Names of the engines that have announced themselves. Other files there are ignored."""
        names = (path.name for path in (self.folder / "endpoints").iterdir())
        return sorted((name for name in names if is_whole_engine(name)), key=engine_index)

    def is_to_stop(self) -> bool:
        """Whether the file `stop` exists; False while the disk cannot tell."""
        try:
            return self.stop.exists()
        except OSError:
            return False

    def drain(self, engine: str) -> Path:
        """Returns the path of a file: while it exists, `engine` gets no more prompts, leaves when it has answered those
        that it has, and does not come back."""
        return self.folder / "drain" / engine

    def to_drain(self) -> set[str]:
        """Returns the names of the engines that are to be drained."""
        try:
            return {path.name for path in (self.folder / "drain").iterdir()}
        except FileNotFoundError:
            return set()

    def announced(self, process: str) -> tuple[int, int] | None:
        """Returns what tells an announcement of `process` from its next one; None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            found = (self.folder / "endpoints" / process).stat()
            return found.st_ino, found.st_mtime_ns
        return None

    def endpoint(self, process: str, timeout_s: float = 0) -> str:
        """Returns where `process` listens, once it has announced that. Raises RunError after timeout_s."""
        path, deadline = self.folder / "endpoints" / process, time.monotonic() + timeout_s
        while True:
            try:
                return path.read_text(encoding="utf-8")
            except FileNotFoundError:
                if time.monotonic() >= deadline:
                    raise RunError(
                        f"{process} has not announced its endpoint in {path} within {timeout_s:.0f} s; "
                        f"see {self.log(process)}"
                    ) from None
            time.sleep(0.05)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a path leads to the folder that is held open. Raises OSError."""
    here, held = os.stat(path), os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (held.st_dev, held.st_ino)


def _mode_of_own(path: Path, status: os.stat_result) -> int:
    """Returns the mode of a file. Raises ConfigError if it is none, or another user's."""
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise _not_own(path)
    return status.st_mode


def _not_own(path: Path) -> ConfigError:
    return ConfigError(f"{path} is not a file of this user: remove it")


def _launcher(record: Path) -> str:
    """Returns who began an incarnation or took a lease, as far as its record can be read."""
    with contextlib.suppress(ConfigError):
        return read_record(record.read_bytes(), _Began, record).launcher
    return "another launcher"


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Ends this process with one line for an error whose text says all: exit code 2 for errors that the user can fix, 1
    for failures of the run."""
    try:
        yield
    except (Away, ConfigError, RunError) as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2 if isinstance(e, ConfigError) else 1)


def this_process() -> str:
    """Returns how people find this process: its node, its id and its Slurm job."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"process {os.getpid()} on {socket.gethostname()}" + (f" (Slurm job {job})" if job else "")


def from_command_line(program: str) -> tuple[RunFolder, int]:
    """Returns the run and the index in its pool that a launcher gave this process as `--run FOLDER --incarnation I
    --index N`, or `--lease L` in place of the incarnation. Ends the process if it has been replaced already.

    Also lets this process have as many files open as its node allows, and has it end when its launcher is gone.
    """
    lifeline.hold()
    descriptors.raise_limit()
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description="Started by a launcher, see launch/.")
    parser.add_argument("--run", required=True, help="run folder")
    parser.add_argument("--index", type=int, default=0, help="rank of a trainer, number of an engine")
    parser.add_argument("--incarnation", type=int, help="the incarnation of the run that this process belongs to")
    parser.add_argument("--lease", type=int, help="the lease under which an engine was started")
    options = parser.parse_args()
    run = RunFolder(options.run, options.incarnation, options.lease)
    try:
        run.check_current()
    except (Replaced, OSError) as e:
        parser.exit(1, f"error: {e}\n")
    return run, options.index
