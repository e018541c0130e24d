"""A rank's file of a checkpoint as it will be on disk, laid out once: each save copies the elements into their places.

torch_dist keeps every chunk as what torch.save makes of a tensor. But for the elements those bytes are the same at
every save, so the image holds them already, and writing it is one sequential pass. (As torch.save may, it leaves the
CRC of the elements undone, which no reader of these files looks at; sizes and CRC of whole files are sealed in
checkpoint_folder.)
"""

from __future__ import annotations

import errno
import io
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
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

from areal_megatron.reshard.boxes import Box, Shape
from areal_megatron.run import RunError
from areal_megatron.trainer.checkpoint_tensors import Stored

_ALIGNMENT = 64
"""torch.save aligns elements to as many bytes, counted from where a chunk begins."""
_WRITE_BYTES = 64 * 2**20
_BLOCK = 4096
"""Direct writes begin, in memory and on disk, at a multiple of so many bytes and have whole multiples of it."""


class Entry(NamedTuple):
    """Where something of the checkpoint lies in a file."""

    name: str
    dtype: torch.dtype | None
    """None: an object, which has no shape and no box either."""
    shape: Shape
    box: Box | None
    offset: int
    length: int


class Image:
    """The bytes of one file, in host memory (pinned, for tensors of a CUDA device)."""

    def __init__(self, tensors: Iterable[Stored], objects: Mapping[str, Any]):
        self._sources, self.entries = [], []
        skeletons: list[tuple[int, bytes]] = []
        places: list[tuple[int, Tensor]] = []
        size = 0
        for stored in tensors:
            head, tail = _skeleton(stored.values.numel(), stored.values.dtype, stored.box)
            elements = size + len(head)
            skeletons += [(size, head), (elements + stored.values.nbytes, tail)]
            places.append((elements, stored.values))
            length = len(head) + stored.values.nbytes + len(tail)
            self.entries.append(Entry(stored.name, stored.values.dtype, stored.shape, stored.box, size, length))
            size = _aligned(size + length)
        for name, value in objects.items():
            data = _saved([value])
            skeletons.append((size, data))
            self.entries.append(Entry(name, None, (), None, size, len(data)))
            size = _aligned(size + len(data))
        self._size = size
        space = _blocks(size, pinned=any(v.is_cuda for _, v in places))
        for start, data in skeletons:
            space[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._space = space
        self._sources = [values for _, values in places]
        self._places = [space[start : start + v.nbytes].view(v.dtype) for start, v in places]

    def copy(self) -> None:
        """Takes the elements as they are now, on the device's current stream."""
        torch._foreach_copy_(self._places, self._sources, non_blocking=True)

    def write(self, path: Path) -> None:
        """Raises OSError.

        Past the page cache where the file system lets it: that takes a fraction of the time of the processor, and what
        others have in the cache stays there (docs/measurements.md).
        """
        data = memoryview(self._space.numpy())
        try:
            with open(path, "wb", buffering=0, opener=_direct) as file:
                _write(file, data)
                file.truncate(self._size)
                os.fsync(file.fileno())
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            write(path, data[: self._size])


def metadata(files: Mapping[str, list[Entry]]) -> bytes:
    """The `.metadata` of a torch_dist folder of these files. Raises RunError unless each tensor is there once."""
    chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for file, entry in ((file, entry) for file, entries in files.items() for entry in entries):
        offset = None if entry.box is None else torch.Size(entry.box.start)
        places[MetadataIndex(entry.name, offset)] = _StorageInfo(file, entry.offset, entry.length)
        if entry.box is None:
            described[entry.name] = BytesStorageMetadata()
            continue
        properties = TensorProperties(dtype=entry.dtype)
        described[entry.name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks[entry.name])
        chunks[entry.name].append(ChunkStorageMetadata(offset, torch.Size(entry.box.shape)))
    for name, parts in chunks.items():
        found, whole = sum(prod(part.sizes) for part in parts), prod(described[name].size)
        if found != whole or len({part.offsets for part in parts}) != len(parts):
            raise RunError(f"the trainer ranks would store {found} elements of {name}, which has {whole}")
    return pickle.dumps(Metadata(state_dict_metadata=described, storage_data=places))


def write(path: Path, data: memoryview) -> None:
    """Writes and syncs a file. Raises OSError."""
    with path.open("wb", buffering=0) as file:
        _write(file, data)
        os.fsync(file.fileno())


def _write(file: io.RawIOBase, data: memoryview) -> None:
    for start in range(0, len(data), _WRITE_BYTES):
        part = data[start : start + _WRITE_BYTES]
        while part:
            part = part[file.write(part) :]


def _direct(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)  # not every system has it


def _blocks(size: int, pinned: bool) -> Tensor:
    """Zeros, at least `size` of them: whole blocks that begin at one."""
    space = torch.zeros(_aligned(size, _BLOCK) + _BLOCK, dtype=torch.uint8, pin_memory=pinned)
    start = -space.data_ptr() % _BLOCK
    return space[start : start + _aligned(size, _BLOCK)]


def _skeleton(count: int, dtype: torch.dtype, box: Box) -> tuple[bytes, bytes]:
    """What torch.save writes before and after the elements of a tensor of the box's shape."""
    file = io.BytesIO()
    with skip_data():
        torch.save(torch.empty(count, dtype=dtype).view(box.shape), file)
    file.seek(0)
    offset = torch._C.PyTorchFileReader(file).get_record_offset("data/0")
    data = file.getbuffer()
    return bytes(data[:offset]), bytes(data[offset + count * dtype.itemsize :])


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _aligned(size: int, to: int = _ALIGNMENT) -> int:
    return -(-size // to) * to
