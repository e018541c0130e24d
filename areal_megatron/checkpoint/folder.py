"""The checkpoints of a run on disk: the complete ones, the one to resume from, the ones to keep. No torch.

```
runs/NAME/checkpoints/version-000012/
    complete.json        written last: a description, and size and CRC of every file
    trainer/             megatron-core's torch_dist: model, optimizer, schedule, generators
    controller.msgpack   controller/state.py; supervised runs: examples.msgpack (data/drawing.py), replays:
                         replay.msgpack (data/dumps.py)
    hf/                  config.json and tokenizer of the model
    damaged              only if the trainers found, as they resumed, a file with other content than was written
```
Incarnation 3 writes a checkpoint into `.version-000012.incarnation-3.partial` and renames it once all is synced.
What has no leading dot is complete, unless something happened to it later.

Checkpoints are ordered by the work they hold, along the line of incarnations that counts (`run.line_of`). The times of
files say nothing: clocks are set back, and a copy is as old as the copying.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from areal_megatron.config import CheckpointConfig, ConfigError
from areal_megatron.process.errors import first_line, printable
from areal_megatron.process.files import set_aside, sync_folder, sync_path, write_atomically
from areal_megatron.run.folder import IncarnationStart, RunFolder, line_of
from areal_megatron.run.json_input import Number

_NAME = re.compile(r"version-(\d+)")
_PARTIAL = re.compile(r"\.version-\d+\.incarnation-(\d+)\.(?:partial|weights)")
_REMAINS = re.compile(r"\.version-\d+\.(?:replaced|removed|partial|old)")
"""Folders that were set aside, or that an export had not finished."""
_SHARD = re.compile(r"__(\d+)_\d+\.distcp")
TRAINER = "trainer"
"""The folder of a checkpoint that trainers write."""
_SEAL = "complete.json"
_DAMAGED = "damaged"
_REPLACED = "replaced"
_CRC_BYTES = 64 * 2**20
"""Launchers check larger files of the trainers by their size alone, since reading terabytes takes one process hours.
The trainers check them all, each rank its share, before they load any."""
_READ_BYTES = 4 * 2**20


class Written(NamedTuple):
    """What a file must hold."""

    size: Number
    crc: int
    """zlib.crc32 of the file."""


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
        return self.folder / TRAINER

    @property
    def controller(self) -> Path:
        return self.folder / "controller.msgpack"

    @property
    def hf(self) -> Path:
        return self.folder / "hf"


class _Seal(msgspec.Struct, forbid_unknown_fields=True):
    """The content of complete.json."""

    version: Number
    batches: Number
    incarnation: Number
    files: dict[str, Written]


class _Place(NamedTuple):
    """A checkpoint's place in the order of its run's checkpoints; the last one is the newest."""

    counts: bool
    """Whether its work belongs to the line of incarnations that counts."""
    incarnation: int
    batches: int
    whole: bool
    """As far as can be told without reading its files."""


def partial(run: RunFolder, version: int) -> Path:
    """Returns the folder into which this incarnation, and no other, writes the checkpoint of `version`."""
    return run.checkpoints / f".version-{version:06d}.incarnation-{run.incarnation}.partial"


def weights(run: RunFolder, version: int) -> Path:
    """Returns the folder into which this incarnation writes the weights of `version` for an export, and no more."""
    return run.exports / f".version-{version:06d}.incarnation-{run.incarnation}.weights"


def again(run: RunFolder, version: int, saved: Path) -> dict[str, Written]:
    """Starts to write the checkpoint of `version` once more, with links to the trainers' files of the one in `saved`.

    Returns what these files hold, for `seal`. Raises OSError, and ConfigError if it is damaged.
    """
    written = partial(run, version)
    _, files = _read_seal(saved)
    for part in ("trainer", "hf"):
        shutil.copytree(saved / part, written / part, copy_function=os.link)
    return {name: file for name, file in files.items() if name.startswith(f"{TRAINER}/")}


def seal(run: RunFolder, version: int, batches: int, known: Mapping[str, Written] | None = None) -> SavedCheckpoint:
    """Lists, syncs and renames the written files, which makes them the checkpoint of `version`.

    `known`: what files hold according to the processes that wrote them, by their paths in the folder; the other files
    are read. Raises OSError, also if a file is not as long as its writer says, and Replaced.
    """
    written, folder, known = partial(run, version), run.checkpoints / f"version-{version:06d}", known or {}
    checkpoint = SavedCheckpoint(folder, version, batches, run.incarnation)
    sync_folder(written)
    files = {}
    for path in sorted(path for path in written.rglob("*") if path.is_file()):
        name, size = str(path.relative_to(written)), path.stat().st_size
        files[name] = known[name] if name in known else Written(size, _crc(path))
        if files[name].size != size:
            raise OSError(f"{path} has {size} bytes, of {files[name].size} that were written")
    described = {key: value for key, value in asdict(checkpoint).items() if key != "folder"}
    write_atomically(written / _SEAL, json.dumps(described | {"files": files}), sync=True)
    sync_path(written)
    run.check_current()
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
    """Checks the sizes of all files, and the CRCs of all but the trainers' large ones, against complete.json.

    Raises ConfigError if one is wrong or cannot be read.
    """
    checkpoint, files = _read_seal(folder)
    if (found := folder / _DAMAGED).exists():
        raise ConfigError(
            f"checkpoint {folder} is damaged: {found.read_text(encoding='utf-8').strip()} (said in {found})"
        )
    for name, file in files.items():
        large = name.startswith(f"{TRAINER}/") and file.size > _CRC_BYTES
        try:
            fault = _fault(folder / name, file, by_size=large)
        except OSError as e:
            fault = f"cannot be read: {e.strerror}"
        if fault:
            raise ConfigError(f"checkpoint {folder} is damaged: {name} {fault}")
    return checkpoint


def check_share(folder: Path, rank: int, ranks: int) -> None:
    """Reads a rank's share of the trainers' files and checks their CRCs; all ranks together read all of them.

    If the number of ranks has not changed since the save, each reads the file it is about to load, and so warms the
    page cache. Raises OSError, and ConfigError if a file is not what was written; then `read` refuses the checkpoint
    too from now on.
    """
    _, files = _read_seal(folder)
    names = sorted((name for name in files if name.startswith(f"{TRAINER}/")), key=_number)
    for name in names[rank::ranks]:
        if fault := _fault(folder / name, files[name]):
            with contextlib.suppress(OSError):  # another run's, perhaps, in which nobody may write
                write_atomically(folder / _DAMAGED, f"{name} {fault}\n")
            raise ConfigError(f"checkpoint {folder} is damaged: {name} {fault}")


def size(folder: Path) -> int:
    """Returns the bytes of a checkpoint's files. Raises ConfigError if complete.json cannot be read."""
    return sum(file.size for file in _read_seal(folder)[1].values())


