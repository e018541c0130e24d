"""Files of torch_dist folders as torch and megatron-core read them, each written in one sequential pass.

torch_dist stores every chunk of a tensor as torch.save would write a tensor of its own. But for the elements those
bytes depend on dtype and shape alone, so they are laid out first, and the elements are filled in: by copying into an
image of the whole file in memory, as each save of a trainer rank does, or a block at a time. (As torch.save may, this
leaves out the CRC of the elements, which no reader of these files looks at; checkpoint/folder.py records sizes and
CRCs of whole files.)
"""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from numpy import ndarray
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import skip_data

from areal_megatron.checkpoint.disk import appending, raw
from areal_megatron.checkpoint.torch_dist_metadata import BACKEND
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.process.files import write_atomically
from areal_megatron.reshard.boxes import Box, Shape
from areal_megatron.run.folder import RunError

_ALIGNMENT = 64
"""torch.save aligns elements to this number of bytes, counted from the beginning of a chunk."""
_WRITE_BYTES = 64 * 2**20
_SMALLEST, _LARGEST = 2**20, 2**30
"""The smallest and the largest piece of an image, in bytes."""
_BLOCK = 4096
"""Direct writes begin, in memory and on disk, at a multiple of this number of bytes, as is their length."""


class Stored(NamedTuple):
    """A box of a checkpoint's tensor, to be copied from a live tensor."""

    name: str
    shape: Shape
    """The whole tensor's."""
    box: Box
    values: Tensor
    """Flat, in the order of the box; the live storage."""


class Entry(NamedTuple):
    """The place of a chunk or an object of the checkpoint in a file."""

    name: str
    dtype: torch.dtype | None
    """None: an object, which has neither shape nor box."""
    shape: Shape
    """The whole tensor's."""
    box: Box | None
    offset: int
    length: int


class Image:
    """The bytes of one file in host memory (pinned, for tensors of a CUDA device), laid out once for all saves.

    They are in pieces, because torch takes a power of two for every pinned tensor, up to twice what was asked for.
    """

    def __init__(self, tensors: Iterable[Stored], objects: Mapping[str, Any]):
        tensors = list(tensors)
        laid_out = list(_lay_out(((s.name, s.values.dtype, s.shape, s.box) for s in tensors), objects))
        self.entries = [entry for entry, _, _ in laid_out]
        self._size = _end(self.entries)
        self._pieces = _pieces(self._size, pinned=any(stored.values.is_cuda for stored in tensors))
        for entry, head, tail in laid_out:
            self._fill(entry.offset, head)
            self._fill(entry.offset + entry.length - len(tail), tail)
        self._places: list[Tensor] = []
        self._sources: list[Tensor] = []
        for stored, (entry, head, _) in zip(tensors, laid_out, strict=False):  # objects come after the tensors
            values = stored.values
            for place in self._parts(entry.offset + len(head), values.nbytes):
                self._places.append(place.view(values.dtype))
                self._sources.append(values[: self._places[-1].numel()])
                values = values[self._places[-1].numel() :]

    def copy(self) -> None:
        """Copies the elements as they are now, on the device's current stream."""
        if self._places:
            torch._foreach_copy_(self._places, self._sources, non_blocking=True)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def write(self, path: Path) -> int:
        """Writes and syncs the file; returns its CRC (zlib.crc32), computed beside that. Raises OSError.

        Past the page cache where the file system allows it: that takes a fraction of the processor time, and what
        others have in the cache stays there (docs/measurements.md).
        """
        with ThreadPoolExecutor(1, "checkpoint-crc") as beside:
            crc = beside.submit(self._crc)
            try:
                self._write(path, _direct)
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                self._write(path, None)
            return crc.result()

    def _write(self, path: Path, opener: Callable[[str, int], int] | None) -> None:
        with open(path, "wb", buffering=0, opener=opener) as file:
            for part in self._parts(0, _aligned(self._size, _BLOCK)):
                _write(file, memoryview(part.numpy()))
            file.truncate(self._size)
            os.fsync(file.fileno())

    def _crc(self) -> int:
        crc = 0
        for part in self._parts(0, self._size):
            crc = zlib.crc32(part.numpy(), crc)
        return crc

    def _parts(self, start: int, size: int) -> Iterator[Tensor]:
        """Yields the bytes from `start` on, in as many parts as they are in pieces."""
        for piece in self._pieces:
            if size and start < len(piece):
                part = piece[start : start + size]
                yield part
                size -= len(part)
            start = max(start - len(piece), 0)

    def _fill(self, start: int, data: bytes) -> None:
        for part in self._parts(start, len(data)):
            part.copy_(torch.frombuffer(bytearray(data[: len(part)]), dtype=torch.uint8))
            data = data[len(part) :]


def write_folder(
    folder: Path,
    tensors: Mapping[str, tuple[str, Shape]],
    chunks: Iterable[tuple[str, Box]],
    blocks: Callable[[str, Box], Iterable[ndarray]],
    objects: Iterable[str] = (),
    file_bytes: int = 4 * 2**30,
    sync: bool = False,
) -> None:
    """Writes a torch_dist folder of files of at most file_bytes (or one chunk), from one process.

    tensors: name → dtype and whole shape. blocks: makes the contiguous arrays of a chunk's elements, in order; each is
    written while the next one is made, and may change afterwards. objects: names of entries whose value is None. sync:
    the files will be synced. Raises OSError, and RunError unless the chunks are each tensor once.
    """
    files: list[list[tuple[str, torch.dtype, Shape, Box]]] = [[]]
    size = 0
    for name, box in chunks:
        dtype, shape = tensors[name]
        size += box.size * ITEMSIZE[dtype]
        if size > file_bytes and files[-1]:
            files.append([])
            size = box.size * ITEMSIZE[dtype]
        files[-1].append((name, getattr(torch, dtype), shape, box))
    folder.mkdir()
    written: dict[str, list[Entry]] = {}
    for number, held in enumerate(files):
        entries = written[file_name(number)] = []
        with appending(folder / file_name(number), sync) as append:
            for entry, head, tail in _lay_out(held, {} if number else dict.fromkeys(objects)):
                append(bytes(entry.offset - _end(entries)) + head)
                for block in blocks(entry.name, entry.box) if entry.box else ():
                    append(raw(block))
                append(tail)
                entries.append(entry)
    describe(folder, metadata(written), _saved({}))


