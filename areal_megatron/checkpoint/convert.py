"""Distributed checkpoints into Hugging Face folders and back, a block at a time.

A checkpoint folder holds `trainer/`, a torch_dist folder as megatron-core writes it, and `hf/`, all of the Hugging
Face folder but the weights.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from io import FileIO
from itertools import groupby, product
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy import ndarray

from areal_megatron.checkpoint import torch_dist
from areal_megatron.checkpoint.disk import ITEMSIZE, CheckpointError, empty, part, raw, safetensors_header
from areal_megatron.checkpoint.hf_folder import INDEX, SINGLE, HfFolder, copy_description
from areal_megatron.checkpoint.torch_dist import DistCheckpoint
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.reshard.boxes import Box, Shape, numbers

BLOCK_BYTES = 4 * 2**20
"""Read at once, while another is written."""
WRITE_BYTES = 256 * 2**10
"""A call of write; the kernel (6.18, ext4) takes four times as long for the bytes of larger ones, of a megabyte and
more."""
CHUNK_BYTES = 32 * 2**20
"""Of a tensor that from_hf stores as one; the writer keeps the last one of each tensor's name."""
WRITE_BEHIND_BYTES = 64 * 2**20
"""After so many the kernel is told to begin writing them to the disk, so that little is left when a file is synced."""
TRAINER, DESCRIPTION = "trainer", "hf"
"""Of a checkpoint folder: the torch_dist folder, and config, tokenizer and the like."""
Report = Callable[[int, int], None]
"""Told (bytes done, bytes to do) after each block."""


class Source(Protocol):
    """A model on disk that is read by boxes of canonical tensors, each within one layer and one expert."""

    def dtype(self, tensor: str) -> str: ...
    def read(self, tensor: str, box: Box, out: ndarray, dtype: str) -> None: ...


class Entry(NamedTuple):
    """One tensor of a Hugging Face folder: a box of the canonical pattern `tensor`."""

    name: str
    tensor: str
    box: Box
    dtype: str

    @property
    def shape(self) -> Shape:
        return self.box.shape[numbers(self.tensor) :]

    @property
    def nbytes(self) -> int:
        return self.box.size * ITEMSIZE[self.dtype]

    def blocks(self) -> Iterator[Box]:
        return blocks(self.box, numbers(self.tensor), self.dtype, BLOCK_BYTES)


def to_hf(
    checkpoint: Path,
    out: Path,
    *,
    description: Path | None = None,
    dtype: str | None = None,
    shard_bytes: int = 4 * 2**30,
    verify: bool = False,
    sync: bool = True,
    report: Report = lambda done, total: None,
) -> None:
    """Writes the checkpoint folder's model as the Hugging Face folder `out`, which appears whole or not at all.

    `checkpoint` may also be a torch_dist folder alone; then `description` is a folder with config.json, tokenizer
    and so on. dtype: of the result, None for the checkpoint's own. Files have at most shard_bytes, or one tensor.
    verify: reads the result back and compares. sync: returns once everything is on the disk; without, a power failure
    soon after it may leave a folder with holes. Raises CheckpointError, or ConfigError for a config.json that is
    missing or describes no known model.
    """
    trainer, description = _folders(checkpoint, description)
    config = read_config(description)
    canonical = architecture(config).canonical
    with closing(DistCheckpoint(trainer, config)) as source:
        model = entries(canonical, lambda tensor: dtype or source.dtype(tensor))
        total = sum(entry.nbytes for entry in model)
        progress = _Progress(report, total * (1 + verify))
        with whole_folder(out, total, sync) as folder:
            _write_shards(folder, model, source, shard_bytes, sync, progress)
            copy_description(description, folder, model[0].dtype)
            if verify:
                with closing(HfFolder(folder, config)) as result:
                    compare(source, result, model, progress)


