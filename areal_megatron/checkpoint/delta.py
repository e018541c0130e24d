"""Exports that hold only what has changed since another export, their base, and read like whole ones.

```
runs/NAME/exports/version-000012/
    delta.json          which folder is the base; written last
    delta.safetensors   for each tensor NAME of the model `NAME` (U8), its chunks one after another, and `NAME/chunks`
                        (U32 [chunks, 2]): each chunk's bytes there, and the CRC of its elements
    hf/                 config.json, tokenizer and the like, only where they are not the base's
```
A chunk is a run of `chunk_elements` elements of a tensor. The file has its changes (reshard/changes.py), or its
elements as they are where that is smaller, or nothing if they are the base's: its length says which. The base is a
Hugging Face folder, or has a base in turn. Elements are compared with their CRC before anybody gets them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from numpy import ndarray

from areal_megatron.checkpoint.disk import (
    BoxReader,
    CheckpointError,
    OpenFiles,
    appending,
    cast,
    empty,
    raw,
    read_bytes,
)
from areal_megatron.checkpoint.hf_folder import (
    HfFolder,
    HfTensor,
    SafetensorsEntry,
    copy_description,
    describing_files,
    safetensors_entries,
    safetensors_header,
)
from areal_megatron.files import set_aside, write_atomically
from areal_megatron.models.architecture import DELTA, architecture, read_config
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.models.pattern import name_at
from areal_megatron.reshard import changes
from areal_megatron.reshard.boxes import Box, Shape, boxes, expand, numbers
from areal_megatron.reshard.changes import ChangesError

CHUNK_ELEMENTS = 2 * 2**20
_MOST_BASES = 64
"""Most bases below each other: twice as many as the versions of a run would ever ask for."""
_THREADS = 2
"""Chunks whose changes are looked for while the next ones are read, which takes about as long."""
_FILE = "delta.safetensors"
_DESCRIPTION = "hf"
_FORMAT = 1
_VERSION = re.compile(r"version-(\d+)")
_ANOTHER = "take another copy of it, or another export"
_ABOUT = "What has changed since the model in `base`. Whole again: areal convert to-hf THIS_FOLDER NEW_FOLDER"
Part, Done = TypeVar("Part"), TypeVar("Done")


class _Described(msgspec.Struct, kw_only=True):
    """The content of delta.json."""

    about: str
    format: int
    base: str
    """The base's folder, from this one on or from the root."""
    chunk_elements: int
    changed_share: float
    """How many of the model's elements are not the base's."""
    description_crc: int
    """CRC of the files that describe the model, whichever folder has them."""