def describe(folder: Path, metadata: bytes, common: bytes) -> None:
    """Makes the folder complete, synced: `.metadata`, common.pt, and last metadata.json. Raises OSError."""
    write_atomically(folder / "common.pt", common, sync=True)
    write_atomically(folder / ".metadata", metadata, sync=True)
    write_atomically(folder / "metadata.json", json.dumps(BACKEND), sync=True)


def file_name(number: int) -> str:
    """Returns the name of a folder's file; trainer ranks write the one of their number."""
    return f"__{number}_0.distcp"


def encode(entries: list[Entry]) -> bytes:
    """Returns the entries of a file as bytes, for another process to `decode`."""
    return msgspec.msgpack.encode(entries, enc_hook=lambda dtype: str(dtype).removeprefix("torch."))


def decode(data: bytes) -> list[Entry]:
    """Raises msgspec.ValidationError for anything but entries."""
    return msgspec.msgpack.decode(data, type=list[Entry], dec_hook=_dtype)


def metadata(files: Mapping[str, list[Entry]]) -> bytes:
    """Returns the `.metadata` of a torch_dist folder. Raises RunError unless its files hold every element once."""
    chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for file, entry in ((file, entry) for file, entries in files.items() for entry in entries):
        place = _StorageInfo(file, entry.offset, entry.length)
        if entry.box is None:
            places[MetadataIndex(entry.name, None)] = place
            described[entry.name] = BytesStorageMetadata()
            continue
        assert entry.dtype is not None  # as it has a box
        offset = torch.Size(entry.box.start)
        places[MetadataIndex(entry.name, offset)] = place
        properties = TensorProperties(dtype=entry.dtype)
        described[entry.name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks[entry.name])
        chunks[entry.name].append(ChunkStorageMetadata(offset, torch.Size(entry.box.shape)))
    for name, parts in chunks.items():
        found, whole = sum(prod(part.sizes) for part in parts), prod(described[name].size)
        if found != whole or len({part.offsets for part in parts}) != len(parts):
            raise RunError(f"the trainer ranks would store {found} elements of {name}, which has {whole}")
    return pickle.dumps(Metadata(state_dict_metadata=described, storage_data=places))


def _dtype(_: type, name: str) -> torch.dtype:
    if not isinstance(dtype := getattr(torch, name, None), torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


def _write(file: io.RawIOBase, data: memoryview) -> None:
    for start in range(0, len(data), _WRITE_BYTES):
        part = data[start : start + _WRITE_BYTES]
        while part:
            part = part[file.write(part) :]


def _direct(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)  # not every system has it


def _pieces(size: int, pinned: bool) -> list[Tensor]:
    """Returns at least `size` zeros, less than _SMALLEST more, in pieces whose sizes are powers of two; each is aligned
    to a block."""
    left, pieces = _aligned(size, _SMALLEST), []
    while left:
        length = min(_LARGEST, 1 << (left.bit_length() - 1))
        # Pinned memory is in pages of its own; elsewhere the first whole block is looked for.
        space = torch.zeros(length if pinned else length + _BLOCK, dtype=torch.uint8, pin_memory=pinned)
        start = -space.data_ptr() % _BLOCK
        pieces.append(space[:length] if pinned else space[start : start + length])
        left -= length
    return pieces


def _lay_out(
    chunks: Iterable[tuple[str, torch.dtype, Shape, Box]], objects: Mapping[str, Any]
) -> Iterator[tuple[Entry, bytes, bytes]]:
    """Yields the entries of a file, chunks before objects, each with the bytes before and after its elements."""
    offset = 0
    for name, dtype, shape, box in chunks:
        head, tail = _skeleton(dtype, box.shape)
        length = len(head) + box.size * dtype.itemsize + len(tail)
        yield Entry(name, dtype, shape, box, offset, length), head, tail
        offset = _aligned(offset + length)
    for name, value in objects.items():
        data = _saved([value])
        yield Entry(name, None, (), None, offset, len(data)), data, b""
        offset = _aligned(offset + len(data))


def _end(entries: list[Entry]) -> int:
    return entries[-1].offset + entries[-1].length if entries else 0


@cache
def _skeleton(dtype: torch.dtype, shape: Shape) -> tuple[bytes, bytes]:
    """Returns the bytes that torch.save writes before and after the elements of a tensor."""
    file = io.BytesIO()
    with skip_data():
        torch.save(torch.empty(shape, dtype=dtype), file)
    file.seek(0)
    reader: Any = torch._C.PyTorchFileReader(file)  # torch's stub lacks the method
    offset = reader.get_record_offset("data/0")
    data = file.getbuffer()
    return bytes(data[:offset]), bytes(data[offset + prod(shape) * dtype.itemsize :])


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _aligned(size: int, to: int = _ALIGNMENT) -> int:
    return -(-size // to) * to
