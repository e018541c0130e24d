"""The description of a torch_dist folder, read without torch and without running anything that it says.

Its `.metadata` is a pickle, which torch's own loader trusts, and so is the head of each tensor. Here everything but
shapes and dtypes becomes an inert object, whatever class the pickle names.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from areal_megatron.checkpoint.disk import CheckpointError, Extent
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.process.errors import first_line
from areal_megatron.reshard.boxes import Box, Shape
from areal_megatron.run.json_input import parse_json

BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Content of metadata.json, by which megatron-core knows the format; this file is written last."""

_DTYPES = {dtype: dtype for dtype in ITEMSIZE} | {
    "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16",
    "FloatStorage": "float32",
}
"""The names of tensors' and storages' dtypes in torch's pickles."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, stored as a torch file of its own in the bytes start to stop of `file`."""

    tensor: str
    box: Box
    file: Path
    start: int
    stop: int

    def locate(self) -> Extent:
        """Returns the place of its elements. Raises CheckpointError where they are damaged."""
        try:
            with open(self.file, "rb") as file:
                dtype, shape, offset = _saved_tensor(_Window(file, self.start, self.stop))
            if prod(shape) != self.box.size:
                raise ValueError(f"it has shape {list(shape)}")
            if self.start + offset + self.box.size * ITEMSIZE[dtype] > self.stop:
                raise ValueError("it is longer than its place")
        except Exception as e:  # reading a damaged file raises almost anything
            raise CheckpointError(
                f"{self.file} is damaged: cannot read {self.tensor} from byte {self.start} on "
                f"({first_line(e)}); take another checkpoint"
            ) from None
        return Extent(self.file, self.start + offset, dtype, self.box)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]


def stored_tensors(folder: Path, prefixes: tuple[str, ...]) -> dict[str, StoredTensor]:
    """Returns the tensors whose names begin with one of `prefixes`.

    Raises CheckpointError where the folder is no whole torch_dist checkpoint: its description cannot be read, or a
    file with one of these tensors is missing or shorter than it should be.
    """
    _check_backend(folder)
    try:
        with open(folder / ".metadata", "rb") as file:
            metadata = _Unpickler(file).load()
        places = {
            (index.fqn, tuple(getattr(index, "offset", None) or ())): place
            for index, place in metadata.storage_data.items()
        }
        tensors = {
            name: StoredTensor(_dtype(name, stored), tuple(stored.size), _chunks(folder, name, stored, places))
            for name, stored in metadata.state_dict_metadata.items()
            if name.startswith(prefixes) and hasattr(stored, "chunks")
        }
    except KeyError as e:
        raise CheckpointError(
            f"{folder}/.metadata does not say where {e.args[0]} lies; take another checkpoint"
        ) from None
    except Exception as e:  # unpickling raises almost anything
        raise CheckpointError(f"cannot read {folder}/.metadata ({e}); take another checkpoint") from None
    _check_files(folder, places.values(), {chunk.file for stored in tensors.values() for chunk in stored.chunks})
    return tensors


def _check_backend(folder: Path) -> None:
    try:
        backend = parse_json((folder / "metadata.json").read_bytes())["sharded_backend"]
    except OSError as e:
        raise CheckpointError(
            f"{folder} is no whole torch_dist checkpoint: cannot read metadata.json ({e.strerror}), "
            "which is written last"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{folder}/metadata.json names no sharded_backend; take another checkpoint") from None
    if backend != BACKEND["sharded_backend"]:
        raise CheckpointError(f"{folder} has the format {backend!r}; only torch_dist can be converted")


def _chunks(folder: Path, name: str, stored: Any, places: dict[tuple[str, Shape], Any]) -> tuple[Chunk, ...]:
    chunks = []
    for chunk in stored.chunks:
        start, shape = tuple(chunk.offsets), tuple(chunk.sizes)
        box = Box(start, tuple(a + n for a, n in zip(start, shape, strict=True)))
        place = places[name, start]
        if getattr(place, "transform_descriptors", None):
            raise ValueError(f"{name} is transformed, which is not supported")
        chunks.append(Chunk(name, box, folder / place.relative_path, place.offset, place.offset + place.length))
    return tuple(chunks)


def _check_files(folder: Path, places: Any, files: set[Path]) -> None:
    """Raises CheckpointError unless the files are long enough for all that should be in them, the optimizer's part
    included."""
    ends: dict[Path, int] = defaultdict(int)
    for place in places:
        path = folder / place.relative_path
        ends[path] = max(ends[path], place.offset + place.length)
    for path in sorted(files):
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; take another checkpoint or copy it whole")
        if (size := path.stat().st_size) < ends[path]:
            raise CheckpointError(
                f"{path} has {size:,} bytes and should have {ends[path]:,}: it is truncated; take "
                "another checkpoint or copy it whole"
            )


def _dtype(name: str, stored: Any) -> str:
    dtype = stored.properties.state[0]
    if dtype not in ITEMSIZE:
        raise ValueError(f"{name} has another dtype than {', '.join(ITEMSIZE)}")
    return dtype


def _saved_tensor(file: _Window) -> tuple[str, Shape, int]:
    """Returns dtype, shape and first byte of the elements of a tensor that torch.save wrote: a zip file that compresses
    nothing, with a pickle of the tensor's description in `data.pkl` and its storage in `data/0`."""
    with zipfile.ZipFile(file) as records:
        entries = {entry.filename.partition("/")[2]: entry for entry in records.infolist()}
        if records.read(entries["byteorder"]).decode() != sys.byteorder:
            raise ValueError("it has another byte order than this machine")
        saved = _Unpickler(io.BytesIO(records.read(entries["data.pkl"]))).load()
    (_, dtype, key, *_), first, shape, strides = saved.arguments[:4]
    storage = entries[f"data/{key}"]
    if dtype not in ITEMSIZE or storage.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"it is compressed or has another dtype than {', '.join(ITEMSIZE)}")
    if tuple(strides) != tuple(prod(shape[axis + 1 :]) for axis in range(len(shape))):
        raise ValueError(f"it has shape {list(shape)} and strides {list(strides)}")
    file.seek(storage.header_offset)
    *_, name, extra = struct.unpack("<4s5H3I2H", file.read(30))  # the header in front of the elements
    return dtype, tuple(shape), storage.header_offset + 30 + name + extra + first * ITEMSIZE[dtype]


class _Inert:
    """Keeps what a pickled object was made of and does nothing."""

    def __init__(self, *arguments: Any, **options: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":
            return tuple if name == "Size" else _DTYPES.get(name, _Inert)
        return _Inert

    def persistent_load(self, pid: Any) -> Any:
        return pid


class _Window(io.RawIOBase):
    """The bytes from start to stop of a file, as a file."""

    def __init__(self, file: io.BufferedReader, start: int, stop: int):
        self._file, self._start, self._size, self._at = file, start, stop - start, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(self._size - self._at, 0)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view)
        self._at += count
        return count