class _Chunk(NamedTuple):
    """A row of `NAME/chunks`."""

    nbytes: int
    crc: int


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the model."""

    pattern: str
    index: Shape
    """The numbers of layer and expert."""
    shape: Shape

    @property
    def name(self) -> str:
        return name_at(self.pattern, self.index)

    def chunks(self, elements: int) -> Iterator[tuple[int, int]]:
        """Yields where each chunk starts and stops."""
        size = prod(self.shape)
        return ((start, min(start + elements, size)) for start in range(0, size, elements))

    def read(self, reader: BoxReader, start: int, stop: int, dtype: str) -> ndarray:
        """Returns the elements start to stop."""
        elements, done = empty((stop - start,), dtype), 0
        for box in boxes(self.shape, start, stop):
            of_pattern = Box(self.index + box.start, tuple(n + 1 for n in self.index) + box.stop)
            reader.read(self.pattern, of_pattern, elements[done:][: box.size].reshape(of_pattern.shape), dtype)
            done += box.size
        return elements


class DeltaFolder:
    """The model of an export that holds changes, read by boxes of canonical tensors; `description` is the folder with
    its config.json and tokenizer.

    Raises CheckpointError where the folder or a base is missing, damaged, or another one than this was made from.
    """

    def __init__(self, folder: Path, above: tuple[Path, ...] = ()):
        described = _read_description(folder)
        self._folder, self._file = folder, folder / _FILE
        self._base_folder, self._chunk_elements = _base(folder, described), described.chunk_elements
        above = (*above, folder.resolve())
        if len(above) > _MOST_BASES:
            raise CheckpointError(
                f"{above[0]} is made from more than {_MOST_BASES} others, each from the next: {_ANOTHER}"
            )
        if self._base_folder in above:
            raise CheckpointError(f"{folder / DELTA} names {self._base_folder} as its base, which is made from it")
        if not os.path.isdir(self._base_folder):
            raise CheckpointError(
                f"{folder} holds what has changed since {self._base_folder}, which is not there: bring it back, or "
                "take another export"
            )
        self._base, described_base = open_export(self._base_folder, above)
        try:
            self.description = self._described(described, described_base)
            self._canonical = architecture(read_config(self.description)).canonical
            if architecture(read_config(described_base)).canonical != self._canonical:
                raise CheckpointError(f"{self._base_folder} is another model than {folder} was made from; {_ANOTHER}")
            self._entries = self._checked(safetensors_entries(self._file))
        except BaseException:
            self._base.close()
            raise
        self._files = OpenFiles()
        self._chunks: tuple[_Tensor | None, list[_Chunk], list[int]] = (None, [], [])
        """The tensor that was read last, its chunks, and where in the file they begin."""
        self._last: tuple[_Tensor | None, int, ndarray] = (None, 0, np.empty(0))
        """The chunk that was read last."""

    def dtype(self, tensor: str) -> str:
        """Returns the dtype of a canonical pattern."""
        return self._base.dtype(tensor)

    def read(self, tensor: str, box: Box, out: ndarray, dtype: str) -> None:
        """Fills `out`, an array of the box's shape for elements of `dtype`, with a box of a canonical pattern.

        The box must be a run of elements of one layer and expert, and `out` contiguous.
        """
        named, stored = numbers(tensor), self.dtype(tensor)
        found = _Tensor(tensor, box.start[:named], self._canonical[tensor][named:])
        start = 0
        for position, size in zip(box.start[named:], found.shape, strict=True):
            start = start * size + position
        values, done = out.reshape(-1) if dtype == stored else empty((box.size,), stored), 0
        while done < box.size:
            number, first = divmod(start + done, self._chunk_elements)
            part = self._chunk(found, number)[first:][: box.size - done]
            values[done : done + part.size] = part
            done += part.size
        if dtype != stored:
            out[...] = cast(values, stored, dtype).reshape(out.shape)

    def close(self) -> None:
        self._files.close()
        self._base.close()

    def _described(self, described: _Described, described_base: Path) -> Path:
        """Returns the folder with config.json and tokenizer, which are those that were written."""
        own = self._folder / _DESCRIPTION
        found = own if own.is_dir() else described_base
        if _description_crc(found) != described.description_crc:
            raise CheckpointError(
                f"{found}: config.json, tokenizer or the like have been changed since {self._folder} was written"
            )
        return found

    def _checked(self, entries: dict[str, SafetensorsEntry]) -> dict[str, SafetensorsEntry]:
        for name, shape in expand(self._canonical).items():
            rows = -(-prod(shape) // self._chunk_elements)
            table = entries.get(_table(name), SafetensorsEntry("", (), 0, 0))
            if name not in entries or (table.dtype, table.shape, table.nbytes) != ("U32", (rows, 2), 8 * rows):
                raise CheckpointError(f"{self._file} does not have {name} as config.json describes it; {_ANOTHER}")
        return entries

    def _chunk(self, tensor: _Tensor, number: int) -> ndarray:
        """Returns the elements of a chunk."""
        if self._last[:2] != (tensor, number):
            self._last = tensor, number, self._read_chunk(tensor, number)
        return self._last[2]

    def _read_chunk(self, tensor: _Tensor, number: int) -> ndarray:
        if self._chunks[0] != tensor:
            self._chunks = tensor, *self._read_table(tensor.name)
        _, chunks, offsets = self._chunks
        (nbytes, crc), dtype = chunks[number], self.dtype(tensor.pattern)
        start = number * self._chunk_elements
        stop = min(start + self._chunk_elements, prod(tensor.shape))
        stored = np.empty(nbytes, np.uint8)
        read_bytes(self._files, self._file, offsets[number], stored)
        wrong = f"{self._file} is damaged"
        try:
            if nbytes == (stop - start) * ITEMSIZE[dtype]:
                elements = stored.view(f"u{ITEMSIZE[dtype]}")
            else:
                found = _decoded(stored, stop - start, ITEMSIZE[dtype]) if nbytes else None
                wrong = f"{self._base_folder} is not what {self._folder} was made from, or one of them is damaged"
                elements = tensor.read(self._base, start, stop, dtype)
                if found:
                    found.apply(_signed(elements))
            if zlib.crc32(elements) != crc:
                raise ChangesError("its checksum is wrong")
        except ChangesError as e:
            raise CheckpointError(f"{wrong}: {tensor.name}: {e}; {_ANOTHER}") from None
        return elements

    def _read_table(self, name: str) -> tuple[list[_Chunk], list[int]]:
        entry, table = self._entries[name], self._entries[_table(name)]
        rows = np.empty(table.shape, np.uint32)
        read_bytes(self._files, self._file, table.offset, rows)
        chunks = [_Chunk(*row) for row in rows.tolist()]
        offsets = [*accumulate((chunk.nbytes for chunk in chunks), initial=entry.offset)]
        if offsets[-1] != entry.offset + entry.nbytes:
            raise CheckpointError(f"{self._file} is damaged: {name}: its chunks are not as long as it; {_ANOTHER}")
        return chunks, offsets


def open_export(folder: Path, above: tuple[Path, ...] = ()) -> tuple[BoxReader, Path]:
    """Opens a Hugging Face folder, or one of changes; returns also the folder that describes the model.

    above: the folders that have this one as their base. Raises CheckpointError, and ConfigError for config.json.
    """
    if (folder / DELTA).exists():
        delta = DeltaFolder(folder, above)
        return delta, delta.description
    return HfFolder.of_model(folder, read_config(folder)), folder


def write_delta(
    folder: Path,
    model: list[HfTensor],
    source: BoxReader,
    description: Path,
    base: Path,
    *,
    sync: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> float:
    """Writes into `folder` what `source` has that the export `base` has not; `description` is as for copy_description.

    Returns the share of elements that differ. progress: told the bytes of the model that have been read. Raises
    OSError, and CheckpointError if the base cannot be read or is an export of another model or dtype.
    """
    before, described_before = open_export(base)
    try:
        _check_same(model, before, base, described_before)
        changed = _write_changes(folder / _FILE, model, source, before, sync, progress)
    finally:
        before.close()
    (folder / _DESCRIPTION).mkdir()
    copy_description(description, folder / _DESCRIPTION, model[0].dtype)
    crc = _description_crc(folder / _DESCRIPTION)
    if crc == _description_crc(described_before):
        shutil.rmtree(folder / _DESCRIPTION)
    beside = base.resolve().parent == folder.resolve().parent
    share = changed / sum(tensor.box.size for tensor in model)
    described = _Described(
        about=_ABOUT,
        format=_FORMAT,
        base=f"../{base.resolve().name}" if beside else str(base.resolve()),
        chunk_elements=CHUNK_ELEMENTS,
        changed_share=share,
        description_crc=crc,
    )
    write_atomically(folder / DELTA, msgspec.json.format(msgspec.json.encode(described)) + b"\n")
    return share


def base_for(exports: Path, version: int, every: int, deltas: int) -> Path | None:
    """Returns the export from which the one of `version` is to be made, None if it is to be a whole one.

    Of deltas + 1 versions, each `every` after the one before, the first is whole. The others are counted from 1, and
    the base of number k is k without its lowest one bit: 0 of 1, 0 of 2, 2 of 3, 0 of 4, 4 of 5, 4 of 6, 6 of 7. So
    each is at most log2(deltas + 1) bases away from the whole one, and most have a near one, since which little has
    changed. If an export is missing, because it failed or the run began in between, its own base takes its place, or
    else the first of those that are there; if none is, the export is whole.
    """
    number = version // every % (deltas + 1)
    first = version - number * every
    there = {found: folder for found, folder in _exported(exports) if first <= found < version}
    while number:
        number &= number - 1
        if base := there.get(first + number * every):
            return base
    return there[min(there)] if there else None


def remove(export: Path) -> None:
    """Removes an export and those beside it that hold what has changed since it, which are nothing without it."""
    for _, other in _exported(export.parent):
        with contextlib.suppress(CheckpointError):  # it is whole, or damaged
            if _base(other, _read_description(other)) == export.resolve():
                remove(other)
    shutil.rmtree(set_aside(export, "removed"), ignore_errors=True)


def _exported(exports: Path) -> list[tuple[int, Path]]:
    """Returns the exports of a run, each with its version."""
    folders = sorted(exports.iterdir()) if exports.is_dir() else []
    return [(int(found[1]), folder) for folder in folders if (found := _VERSION.fullmatch(folder.name))]


def _check_same(model: list[HfTensor], before: BoxReader, base: Path, description: Path) -> None:
    shapes = expand(architecture(read_config(description)).canonical)
    if {tensor.name: tensor.shape for tensor in model} != shapes:
        raise CheckpointError(f"{base} is an export of another model: take one of this model, or make a whole export")
    for tensor in model:
        if (dtype := before.dtype(tensor.pattern)) != tensor.dtype:
            raise CheckpointError(
                f"{base} has {tensor.name} in {dtype}, which is to be in {tensor.dtype}: make a whole export"
            )


def _write_changes(
    path: Path,
    model: list[HfTensor],
    source: BoxReader,
    before: BoxReader,
    sync: bool,
    progress: Callable[[int], None],
) -> int:
    """Returns how many elements differ."""
    tensors = [_Tensor(t.pattern, t.box.start[: numbers(t.pattern)], t.shape) for t in model]
    tables = {tensor.name: len([*tensor.chunks(CHUNK_ELEMENTS)]) for tensor in tensors}
    room = len(_header({t.name: t.nbytes for t in model}, tables))  # no tensor takes more
    sizes, rows, changed = Counter(), [], 0

    def parts() -> Iterator[tuple[str, ndarray, ndarray]]:
        for tensor, dtype in zip(tensors, (t.dtype for t in model), strict=True):
            for start, stop in tensor.chunks(CHUNK_ELEMENTS):
                yield tensor.name, tensor.read(before, start, stop, dtype), tensor.read(source, start, stop, dtype)

    with appending(path, sync) as append, ThreadPoolExecutor(_THREADS) as pool:
        append(bytes(room))
        for (name, _, now), (data, crc, count) in _in_order(pool, lambda part: _encoded(*part[1:]), parts()):
            append(data)
            rows.append((len(data), crc))
            sizes[name] += len(data)
            changed += count
            progress(now.nbytes)
        append(raw(np.array(rows, np.uint32)))
    with open(path, "r+b") as file:
        file.write(_header(sizes, tables, room))
    return changed


def _encoded(then: ndarray, now: ndarray) -> tuple[bytes | memoryview, int, int]:
    """Returns what the file has of a chunk, the CRC of its elements, and how many of them differ."""
    found, _ = changes.find(*(torch.from_numpy(_signed(elements)) for elements in (then, now)))
    count = len(found.places)
    data = changes.encode(found, changes.zstd) if count else b""
    return data if len(data) < now.nbytes else raw(now), zlib.crc32(now), count


def _in_order(
    pool: ThreadPoolExecutor, work: Callable[[Part], Done], parts: Iterable[Part]
) -> Iterator[tuple[Part, Done]]:
    """Yields each part with what `work` makes of it; a few are worked on at a time, and no more are in memory."""
    running: deque[tuple[Part, Future[Done]]] = deque()
    for part in parts:
        running.append((part, pool.submit(work, part)))
        if len(running) > _THREADS:
            part, done = running.popleft()
            yield part, done.result()
    yield from ((part, done.result()) for part, done in running)


def _header(sizes: Mapping[str, int], tables: Mapping[str, int], room: int = 0) -> bytes:
    data = [(name, "U8", (size,), size) for name, size in sizes.items()]
    return safetensors_header([*data, *((_table(name), "U32", (n, 2), 8 * n) for name, n in tables.items())], room)


def _table(name: str) -> str:
    return f"{name}/chunks"


def _decoded(stored: ndarray, elements: int, itemsize: int) -> changes.Changes:
    found, length = changes.decode(stored, elements, itemsize)
    if length != stored.size:
        raise ChangesError("more follows than its changes")
    return found


def _signed(elements: ndarray) -> ndarray:
    return elements.view(f"i{elements.itemsize}")


def _read_description(folder: Path) -> _Described:
    path = folder / DELTA
    try:
        described = msgspec.json.decode(path.read_bytes(), type=_Described)
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is damaged ({e}); {_ANOTHER}") from None
    if described.format != _FORMAT:
        raise CheckpointError(f"{path} has format {described.format}, not {_FORMAT}: take the release that wrote it")
    if described.chunk_elements < 1:
        raise CheckpointError(f"{path} is damaged (chunk_elements is {described.chunk_elements}); {_ANOTHER}")
    return described


def _base(folder: Path, described: _Described) -> Path:
    try:
        return (folder / described.base).resolve()
    except (OSError, ValueError, RuntimeError) as e:  # it is too long, has a NUL, or links go round
        raise CheckpointError(f"{folder / DELTA} is damaged (base: {e}); {_ANOTHER}") from None


def _description_crc(folder: Path) -> int:
    crc = 0
    for file in describing_files(folder):
        name = file.relative_to(folder).as_posix()
        crc = zlib.crc32(name.encode() + b"\0" + file.read_bytes() + b"\0", crc)
    return crc
