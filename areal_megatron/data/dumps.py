"""Dumps of the batches that a run has trained, for areal_megatron.programs.trajectories and controller/replay.py.

`trajectories/batch-000012.msgpack` in the run folder is the batch that was formed after twelve others had been trained,
with the trajectories of all replicas. Needs numpy and msgspec only.
"""

from __future__ import annotations

import errno
import math
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from areal_megatron.config import ConfigError
from areal_megatron.data.trajectory import Trajectory, decoder, store
from areal_megatron.process.errors import first_line, printable

Content = TypeVar("Content")
_NAME = re.compile(r"batch-(\d+)\.msgpack")


class Dump(msgspec.Struct, kw_only=True):
    """One batch as the trainers got it."""

    number: int
    """The number of batches that the run had trained before this one; exceeds `version` if an update was skipped."""
    version: int
    """The policy version that the batch trains."""
    trajectories: list[Trajectory]
    """All of the batch, in the order from which it was split into micro-batches."""


class Replayed(msgspec.Struct, kw_only=True):
    """The batch that a replay has trained last, by which its checkpoints recognise the recording."""

    number: int
    crc: int
    """CRC-32 of its file."""


REPLAYED = "replay.msgpack"
"""The file of a checkpoint that holds it."""
_decode, _decode_replayed = decoder(Dump).decode, decoder(Replayed).decode


def write(dump: Dump, folder: Path, most_bytes: float = math.inf) -> None:
    """Writes the dump's file into the folder, completely or not at all. Raises OSError, also if the folder holds
    `most_bytes` already."""
    bounded = math.isfinite(most_bytes)
    held = sum(path.stat().st_size for path in folder.glob("batch-*.msgpack")) if bounded else 0
    if bounded and held >= most_bytes:
        raise OSError(errno.EDQUOT, f"{folder} holds {held / 1e9:.1f} GB, the most that rollout.dump_gb allows")
    store(dump, folder / f"batch-{dump.number:06d}.msgpack")


def read(path: Path, decode: Callable[[bytes], Content] = _decode) -> Content:
    """Reads one file, as a Dump or as what another decoder makes of it. Raises ConfigError if it cannot be read or
    holds something else."""
    try:
        found = decode(path.read_bytes())
        _check(found[0] if isinstance(found, tuple) else found)
        return found
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path}: no dump of a batch: {printable(first_line(e))}; put a copy of it back") from None


def check_tokens(dump: Dump, path: Path, vocabulary: float) -> None:
    """Raises ConfigError, which names the file and the trajectory, for a token that a model of `vocabulary` tokens does
    not have."""
    for one in dump.trajectories:
        largest = max((int(part.max()) for part in (one.prompt, one.response) if len(part)), default=0)
        if largest >= vocabulary:
            raise ConfigError(
                f"{path}: trajectory {one.uid} has token {largest}, but the model of model.path has vocab_size="
                f"{vocabulary}: replay it with the model that sampled it, or one of the same tokenizer"
            )


def with_crc(content: bytes) -> tuple[Dump, int]:
    """Decodes a file for `read`: the dump, and the file's CRC-32. Raises msgspec.MsgspecError."""
    return _decode(content), zlib.crc32(content)


def _check(content: object) -> None:
    """Raises ValueError for trajectories whose parts do not fit together."""
    for t in getattr(content, "trajectories", ()):
        if not len(t.response) == len(t.versions) == len(t.loss_mask) == len(getattr(t, "logprobs", t.response)):
            raise ValueError(f"trajectory {t.uid}: not as many versions or log-probabilities as tokens")
        for array in (t.prompt, t.response, t.versions):
            if array.dtype.kind != "i" or array.min(initial=0) < 0:
                raise ValueError(f"trajectory {t.uid}: tokens and versions must be whole numbers from 0")


def dumped(folder: Path) -> dict[int, Path]:
    """Returns the file of each batch by its number, in ascending order. Raises ConfigError if there is none."""
    names = ((path, _NAME.fullmatch(path.name)) for path in folder.iterdir()) if os.path.isdir(folder) else ()
    found = {int(name[1]): path for path, name in names if name}
    if not found:
        raise ConfigError(
            f"{folder}: no batch-*.msgpack in it; a run with rollout.dump=true writes them from its first batch on"
        )
    return dict(sorted(found.items()))


def recorded(folder: Path, first: int, batch_size: int) -> list[Path]:
    """Returns the files of the batches from number `first` on, in order.

    Raises ConfigError if one in between is missing, or if the first does not hold `batch_size` episodes.
    """
    found = {number: path for number, path in dumped(folder).items() if number >= first}
    for number in range(first, max(found, default=first) + 1):
        if number not in found:
            hint = "; begin after it with resume=CHECKPOINT" if found else ""
            raise ConfigError(f"data.train: {folder} lacks batch {number}{hint}")
    if (size := len({t.uid for t in read(found[first]).trajectories})) != batch_size:
        raise ConfigError(f"batch_size: {batch_size}, but batches of {folder} have {size} episodes: set it to that")
    return list(found.values())


def check_same(folder: Path, checkpoint: Path) -> None:
    """Raises ConfigError if the batch that the replay of a checkpoint has trained last differs from the folder's."""
    if not (path := checkpoint / REPLAYED).exists():  # it has trained none
        return
    last = read(path, _decode_replayed)
    found = dumped(folder).get(last.number)
    if found is None or zlib.crc32(read(found, bytes)) != last.crc:
        problem = "is not the one that was trained" if found else "is missing, by which a replay knows its recording"
        raise ConfigError(
            f"data.train: batch {last.number} of {folder} {problem}: continue with the same folder, or have a new run "
            f"begin there: name=… resume={checkpoint}"
        )


def forget(folder: Path, first: int) -> None:
    """Removes the batches from number `first` on, for a run that resumes from a checkpoint before them."""
    for path in folder.glob("batch-*.msgpack"):
        if (name := _NAME.fullmatch(path.name)) and int(name[1]) >= first:
            path.unlink()
