"""The checkpoints of a run on disk: which are complete, which one to resume from, which ones to keep. No torch.

```
runs/NAME/checkpoints/version-000012/
    complete.json        written last: what it is, and size and CRC of every file
    trainer/             megatron-core's torch_dist: model, optimizer, schedule, generators
    controller.msgpack   controller/state.py
    hf/                  config.json and tokenizer of the model
```
A checkpoint is written into `.version-000012.partial` and renamed once everything is synced: a folder without the
leading dot is complete, unless something happened to it later.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_megatron.config import CheckpointConfig, ConfigError
from areal_megatron.files import set_aside, sync_folder, sync_path, write_atomically
from areal_megatron.run import Run

_NAME = re.compile(r"version-(\d+)")
_SEAL = "complete.json"
_REPLACED = "replaced"
_CRC_BYTES = 64 * 2**20
"""Larger files are checked only by their size: reading terabytes again would hold up every start."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """One complete checkpoint."""

    folder: Path
    version: int
    """Policy version of everything in it."""
    batches: int
    """Batches trained before it: `version` and the updates that were not applied."""
    incarnation: int
    """Incarnation of the run that wrote it."""

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
    """Returns the folder into which the checkpoint of `version` is written."""
    return run.checkpoints / f".version-{version:06d}.partial"


def again(run: Run, version: int) -> bool:
    """Starts to write the checkpoint of `version` once more, with links to the trainers' files of the existing one.

    Returns False if there is none. Raises OSError.
    """
    saved, written = run.checkpoints / f"version-{version:06d}", partial(run, version)
    if not saved.exists():
        return False
    for part in ("trainer", "hf"):
        shutil.copytree(saved / part, written / part, copy_function=os.link)
    return True


def seal(run: Run, version: int, batches: int) -> SavedCheckpoint:
    """Lists, syncs and renames the written files, which makes them the checkpoint of `version`. Raises OSError."""
    written, folder = partial(run, version), run.checkpoints / f"version-{version:06d}"
    checkpoint = SavedCheckpoint(folder, version, batches, run.incarnation)
    files = {
        str(path.relative_to(written)): [path.stat().st_size, _crc(path)]
        for path in sorted(written.rglob("*"))
        if path.is_file()
    }
    described = {key: value for key, value in asdict(checkpoint).items() if key != "folder"}
    write_atomically(written / _SEAL, json.dumps(described | {"files": files}))
    sync_folder(written)
    # The same version, written before, perhaps by a branch of the run that was given up
    before = set_aside(folder, _REPLACED)
    try:
        os.rename(written, folder)
    except OSError:
        put_back(run)
        raise
    sync_path(run.checkpoints)
    shutil.rmtree(before, ignore_errors=True)
    return checkpoint


def read(folder: Path) -> SavedCheckpoint:
    """Reads complete.json and checks each file's size and CRC against it. Raises ConfigError if one is wrong."""
    try:
        described = json.loads((folder / _SEAL).read_text())
        files = described.pop("files")
        checkpoint = SavedCheckpoint(folder, **described)
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
    """Returns the folders of the run's checkpoints in the order in which they were written; resuming an old checkpoint
    makes that differ from the order of versions. Leaves out one that its run is just removing."""
    folders = run.checkpoints.iterdir() if run.checkpoints.is_dir() else []
    written = {folder: _written_at(folder) for folder in folders if _NAME.fullmatch(folder.name)}
    return sorted((folder for folder, at in written.items() if at is not None), key=written.get)


def newest(run: Run) -> tuple[SavedCheckpoint | None, list[str]]:
    """Returns the last undamaged checkpoint, and what is wrong with those written after it."""
    problems = []
    for folder in reversed(complete(run)):
        try:
            return read(folder), problems
        except ConfigError as e:
            problems.append(str(e))
    return None, problems


def put_back(run: Run) -> None:
    """Restores what `seal` set aside but did not live to replace. Only while no process of the run writes."""
    for path in run.checkpoints.glob(f".version-*.{_REPLACED}"):
        folder = path.with_name(path.name.removeprefix(".").removesuffix(f".{_REPLACED}"))
        if not folder.exists():
            os.rename(path, folder)


def remove_unfinished(run: Run) -> None:
    """Removes what an earlier incarnation of the run had not finished writing or removing."""
    for path in run.checkpoints.glob(".*"):
        shutil.rmtree(path, ignore_errors=True)


def tidy(run: Run, settings: CheckpointConfig, in_use: Collection[Path] = ()) -> None:
    """Removes all but the last `checkpoint.keep`, those whose version checkpoint.keep_every divides, and those
    `in_use`."""
    for folder in complete(run)[: -settings.keep]:
        version = int(_NAME.fullmatch(folder.name)[1])
        if folder not in in_use and (not settings.keep_every or version % settings.keep_every):
            shutil.rmtree(set_aside(folder, "removed"), ignore_errors=True)


def _written_at(folder: Path) -> int | None:
    """Returns nanoseconds since 1970, or None if the folder is gone."""
    for path in (folder / _SEAL, folder):
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_mtime_ns
    return None


def _crc(path: Path) -> int | None:
    return zlib.crc32(path.read_bytes()) if path.stat().st_size <= _CRC_BYTES else None