def from_hf(
    source: Path,
    out: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = 4 * 2**30,
    verify: bool = False,
    sync: bool = True,
    report: Report = lambda done, total: None,
) -> None:
    """Writes a Hugging Face folder as the checkpoint folder `out`: the model, no optimizer. As to_hf in all else.

    Layer norms are written under both names that megatron-core has for them, with TransformerEngine and without.
    """
    from areal_megatron.checkpoint import torch_dist_writer

    config = read_config(source)
    model = HfFolder(source, config)
    layout = torch_dist.layout(config)
    pieces = torch_dist.by_parameter(layout)
    held = dict(layout.held)
    for plain, fused in torch_dist.ALIASES.items():
        held[fused], pieces[fused] = held[plain], pieces[plain]
    tensors = {name: (dtype or model.dtype(pieces[name][0].tensor), shape) for name, shape in held.items()}
    chunks = [
        (name, block)
        for name, (kind, shape) in tensors.items()
        for box in _singles(shape, numbers(pieces[name][0].tensor))
        for block in blocks(box, numbers(pieces[name][0].tensor), kind, CHUNK_BYTES)
    ]
    total = sum(prod(shape) * ITEMSIZE[kind] for kind, shape in tensors.values())
    dtypes = {piece.tensor: tensors[piece.parameter][0] for piece in layout.pieces}
    written = entries(layout.canonical, dtypes.__getitem__)
    progress = _Progress(report, total + verify * sum(entry.nbytes for entry in written))

    def resolve(name: str, box: Box) -> ndarray:
        array = empty(box.shape, kind := tensors[name][0])
        for piece in pieces[name]:
            if common := piece.local.intersection(box):
                model.read(piece.tensor, torch_dist.canonical_box(piece, common), part(array, box, common), kind)
        progress(array.nbytes)
        return array

    with closing(model), whole_folder(out, total, sync) as folder:
        (folder / DESCRIPTION).mkdir()
        copy_description(source, folder / DESCRIPTION, written[0].dtype)
        objects = torch_dist_writer.extra_states(layout.held, pieces)
        torch_dist_writer.write(folder / TRAINER, tensors, chunks, resolve, objects, shard_bytes)
        if verify:
            with closing(DistCheckpoint(folder / TRAINER, config)) as result:
                compare(model, result, written, progress)


def entries(canonical: Mapping[str, Shape], dtype: Callable[[str], str]) -> list[Entry]:
    """The tensors of a Hugging Face folder layer by layer."""
    found = []
    for _, patterns in groupby(canonical, key=lambda tensor: bool(numbers(tensor))):
        boxes = [(tensor, box) for tensor in patterns for box in _singles(canonical[tensor], numbers(tensor))]
        for tensor, box in sorted(boxes, key=lambda pair: pair[1].start[0]):
            name = tensor.format(*box.start[: numbers(tensor)])
            found.append(Entry(name, tensor, box, dtype(tensor)))
    return found


