"""A run's folder and how its processes find each other in it.

```
runs/NAME/ config.yaml · secret (0600) · endpoints/PROCESS · logs/PROCESS.log · timeline/PROCESS.jsonl
           metrics.jsonl · status.json · processes.json · incarnations/00003.json · ledger/trainer-REPLICA.00003.jsonl
           tensorboard/ · hf/ · report.html · trajectories/ (data/dumps.py) · checkpoints/ (checkpoint/folder.py)
           exports/version-000012/ · stop
```
Processes are named `controller`, `engine-E` and `trainer-RANK`: CONTROLLER, `engine_name`, `trainer_name`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path

from areal_megatron import descriptors
from areal_megatron.files import numbered, numbers, write_atomically, write_once

CONTROLLER = "controller"
_ENGINE = "engine-"
_WHOLE_ENGINE = re.compile(rf"{_ENGINE}(0|[1-9]\d{{0,8}})")
_TRAINER = "trainer-"


class RunError(RuntimeError):
    """A process of the run did not do what others wait for."""


class Replaced(RunError):
    """The run was started again while this process could not notice, stopped or cut off from the run folder."""


@dataclass(frozen=True)
class IncarnationStart:
    """Where an incarnation of a run (one launch of it) begins."""

    incarnation: int
    """Its number; the first is 0."""
    version: int = 0
    """The policy version that it begins with."""
    batches: int = 0
    """The number of batches trained before it."""
    checkpoint: str = ""
    """Folder of the checkpoint that it begins from; empty: it begins from the model of model.path."""
    after: int | None = None
    """The incarnation of this run that wrote the checkpoint; None if there is none, or if it is another run's."""
    time: float = field(default=0.0, compare=False)
    """When the launcher began it, in seconds since the epoch."""
    launcher: str = field(default="", compare=False)
    """Node and process id of the launcher that began it."""


def line_of(starts: list[IncarnationStart]) -> list[tuple[IncarnationStart, int | None]]:
    """Returns the incarnations whose work counts, oldest first, each with the number of the batch before which it ends.

    That number is None for the last one.
    """
    numbered = {start.incarnation: start for start in starts}
    line, end = [], None
    start = starts[-1] if starts else None
    while start:
        line.append((start, end))
        earlier = start.after is not None and start.after < start.incarnation
        start, end = (numbered.get(start.after), start.batches) if earlier else (None, None)
    return line[::-1]