def complete(run: RunFolder) -> list[Path]:
    """Returns the folders of the run's checkpoints from the oldest work to the newest; work that was given up comes
    before all that counts. Leaves out one that its run is just removing.

    Raises FileNotFoundError if the run has no folder for them.
    """
    return [folder for _, folder in _ordered(run)]


def newest(run: RunFolder) -> tuple[SavedCheckpoint | None, list[str]]:
    """Returns the last undamaged checkpoint of the work that counts, and the faults of later ones."""
    return _last_whole(folder for place, folder in _ordered(run) if place.counts)


def resumable(run: RunFolder) -> tuple[SavedCheckpoint | None, list[str]]:
    """Returns the checkpoint to resume from, and why better ones cannot be used.

    It is the newest; without any, the checkpoint of another run from which this one began; failing both, the last one
    of work that was given up.
    """
    checkpoint, problems = newest(run)
    line = line_of(run.starts())
    if not checkpoint and line and line[0][0].checkpoint:
        checkpoint, more = _last_whole([Path(line[0][0].checkpoint)])
        problems += more
    if not checkpoint:
        checkpoint, more = _last_whole(folder for place, folder in _ordered(run) if not place.counts)
        problems += more
        if checkpoint:
            why = "are of work that was given up" if line else f"are of incarnations that {run.incarnations} lacks"
            problems.append(f"all checkpoints in {run.checkpoints} {why}")
    return checkpoint, problems


def free_bytes(run: RunFolder) -> int:
    """Returns how much is free where the run's checkpoints are or will be. Raises OSError."""
    place = next(path for path in (run.checkpoints, *run.checkpoints.parents) if path.exists())
    return shutil.disk_usage(place).free


def shortage(run: RunFolder, settings: CheckpointConfig, size: int) -> str:
    """Returns a line if there is too little room for the checkpoints of `size` bytes to come, else ""."""
    coming, left = 1, math.inf
    with contextlib.suppress(OSError):
        there = sum(bool(_NAME.fullmatch(path.name)) for path in run.checkpoints.glob("version-*"))
        coming = max(1, settings.keep + 1 - there)
        left = free_bytes(run)
    if left >= coming * size:
        return ""
    return (
        f"{left / 1e9:.1f} GB are free in {run.checkpoints}, too little for {coming} more checkpoints of "
        f"{size / 1e9:.1f} GB (checkpoint.keep={settings.keep}, and the one being written): make room, or they are lost"
    )


def put_back(run: RunFolder) -> None:
    """Restores what `seal` set aside but did not live to replace. Only while no process of the run writes."""
    for path in run.checkpoints.glob(f".version-*.{_REPLACED}"):
        folder = path.with_name(path.name.removeprefix(".").removesuffix(f".{_REPLACED}"))
        if not folder.exists():
            os.rename(path, folder)