def blocks(box: Box, axis: int, dtype: str, size: int) -> Iterator[Box]:
    """`box` cut along an axis, before which it has one index each, into parts of at most `size` bytes (or one row)."""
    rows = max(size // (prod(box.shape[axis + 1 :]) * ITEMSIZE[dtype]), 1)
    for start in range(box.start[axis], box.stop[axis], rows):
        stop = min(start + rows, box.stop[axis])
        yield Box(
            (*box.start[:axis], start, *box.start[axis + 1 :]),
            (*box.stop[:axis], stop, *box.stop[axis + 1 :]),
        )


def compare(source: Source, result: Source, model: list[Entry], progress: _Progress) -> None:
    """Raises CheckpointError unless `result` has the source's values, cast to the entries' dtypes, bit for bit."""
    memory = [np.empty(BLOCK_BYTES, np.uint8) for _ in range(2)]
    for entry in model:
        for block in entry.blocks():
            expected, found = (empty(block.shape, entry.dtype, space) for space in memory)
            source.read(entry.tensor, block, expected, entry.dtype)
            result.read(entry.tensor, block, found, entry.dtype)
            if not np.array_equal(expected, found):
                raise CheckpointError(f"{entry.name} read back is not what was written; check the disk and try again")
            progress(expected.nbytes)


@contextlib.contextmanager
def whole_folder(path: Path, size: int, sync: bool) -> Iterator[Path]:
    """A folder to fill, which becomes `path`, with `sync` once everything in it is on disk; removed if an error is
    raised.

    size: bytes that are to be written. Raises CheckpointError where `path` exists or cannot be written.
    """
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists: remove it or choose another name")
    path = path.absolute()
    if not path.parent.is_dir():
        raise CheckpointError(f"cannot write {path}: there is no folder {path.parent}, make it first")
    partial = path.with_name(f".{path.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        if (free := shutil.disk_usage(partial).free) < size:
            raise CheckpointError(
                f"{path} needs {size / 1e9:.3f} GB and {free / 1e9:.3f} GB are free: make room or choose another disk"
            )
        yield partial
        for folder, _, files in os.walk(partial) if sync else ():
            for file in files:
                _sync(Path(folder, file))
            _sync(Path(folder))
        os.rename(partial, path)
        if sync:
            _sync(path.parent)
    except BaseException as e:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(e, OSError):
            raise CheckpointError(f"cannot write {path}: {e.strerror}; nothing was left behind") from None
        raise


class _Progress:
    def __init__(self, report: Report, total: int):
        self._report, self._done, self._total = report, 0, total
        report(0, total)

    def __call__(self, count: int) -> None:
        self._done += count
        self._report(self._done, self._total)


def _folders(checkpoint: Path, description: Path | None) -> tuple[Path, Path]:
    """Of a checkpoint: the torch_dist folder, and the one with config and tokenizer."""
    if (checkpoint / TRAINER).is_dir():
        return checkpoint / TRAINER, description or checkpoint / DESCRIPTION
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"{checkpoint} is no folder; give a checkpoint folder such as RUN/checkpoints/version-000012"
        )
    if description is None:
        raise CheckpointError(
            f"{checkpoint} has no folder {TRAINER}: give a checkpoint folder, or for a torch_dist folder "
            "alone --config HF_DIR, a folder with config.json and tokenizer"
        )
    return checkpoint, description


def _singles(shape: Shape, named: int) -> Iterator[Box]:
    """The boxes of a pattern that are one tensor each: one index of the leading axes and everything of the others."""
    for number in product(*map(range, shape[:named])):
        yield Box((*number, *(0 for _ in shape[named:])), (*(n + 1 for n in number), *shape[named:]))


def _write_shards(
    folder: Path, model: list[Entry], source: Source, shard_bytes: int, sync: bool, progress: _Progress
) -> None:
    files: list[list[Entry]] = [[]]
    size = 0
    for entry in model:
        size += entry.nbytes
        if files[-1] and size > shard_bytes:
            files.append([])
            size = entry.nbytes
        files[-1].append(entry)
    if len(files) == 1:
        _write_file(folder / SINGLE, files[0], source, sync, progress)
        return
    weight_map = {}
    for number, held in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        _write_file(folder / name, held, source, sync, progress)
        weight_map |= {entry.name: name for entry in held}
    index = {"metadata": {"total_size": sum(entry.nbytes for entry in model)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_file(path: Path, held: list[Entry], source: Source, sync: bool, progress: _Progress) -> None:
    """One thread reads a block while another writes the one before."""
    header = safetensors_header({entry.name: (entry.dtype, entry.shape) for entry in held})
    memory = itertools.cycle([np.empty(BLOCK_BYTES, np.uint8) for _ in range(2)])
    with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(1) as writer:
        written = writer.submit(_write, file, memoryview(header), sync)
        for entry in held:
            for block in entry.blocks():
                rows = empty(block.shape, entry.dtype, next(memory))
                source.read(entry.tensor, block, rows, entry.dtype)
                written.result()
                written = writer.submit(_write, file, raw(rows), sync)
                progress(rows.nbytes)
        written.result()


def _write(file: FileIO, data: memoryview, sync: bool) -> None:
    """Appends. With `sync` the kernel begins to write each WRITE_BEHIND_BYTES to the disk once they are there."""
    before = file.tell() // WRITE_BEHIND_BYTES
    while data:
        data = data[file.write(data[:WRITE_BYTES]) :]
    if sync and before < (now := file.tell() // WRITE_BEHIND_BYTES):
        begun = before * WRITE_BEHIND_BYTES
        os.posix_fadvise(file.fileno(), begun, now * WRITE_BEHIND_BYTES - begun, os.POSIX_FADV_DONTNEED)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
