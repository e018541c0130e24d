"""Tensors inside files: where their bytes lie, and how a region of them is read.

A safetensors file and a torch_dist checkpoint both hold tensors, or boxes of them, uncompressed and row by row.
Regions are read with pread into memory of the caller: pages of a mapped file would count as this process's own.
Elements are moved as unsigned integers of their size; torch, whose import alone takes seconds, is needed to cast only.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path

import numpy as np
from numpy import ndarray

from areal_megatron.reshard.boxes import Box, Shape, whole

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Of the dtypes that can be read and written, by torch's names."""
SAFETENSORS_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
HEADER_LIMIT = 100 * 2**20
"""Bytes of a safetensors header; the safetensors library refuses more."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written as asked; one line that says what, where and what to do."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The box `box` of a tensor lies in the file `path` from byte `offset` on."""

    path: Path
    offset: int
    dtype: str
    box: Box


def empty(shape: Shape, dtype: str, memory: ndarray | None = None) -> ndarray:
    """An array for elements of a dtype of ITEMSIZE; in `memory`, bytes, if it is large enough."""
    size = prod(shape) * ITEMSIZE[dtype]
    if memory is None or memory.size < size:
        memory = np.empty(size, np.uint8)
    return memory[:size].view(f"u{ITEMSIZE[dtype]}").reshape(shape)


class OpenFiles:
    """The files that were read from last, kept open: opening one takes as long as reading half a megabyte."""

    def __init__(self, limit: int = 32):
        self._limit = limit
        self._files: dict[Path, FileIO] = {}

    def descriptor(self, path: Path) -> int:
        """Of the file, open for reading. Raises OSError."""
        file = self._files.pop(path, None) or FileIO(path)
        self._files[path] = file  # the last one of the dict
        if len(self._files) > self._limit:
            self._files.pop(next(iter(self._files))).close()
        return file.fileno()

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


def read(files: OpenFiles, extent: Extent, region: Box, out: ndarray, dtype: str) -> None:
    """Fills `out`, of the region's shape and for elements of `dtype`, with `region`, a part of the extent's box.

    Raises CheckpointError where the file cannot be read or ends too early.
    """
    start, stop = inside(extent.box, region)
    try:
        _fill(files.descriptor(extent.path), extent.offset, extent.box.shape, (start, stop), extent.dtype, out, dtype)
    except EOFError:
        raise CheckpointError(f"{extent.path} ends too early: it is truncated, take another copy of it") from None
    except OSError as e:
        raise CheckpointError(f"cannot read {extent.path}: {e.strerror}") from None


def inside(outer: Box, region: Box) -> tuple[Shape, Shape]:
    """Start and stop of `region`, counted from the start of `outer`."""
    start = tuple(a - base for a, base in zip(region.start, outer.start, strict=True))
    stop = tuple(b - base for b, base in zip(region.stop, outer.start, strict=True))
    return start, stop


def part(array: ndarray, box: Box, region: Box) -> ndarray:
    """The view of `array`, which holds the box, that holds `region` of it."""
    return array[tuple(map(slice, *inside(box, region)))]


def raw(array: ndarray) -> memoryview:
    """The bytes of a contiguous array, without a copy."""
    return memoryview(array.reshape(-1).view(np.uint8))


def _fill(
    file: int, offset: int, shape: Shape, region: tuple[Shape, Shape], stored: str, out: ndarray, dtype: str
) -> None:
    """Reads rows that follow each other at once, others one after another."""
    start, stop = region
    row = prod(shape[1:]) * ITEMSIZE[stored]
    if not any(start[1:]) and stop[1:] == shape[1:]:
        _read_rows(file, offset + start[0] * row, stored, out, dtype)
        return
    for index, rows in zip(range(start[0], stop[0]), out, strict=True):
        _fill(file, offset + index * row, shape[1:], (start[1:], stop[1:]), stored, rows, dtype)


def _read_rows(file: int, offset: int, stored: str, out: ndarray, dtype: str) -> None:
    direct = stored == dtype and out.flags.c_contiguous
    rows = out if direct else empty(out.shape, stored)
    view = raw(rows)
    while view:
        count = os.preadv(file, [view], offset)
        if count == 0:
            raise EOFError
        view, offset = view[count:], offset + count
    if not direct:
        out[...] = rows if stored == dtype else _cast(rows, stored, dtype)


def _cast(array: ndarray, stored: str, dtype: str) -> ndarray:
    import torch

    values = torch.from_numpy(array).view(getattr(torch, stored)).to(getattr(torch, dtype))
    return values.view(getattr(torch, f"uint{8 * ITEMSIZE[dtype]}")).numpy()


def safetensors_extents(path: Path) -> dict[str, Extent]:
    """Name → extent of every tensor of a safetensors file.

    Raises CheckpointError where it is damaged or has tensors of other dtypes than SAFETENSORS_DTYPES.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > HEADER_LIMIT:
                raise ValueError("its header is too long")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        extents, end = {}, 8 + length
        for name, entry in header.items():
            box, (start, stop) = whole(entry["shape"]), entry["data_offsets"]
            if entry["dtype"] not in SAFETENSORS_DTYPES:
                raise CheckpointError(
                    f"{path}: {name} has dtype {entry['dtype']}; supported are {', '.join(SAFETENSORS_DTYPES)}"
                )
            dtype = SAFETENSORS_DTYPES[entry["dtype"]]
            if stop - start != box.size * ITEMSIZE[dtype] or 8 + length + stop > size:
                raise ValueError(f"{name} does not lie in it whole")
            extents[name] = Extent(path, 8 + length + start, dtype, box)
            end = max(end, 8 + length + stop)
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror}") from None
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as e:
        raise CheckpointError(f"{path} is truncated or no safetensors file: {e}; take another copy of it") from None
    return extents


def safetensors_header(tensors: Mapping[str, tuple[str, Shape]]) -> bytes:
    """What a safetensors file begins with if the tensors, name → dtype and shape, follow in their order."""
    names = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * ITEMSIZE[dtype]
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors are to begin at a multiple of 8 bytes
    return struct.pack("<Q", len(text)) + text
