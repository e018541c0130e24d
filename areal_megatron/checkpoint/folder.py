"""The checkpoints of a run on disk: which are complete, which one to resume from, which to keep. No torch.

```
runs/NAME/checkpoints/version-000012/
    complete.json        written last: what it is, and size and CRC of every file
    trainer/             megatron-core's torch_dist: model, optimizer, schedule, generators
    controller.msgpack   controller/state.py
    hf/                  config.json and tokenizer of the model
```
A checkpoint is written into `.version-000012.partial` and renamed once everything is synced: a folder without
the leading dot is complete, unless something happened to it later.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_megatron.config import CheckpointConfig, ConfigError
from areal_megatron.files import write_atomically
from areal_megatron.run import Run

_NAME = re.compile(r"version-(\d+)")
_SEAL = "complete.json"
_REPLACED = "replaced"
_CRC_BYTES = 64 * 2**20
"""Larger files are checked by their size alone: reading terabytes again would hold up every start."""


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    version: int
    """Policy version of everything in it."""
    batches: int
    """Batches trained before it; above `version` by the updates that were not applied."""
    incarnation: int
    """Of the run that wrote it."""

    @property
    def trainer(self) -> Path:
        return self.folder / "trainer"

    @property
    def controller(self) -> Path:
        return self.folder / "controller.msgpack"

    @property
    def hf(self) -> Path:
        return self.folder / "hf"


def partial(run: Run, version: int) -> Path:
    """Where the checkpoint of `version` is written."""
    return run.checkpoints / f".version-{version:06d}.partial"


def again(run: Run, version: int) -> bool:
    """Begins to write the complete checkpoint of `version` once more, with the trainers' files of before: whether there
    is one. Raises OSError."""
    saved, written = run.checkpoints / f"version-{version:06d}", partial(run, version)
    if not saved.exists():
        return False
    for part in ("trainer", "hf"):
        shutil.copytree(saved / part, written / part, copy_function=os.link)
    return True


def seal(run: Run, version: int, batches: int) -> Checkpoint:
    """Makes the written files the checkpoint of `version`: synced, listed, renamed. Raises OSError."""
    written, folder = partial(run, version), run.checkpoints / f"version-{version:06d}"
    checkpoint = Checkpoint(folder, version, batches, run.incarnation)
    files = {}
    for path in sorted(path for path in written.rglob("*") if path.is_file()):
        _sync(path)
        files[str(path.relative_to(written))] = [path.stat().st_size, _crc(path)]
    for path in (written, *(path for path in written.rglob("*") if path.is_dir())):
        _sync(path)
    described = {key: value for key, value in asdict(checkpoint).items() if key != "folder"}
    write_atomically(written / _SEAL, json.dumps(described | {"files": files}))
    _sync(written / _SEAL)
    _sync(written)
    # The same version, written before, or of a line of the run that was given up
    before = _set_aside(folder, _REPLACED)
    try:
        os.rename(written, folder)
    except OSError:
        put_back(run)
        raise
    _sync(run.checkpoints)
    shutil.rmtree(before, ignore_errors=True)
    return checkpoint


def read(folder: Path) -> Checkpoint:
    """Raises ConfigError that says what is wrong with it, the files' sizes and CRCs included."""
    try:
        described = json.loads((folder / _SEAL).read_text())
        files = described.pop("files")
        checkpoint = Checkpoint(folder, **described)
        files.items()
    except FileNotFoundError:
        raise ConfigError(f"{folder} is no complete checkpoint: it has no {_SEAL}") from None
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as e:
        raise ConfigError(f"{folder / _SEAL} is damaged: {e}") from None
    for name, (size, crc) in files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes, was written with {size}"
            raise ConfigError(f"checkpoint {folder} is damaged: {name} {state}")
        if _crc(path) != crc:
            raise ConfigError(f"checkpoint {folder} is damaged: {name} does not hold what was written (CRC)")
    return checkpoint


def complete(run: Run) -> list[Path]:
    """Folders of the run's checkpoints in the order of their writing, which resuming an old one makes another than
    that of their versions. One that its run removes at this moment is none of them."""
    folders = run.checkpoints.iterdir() if run.checkpoints.is_dir() else []
    written = {folder: _written_at(folder) for folder in folders if _NAME.fullmatch(folder.name)}
    return sorted((folder for folder, at in written.items() if at is not None), key=written.get)


def newest(run: Run) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint written last that is whole, and what is wrong with those written after it."""
    problems = []
    for folder in reversed(complete(run)):
        try:
            return read(folder), problems
        except ConfigError as e:
            problems.append(str(e))
    return None, problems


def put_back(run: Run) -> None:
    """Brings back what `seal` set aside and did not come to replace; while nobody writes."""
    for path in run.checkpoints.glob(f".version-*.{_REPLACED}"):
        folder = path.with_name(path.name.removeprefix(".").removesuffix(f".{_REPLACED}"))
        if not folder.exists():
            os.rename(path, folder)


def remove_unfinished(run: Run) -> None:
    """Removes what an earlier incarnation of the run did not write, or remove, to the end."""
    for path in run.checkpoints.glob(".*"):
        shutil.rmtree(path, ignore_errors=True)


def tidy(run: Run, settings: CheckpointConfig) -> None:
    """Removes all but the last checkpoint.keep and those of every checkpoint.keep_every versions."""
    for folder in complete(run)[: -settings.keep]:
        version = int(_NAME.fullmatch(folder.name)[1])
        if not settings.keep_every or version % settings.keep_every:
            shutil.rmtree(_set_aside(folder, "removed"), ignore_errors=True)


def _set_aside(folder: Path, reason: str) -> Path:
    """Where a folder that may not be there is removed: what is half removed must not look complete."""
    aside = folder.with_name(f".{folder.name}.{reason}")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        os.rename(folder, aside)
    return aside


def _written_at(folder: Path) -> int | None:
    """Nanoseconds since the epoch; None where it is gone."""
    for path in (folder / _SEAL, folder):
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_mtime_ns
    return None


def _crc(path: Path) -> int | None:
    return zlib.crc32(path.read_bytes()) if path.stat().st_size <= _CRC_BYTES else None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