def remove_unfinished(run: RunFolder) -> None:
    """Removes what earlier incarnations of the run had not finished writing, exporting or removing, and nothing else.

    Raises Replaced, and OSError.
    """
    run.check_current()
    put_back(run)
    for path in (*run.checkpoints.glob(".version-*"), *run.exports.glob(".version-*")):
        partial = _PARTIAL.fullmatch(path.name)
        if int(partial[1]) <= run.incarnation if partial else _REMAINS.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """A context in which no run removes a checkpoint with `tidy`, if it is one and its file system has locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            seal = stack.enter_context(open(folder / _SEAL, "rb"))
            fcntl.flock(seal, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def _remove(folder: Path) -> None:
    """Removes a checkpoint, unless it is held."""
    with contextlib.ExitStack() as stack:
        try:
            seal = stack.enter_context(open(folder / _SEAL, "r+b"))  # NFS gives no such lock for reading
            fcntl.flock(seal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:  # it is damaged, or there are no locks
            pass
        removed = set_aside(folder, "removed")
    shutil.rmtree(removed, ignore_errors=True)


def tidy(run: RunFolder, settings: CheckpointConfig, in_use: Collection[Path] = ()) -> None:
    """Removes all but the last `checkpoint.keep` whole checkpoints, anything after them, versions divisible by
    checkpoint.keep_every, and those `in_use` or held. Raises Replaced."""
    run.check_current()
    later = 0
    for place, folder in reversed(_ordered(run)):
        version = _version(folder)
        stays = later < settings.keep or folder in in_use
        if not stays and (not settings.keep_every or version % settings.keep_every):
            _remove(folder)
        later += place.whole


def _version(folder: Path) -> int:
    return int(folder.name.removeprefix("version-"))


def _ordered(run: RunFolder) -> list[tuple[_Place, Path]]:
    """Returns the run's checkpoints, the newest last."""
    line = line_of(run.starts())
    places = [(_place(folder, line), folder) for folder in run.checkpoints.iterdir() if _NAME.fullmatch(folder.name)]
    return sorted(placed for placed in places if placed[1].is_dir())  # not those that went while others were read


def _place(folder: Path, line: list[tuple[IncarnationStart, int | None]]) -> _Place:
    try:
        checkpoint, _ = _read_seal(folder)
    except ConfigError:  # it would be where its version is on the line
        version = _version(folder)
        before = [start.incarnation for start, _ in line if start.batches <= version]
        return _Place(bool(before), max(before, default=-1), version, whole=False)
    counts = any(
        checkpoint.incarnation == start.incarnation and (end is None or checkpoint.batches <= end)
        for start, end in line
    )
    return _Place(counts, checkpoint.incarnation, checkpoint.batches, whole=not (folder / _DAMAGED).exists())


def _last_whole(folders: Iterable[Path]) -> tuple[SavedCheckpoint | None, list[str]]:
    """Returns the last undamaged one, and what is wrong with those after it."""
    problems = []
    for folder in reversed(list(folders)):
        try:
            return read(folder), problems
        except ConfigError as e:
            problems.append(str(e))
    return None, problems


def _read_seal(folder: Path) -> tuple[SavedCheckpoint, dict[str, Written]]:
    """Raises ConfigError."""
    try:
        content = (folder / _SEAL).read_bytes()
    except FileNotFoundError:
        lacks = f"it has no {_SEAL}" if folder.exists() else "there is no such folder"
        raise ConfigError(
            f"{folder} is no complete checkpoint: {lacks}; name one such as runs/tiny/checkpoints/version-000020"
        ) from None
    except OSError as e:
        raise ConfigError(f"{folder / _SEAL} cannot be read: {e.strerror}") from None
    try:
        described = msgspec.json.decode(content, type=_Seal)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{folder / _SEAL} is damaged: {printable(first_line(e))}") from None
    return SavedCheckpoint(folder, described.version, described.batches, described.incarnation), described.files


def _number(name: str) -> tuple[bool, int, str]:
    """Orders the trainers' files by rank; those that describe them come last."""
    shard = _SHARD.fullmatch(name.removeprefix(f"{TRAINER}/"))
    return (False, int(shard[1]), name) if shard else (True, 0, name)


def _fault(path: Path, file: Written, by_size: bool = False) -> str:
    """Returns what is wrong with a file, "" if nothing is. `by_size`: as far as its size tells."""
    if not path.is_file():
        return "is missing"
    if (found := path.stat().st_size) != file.size:
        return f"has {found} bytes, was written with {file.size}"
    if not by_size and _crc(path) != file.crc:
        return "does not hold what was written (CRC)"
    return ""


def _crc(path: Path) -> int:
    crc, buffer = 0, memoryview(bytearray(_READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return crc
