"""Boxes of tensors in files: how they are read, and how files of them are written, a block at a time.

A safetensors file and a torch_dist checkpoint both hold tensors, or boxes of them, uncompressed and in row-major order.
Boxes are read with pread into the caller's memory: the pages of a mapped file would count as this process's own.
Elements are moved as unsigned integers of their size; torch, whose import alone takes seconds, is needed only to cast.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy import ndarray

from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.reshard.boxes import Box, Shape

FP8 = "float8_e4m3fn"
"""The dtype of weights that are read with scales (fp8.py), and as nothing else."""
_BYTES = ITEMSIZE | {FP8: 1}
BLOCK_BYTES = 4 * 2**20
"""Read at a time, while the block before is written."""
SHORT_ROW_BYTES = 16 * 2**10
"""Rows up to this length are read whole, many in a call, and cut in memory: a call for a part of each takes longer."""
WRITE_BYTES = 256 * 2**10
"""Bytes of one call of write; with calls of a megabyte and more the kernel (6.18, ext4) takes four times as long."""
WRITE_BEHIND_BYTES = 64 * 2**20
"""Bytes after which the kernel is told to start writing them to disk, so that little is left when the file is
synced."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written as asked; one line with the problem, its place and the remedy."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The place of a box of a tensor: the file `path` from byte `offset` on."""

    path: Path
    offset: int
    dtype: str
    box: Box


class BoxReader(Protocol):
    """A model on disk that is read by boxes of canonical tensors, each within one layer and one expert."""

    def dtype(self, tensor: str) -> str: ...
    def read(self, tensor: str, box: Box, out: ndarray, dtype: str) -> None: ...
    def close(self) -> None: ...


def empty(shape: Shape, dtype: str, memory: ndarray | None = None) -> ndarray:
    """Returns an array for elements of a dtype of ITEMSIZE, inside `memory` (bytes) if that is large enough."""
    size = prod(shape) * _BYTES[dtype]
    if memory is None or memory.size < size:
        memory = np.empty(size, np.uint8)
    return memory[:size].view(f"u{_BYTES[dtype]}").reshape(shape)


class BlockBuffers:
    """Cuts boxes into blocks of at most BLOCK_BYTES and gives each an array to fill.

    The memory of a block is used again for the block after the next one, and not before.
    """

    def __init__(self):
        self._memory = itertools.cycle([np.empty(BLOCK_BYTES, np.uint8) for _ in range(2)])

    def of(self, box: Box, dtype: str) -> Iterator[tuple[Box, ndarray]]:
        for block in box.cut(BLOCK_BYTES // ITEMSIZE[dtype]):
            yield block, empty(block.shape, dtype, next(self._memory))


class OpenFiles:
    """The files that were read last, kept open: opening one takes as long as reading half a megabyte."""

    def __init__(self, limit: int = 32):
        self._limit = limit
        self._files: dict[Path, FileIO] = {}

    def descriptor(self, path: Path) -> int:
        """Returns the descriptor of the file, open for reading. Raises OSError."""
        file = self._files.pop(path, None) or FileIO(path)
        self._files[path] = file  # the last one of the dict
        if len(self._files) > self._limit:
            self._files.pop(next(iter(self._files))).close()
        return file.fileno()

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


def read_box(files: OpenFiles, extent: Extent, box: Box, out: ndarray, dtype: str) -> None:
    """Fills `out`, an array of the box's shape for elements of `dtype`, with `box`, a part of the extent's box.

    Raises CheckpointError where the file cannot be read or ends too early.
    """
    region, shape = box.within(extent.box), extent.box.shape
    with _told_of(extent.path):
        file = files.descriptor(extent.path)
        _fill(file, extent.offset, shape, region.start, region.stop, extent.dtype, out, dtype)


def raw(array: ndarray) -> memoryview:
    """Returns the bytes of a contiguous array, without a copy."""
    return memoryview(array.reshape(-1).view(np.uint8))


@contextlib.contextmanager
def appending(path: Path, sync: bool) -> Iterator[Callable[[bytes | memoryview], None]]:
    """Opens a new file and yields a function that appends to it on a thread, while the caller makes the next block.

    A call returns once what was passed to the call before has been written; only then may that memory change. sync: the
    file will be synced, so the kernel is told early to bring it to the disk. Raises OSError.
    """
    with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(1) as writer:
        written = writer.submit(int)

        def append(data: bytes | memoryview) -> None:
            nonlocal written
            written.result()
            written = writer.submit(_append, file, memoryview(data), sync)

        yield append
        written.result()


def cast(array: ndarray, stored: str, dtype: str) -> ndarray:
    """Returns the elements of dtype `stored` as elements of `dtype`."""
    import torch

    values = torch.from_numpy(array).view(getattr(torch, stored)).to(getattr(torch, dtype))
    return values.view(getattr(torch, f"uint{8 * ITEMSIZE[dtype]}")).numpy()


def _append(file: FileIO, data: memoryview, sync: bool) -> None:
    before = file.tell() // WRITE_BEHIND_BYTES
    while data:
        data = data[file.write(data[:WRITE_BYTES]) :]
    if sync and before < (now := file.tell() // WRITE_BEHIND_BYTES):
        begin = before * WRITE_BEHIND_BYTES
        os.posix_fadvise(file.fileno(), begin, now * WRITE_BEHIND_BYTES - begin, os.POSIX_FADV_DONTNEED)


def _fill(
    file: int, offset: int, shape: Shape, start: Shape, stop: Shape, stored: str, out: ndarray, dtype: str
) -> None:
    """Reads rows that follow each other in one call, and parts of short ones in few calls, of others one by one."""
    row = prod(shape[1:]) * _BYTES[stored]
    if not any(start[1:]) and stop[1:] == shape[1:]:
        _read_rows(file, offset + start[0] * row, stored, out, dtype)
        return
    if 0 < row <= min(SHORT_ROW_BYTES, BLOCK_BYTES):
        part, many = tuple(map(slice, start[1:], stop[1:])), BLOCK_BYTES // row
        for first in range(0, len(out), many):
            rows = empty((min(many, len(out) - first), *shape[1:]), stored)
            _read(file, offset + (start[0] + first) * row, raw(rows))
            _copy(rows[:, *part], stored, out[first : first + many], dtype)
        return
    for index, rows in zip(range(start[0], stop[0]), out, strict=True):
        _fill(file, offset + index * row, shape[1:], start[1:], stop[1:], stored, rows, dtype)


def _read_rows(file: int, offset: int, stored: str, out: ndarray, dtype: str) -> None:
    direct = stored == dtype and out.flags.c_contiguous
    rows = out if direct else empty(out.shape, stored)
    _read(file, offset, raw(rows))
    if not direct:
        _copy(rows, stored, out, dtype)


def _copy(rows: ndarray, stored: str, out: ndarray, dtype: str) -> None:
    out[...] = rows if stored == dtype else cast(rows, stored, dtype)


def _read(file: int, offset: int, view: memoryview) -> None:
    while view:
        count = os.preadv(file, [view], offset)
        if count == 0:
            raise EOFError
        view, offset = view[count:], offset + count


@contextlib.contextmanager
def _told_of(path: Path) -> Iterator[None]:
    """Turns what reading a file raises into a CheckpointError that names it."""
    try:
        yield
    except EOFError:
        raise CheckpointError(f"{path} ends too early: it is truncated, take another copy of it") from None
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror}") from None