class Run:
    """A run folder: its paths, and how processes announce themselves. Cheap: every process makes its own.

    A process of the run is bound to the incarnation that it was started for, and a launcher to the one that it began:
    when it has been replaced by a newer one it writes nothing more (`check_current`).

    Example:
        run = Run("runs/tiny")
        run.create()
        run.begin()  # the first incarnation
        run.announce("controller", "tcp://127.0.0.1:4711")
        run.endpoint("controller", timeout_s=60)  # "tcp://127.0.0.1:4711", also in other processes
    """

    def __init__(self, folder: str | Path, incarnation: int | None = None):
        """`incarnation`: the one that this process belongs to; None: it only reads, whatever the newest is."""
        self._bound = incarnation
        self.folder = Path(folder).absolute()
        self.config = self.folder / "config.yaml"
        self.metrics = self.folder / "metrics.jsonl"
        self.status = self.folder / "status.json"
        self.hf = self.folder / "hf"
        self.checkpoints = self.folder / "checkpoints"
        self.exports = self.folder / "exports"
        self.trajectories = self.folder / "trajectories"
        self.incarnations = self.folder / "incarnations"
        self.processes = self.folder / "processes.json"
        self.stop = self.folder / "stop"
        """While this file exists, the run is to save a checkpoint and end."""

    def create(self) -> None:
        """Makes the folders and the secret. Raises FileExistsError if the run exists."""
        self.folder.mkdir(parents=True)
        for name in ("endpoints", "logs", "timeline", "ledger", "incarnations"):
            (self.folder / name).mkdir()
        with open(os.open(self.folder / "secret", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as f:
            f.write(secrets.token_hex(32))

    def begin(
        self,
        *,
        version: int = 0,
        batches: int = 0,
        checkpoint: str = "",
        after: int | None = None,
        keep: Collection[str] = (),
    ) -> None:
        """Begins the next incarnation, to which this object is bound from then on, and forgets what processes have
        announced in the one before, except those to `keep`.

        Raises Replaced if another launcher has begun that incarnation.
        """
        before = self._newest() if self._bound is None else self._bound
        number = 0 if before is None else before + 1
        launcher = f"{socket.gethostname()}, process {os.getpid()}"
        start = IncarnationStart(number, version, batches, checkpoint, after, time.time(), launcher)
        try:
            write_once(numbered(self.incarnations, number), json.dumps(asdict(start)) + "\n")
        except FileExistsError:
            raise self._replaced(number) from None
        self._bound = number
        for endpoint in (self.folder / "endpoints").iterdir():
            if endpoint.name not in keep:
                endpoint.unlink()
        self.checkpoints.mkdir(exist_ok=True)
        self.status.unlink(missing_ok=True)
        self.stop.unlink(missing_ok=True)

    def check_current(self) -> None:
        """To be called before anything is written that outlives the process. Costs one look into a small folder.

        Raises Replaced if a newer incarnation has begun than the one to which this object is bound.
        """
        if self._bound is not None and (newest := self._newest()) > self._bound:
            raise self._replaced(newest)

    def _replaced(self, newest: int) -> Replaced:
        launcher = self._read_start(newest).launcher
        return Replaced(
            f"{self.folder} was started again by {launcher} (incarnation {newest}) while this process was stopped or "
            "cut off: it ends and writes nothing more"
        )

    def starts(self) -> list[IncarnationStart]:
        """Returns where each incarnation so far begins."""
        return [self._read_start(number) for number in numbers(self.incarnations)]

    def _read_start(self, number: int) -> IncarnationStart:
        return IncarnationStart(**json.loads(numbered(self.incarnations, number).read_text()))

    @property
    def start(self) -> IncarnationStart:
        """Where this incarnation begins; IncarnationStart(0) if no launcher has begun one yet."""
        number = self._newest() if self._bound is None else self._bound
        return IncarnationStart(0) if number is None else self._read_start(number)

    @property
    def incarnation(self) -> int:
        """The incarnation to which this object is bound; else the newest, 0 before the first."""
        return (self._newest() or 0) if self._bound is None else self._bound

    def _newest(self) -> int | None:
        return max(numbers(self.incarnations), default=None)

    @property
    def token(self) -> str:
        return (self.folder / "secret").read_text()

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
        return sorted((name for name in names if _WHOLE_ENGINE.fullmatch(name)), key=engine_index)

    def is_to_stop(self) -> bool:
        """Whether the file `stop` exists; False while the disk cannot tell."""
        try:
            return self.stop.exists()
        except OSError:
            return False

    def drain(self, engine: str) -> Path:
        """Returns the path of a file: while it exists, `engine` gets no more prompts, and leaves when it has answered
        those that it has."""
        return self.folder / "drain" / engine

    def endpoint(self, process: str, timeout_s: float = 0) -> str:
        """Returns where `process` listens, once it has announced that. Raises RunError after timeout_s."""
        path, deadline = self.folder / "endpoints" / process, time.monotonic() + timeout_s
        while True:
            try:
                return path.read_text()
            except FileNotFoundError:
                if time.monotonic() >= deadline:
                    raise RunError(
                        f"{process} has not announced its endpoint in {path} within {timeout_s:.0f} s; "
                        f"see {self.log(process)}"
                    ) from None
            time.sleep(0.05)


def engine_name(index: int) -> str:
    return f"{_ENGINE}{index}"


def engine_index(name: str) -> int:
    return int(name.removeprefix(_ENGINE))


def is_engine(name: str) -> bool:
    """Whether a process of this name is an engine, or the part of one on another node (`engine-E.1`)."""
    return name.startswith(_ENGINE)


def trainer_name(rank: int) -> str:
    return f"{_TRAINER}{rank}"


def is_trainer(name: str) -> bool:
    return name.startswith(_TRAINER)


def from_command_line(program: str) -> tuple[Run, int]:
    """Returns the run and the index in its pool that a launcher gave this process as
    `--run FOLDER --incarnation I --index N`. Ends the process if it has been replaced already.

    Also lets this process have as many files open as its node allows.
    """
    descriptors.raise_limit()
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description="Started by a launcher, see launch/.")
    parser.add_argument("--run", required=True, help="run folder")
    parser.add_argument("--index", type=int, default=0, help="rank of a trainer, number of an engine")
    parser.add_argument("--incarnation", type=int, help="the incarnation of the run that this process belongs to")
    options = parser.parse_args()
    run = Run(options.run, options.incarnation)
    try:
        run.check_current()
    except Replaced as e:
        parser.exit(1, f"error: {e}\n")
    return run, options.index
