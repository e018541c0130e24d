"""Checkpoints of megatron-core (torch_dist) from and to Hugging Face folders: one process without GPUs that never holds
more than a part of a tensor; every parallel layout and every model of areal_megatron/models."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from math import prod
from pathlib import Path

import numpy as np
from numpy import ndarray

from areal_megatron.checkpoint import peft, torch_dist, tower
from areal_megatron.checkpoint.disk import BlockBuffers, BoxReader, CheckpointError
from areal_megatron.checkpoint.folder import TRAINER, held
from areal_megatron.checkpoint.hf_folder import (
    INDEX,
    SHARD_BYTES,
    SINGLE,
    HfFolder,
    HfTensor,
    copy_description,
    exact_dtype,
    hf_tensors,
    write_file,
)
from areal_megatron.checkpoint.torch_dist import DistCheckpoint
from areal_megatron.checkpoint.tower import write_model
from areal_megatron.models.adapter import Adapter, adapted
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.models.pattern import name_at, numbers
from areal_megatron.models.weight_files import ADAPTER
from areal_megatron.process.errors import printable
from areal_megatron.process.files import whole_folder
from areal_megatron.reshard.boxes import Box, whole

CHUNK_BYTES = 32 * 2**20
"""Bytes of the largest chunk of a tensor that from_hf stores as one; who loads it holds a whole chunk."""
DESCRIPTION = "hf"
"""The folder of a checkpoint with config, tokenizer and the like."""
Report = Callable[[int, int], None]
"""Told (bytes done, bytes to do) after each block."""


def to_hf(
    checkpoint: Path,
    out: Path,
    *,
    description: Path | None = None,
    base: Path | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    verify: bool = False,
    sync: bool = True,
    report: Report = lambda done, total: None,
) -> None:
    """Writes the checkpoint folder's model as the Hugging Face folder `out`, which appears whole or not at all.

    `checkpoint` may also be an export, or a torch_dist folder alone; then `description` is a folder with config.json,
    tokenizer and so on. Of a checkpoint of adapters, or a PEFT folder, it is the model with the adapter added to its
    weights; `base`: that model's folder, instead of the one that the adapter names. dtype: the result's, None for the
    checkpoint's own. Files have at most shard_bytes, or one tensor. verify: reads the result back and compares. sync:
    returns once everything is on the disk; without, a power failure soon after it may leave a folder with holes. Raises
    CheckpointError, or ConfigError for a config.json that is missing or describes no known model.
    """
    with held(checkpoint):
        source, description = _open(checkpoint, description, base)
        config = read_config(description)
        described = architecture(config)
        with closing(source):
            model = hf_tensors(
                described.canonical, lambda name: described.dtypes.get(name) or dtype or source.dtype(name)
            )
            total = sum(tensor.nbytes for tensor in model)
            progress, blocks = _Progress(report, total * (1 + verify)), BlockBuffers()

            with _new_folder(out, total, sync) as folder:
                write_model(folder, model, _reader(source, blocks, progress), description, shard_bytes, sync)
                copy_description(description, folder, model[0].dtype)
                if verify:
                    result, _ = _open(folder)
                    with closing(result):
                        compare(source, result, model, blocks, progress)


def from_hf(
    source: Path,
    out: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    verify: bool = False,
    sync: bool = True,
    report: Report = lambda done, total: None,
) -> None:
    """Writes a Hugging Face folder as the checkpoint folder `out`, with the model and no optimizer; else like to_hf.

    Layer norms are written under both names that megatron-core has for them, with TransformerEngine and without. Of
    tensors that are one parameter there nothing is rounded: where their dtypes differ it is in float32.
    """
    from areal_megatron.checkpoint import torch_dist_file  # imports torch

    config = read_config(source)
    model = HfFolder.of_model(source, config)
    layout = torch_dist.layout(config)
    pieces, built = torch_dist.by_parameter(layout), architecture(config)
    kinds = {
        pattern: layout.dtypes.get(pattern) or dtype or exact_dtype(model.dtype(piece.tensor) for piece in own)
        for pattern, own in pieces.items()
    }
    places = {
        name: (pattern, single.start[: numbers(pattern)])
        for pattern, shape in layout.held.items()
        for single in whole(shape).singles(numbers(pattern))
        for plain in [name_at(pattern, single.start[: numbers(pattern)])]
        for name in dict.fromkeys((plain, torch_dist.other_name(plain, built)))
    }
    """A tensor's name → its pattern, and what its numbers are there."""
    tensors = {name: (kinds[pattern], layout.held[pattern][len(at) :]) for name, (pattern, at) in places.items()}
    chunks = [
        (name, chunk)
        for name, (kind, shape) in tensors.items()
        for single in whole(shape).singles(numbers(pieces[places[name][0]][0].tensor) - len(places[name][1]))
        for chunk in single.cut(CHUNK_BYTES // ITEMSIZE[kind])
    ]
    dtypes = {piece.tensor: kinds[piece.parameter] for piece in layout.pieces}
    written = hf_tensors(layout.canonical, dtypes.__getitem__)
    total = sum(prod(shape) * ITEMSIZE[kind] for kind, shape in tensors.values())
    progress, blocks = _Progress(report, total + verify * sum(tensor.nbytes for tensor in written)), BlockBuffers()

    def read(name: str, chunk: Box) -> Iterator[ndarray]:
        (kind, _), (pattern, at) = tensors[name], places[name]
        for block, rows in blocks.of(chunk, kind):
            region = Box((*at, *block.start), (*(number + 1 for number in at), *block.stop))
            for piece in pieces[pattern]:
                if common := piece.local.intersection(region):
                    box = common.within(piece.local).shifted(piece.box.start)
                    model.read(piece.tensor, box, rows[(None,) * len(at)][common.within(region).slices], kind)
            progress(rows.nbytes)
            yield rows

    with closing(model), _new_folder(out, total, sync) as folder:
        (folder / DESCRIPTION).mkdir()
        copy_description(source, folder / DESCRIPTION, written[0].dtype)
        tower.copy(source, folder / DESCRIPTION, sync)
        objects = torch_dist.extra_states(layout)
        torch_dist_file.write_folder(folder / TRAINER, tensors, chunks, read, objects, shard_bytes, sync)
        if verify:
            with closing(DistCheckpoint(folder / TRAINER, config)) as result:
                compare(model, result, written, blocks, progress)


def to_peft(
    checkpoint: Path,
    out: Path,
    *,
    base: Path | None = None,
    dtype: str | None = None,
    verify: bool = False,
    sync: bool = True,
    report: Report = lambda done, total: None,
) -> None:
    """Writes the adapter of a checkpoint as the PEFT folder `out`; else like to_hf. `base`: the folder of the model of
    the adapter, instead of the one that it names."""
    with held(checkpoint):
        source, adapter, base = _open_adapter(checkpoint, base)
        model = architecture(read_config(base))
        canonical = adapted(model, adapter).canonical
        with closing(source):
            tensors = peft.factor_tensors(canonical, dtype or source.dtype(next(iter(canonical))))
            total = sum(tensor.nbytes for tensor in tensors)
            progress, blocks = _Progress(report, total * (1 + verify)), BlockBuffers()

            with _new_folder(out, total, sync) as folder:
                write_file(folder / peft.WEIGHTS, tensors, _reader(source, blocks, progress), sync)
                peft.write_description(folder, adapter, read_config(base), base)
                if verify:
                    with closing(peft.PeftFolder(folder, model, adapter)) as result:
                        compare(source, result, tensors, blocks, progress)


def from_peft(
    source: Path,
    out: Path,
    *,
    base: Path | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    verify: bool = False,
    sync: bool = True,
    report: Report = lambda done, total: None,
) -> None:
    """Writes a PEFT folder as the checkpoint folder `out`, with the adapter and no optimizer; else like from_hf and
    to_peft."""
    from areal_megatron.checkpoint import torch_dist_file  # imports torch

    factors, adapter, base = _open_adapter(source, base)
    config = read_config(base)
    canonical = adapted(architecture(config), adapter).canonical
    kind = dtype or factors.dtype(next(iter(canonical)))
    places = {f"{torch_dist.ADAPTER}.{torch_dist.factor_name(pattern)}": pattern for pattern in canonical}
    tensors = {name: (kind, canonical[pattern]) for name, pattern in places.items()}
    chunks = [
        (name, box) for name, (_, shape) in tensors.items() for box in whole(shape).singles(numbers(places[name]))
    ]
    total = sum(prod(shape) * ITEMSIZE[kind] for shape in canonical.values())
    progress, blocks = _Progress(report, total * (1 + verify)), BlockBuffers()

    def read(name: str, chunk: Box) -> Iterator[ndarray]:
        for block, rows in blocks.of(chunk, kind):
            factors.read(places[name], block, rows, kind)
            progress(rows.nbytes)
            yield rows

    with closing(factors), _new_folder(out, total, sync) as folder:
        (folder / DESCRIPTION).mkdir()
        copy_description(base, folder / DESCRIPTION, kind)
        peft.write_description(folder, adapter, config, base)
        torch_dist_file.write_folder(folder / TRAINER, tensors, chunks, read, [], shard_bytes, sync)
        if verify:
            with closing(DistCheckpoint(folder / TRAINER, config, adapter)) as result:
                compare(factors, result, peft.factor_tensors(canonical, kind), blocks, progress)


def compare(
    source: BoxReader, result: BoxReader, model: list[HfTensor], blocks: BlockBuffers, progress: _Progress
) -> None:
    """Raises CheckpointError unless `result` has the source's values, cast to the model's dtypes, bit for bit."""
    for tensor in model:
        # Memory is given in turn, so that the two blocks of a pair never share it.
        pairs = zip(blocks.of(tensor.box, tensor.dtype), blocks.of(tensor.box, tensor.dtype), strict=True)
        for (block, expected), (_, found) in pairs:
            source.read(tensor.pattern, block, expected, tensor.dtype)
            result.read(tensor.pattern, block, found, tensor.dtype)
            if not np.array_equal(expected, found):
                raise CheckpointError(f"{tensor.name} read back is not what was written; check the disk and try again")
            progress(expected.nbytes)


@contextlib.contextmanager
def _new_folder(path: Path, size: int, sync: bool) -> Iterator[Path]:
    """Yields a folder that becomes `path` at the end, as files.whole_folder does.

    size: bytes that will be written. Raises CheckpointError where `path` exists or cannot be written.
    """
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists: remove it or choose another name")
    path = path.absolute()
    if not path.parent.is_dir():
        raise CheckpointError(f"cannot write {path}: there is no folder {path.parent}, make it first")
    try:
        with whole_folder(path, sync=sync) as folder:
            if (free := shutil.disk_usage(folder).free) < size:
                raise CheckpointError(
                    f"{path} needs {size / 1e9:.3f} GB and {free / 1e9:.3f} GB are free: make room or choose another "
                    "disk"
                )
            yield folder
    except OSError as e:
        raise CheckpointError(f"cannot write {path}: {e.strerror}; nothing was left behind") from None


def _reader(source: BoxReader, blocks: BlockBuffers, progress: _Progress) -> Callable[[HfTensor], Iterator[ndarray]]:
    """Returns what reads a tensor of `source` block by block."""

    def read(tensor: HfTensor) -> Iterator[ndarray]:
        for block, rows in blocks.of(tensor.box, tensor.dtype):
            source.read(tensor.pattern, block, rows, tensor.dtype)
            progress(rows.nbytes)
            yield rows

    return read


class _Progress:
    def __init__(self, report: Report, total: int):
        self._report, self._done, self._total = report, 0, total
        report(0, total)

    def __call__(self, count: int) -> None:
        self._done += count
        self._report(self._done, self._total)


def _open(model: Path, description: Path | None = None, base: Path | None = None) -> tuple[BoxReader, Path]:
    """Opens a checkpoint or an export; returns also the folder with its config and tokenizer. Of a folder with an
    adapter it is the model with the adapter added to its weights; `base`: the folder of that model, instead of the one
    that the adapter names."""
    if (model / ADAPTER).is_file():
        factors, adapter, base = _open_adapter(model, base)
        config, inner = read_config(base), model / DESCRIPTION
        whole_model = HfFolder.of_model(base, config)
        merged = peft.MergedModel(whole_model, factors, architecture(config), adapter)
        return merged, description or (inner if inner.is_dir() else base)
    if (model / TRAINER).is_dir():
        model, description = model / TRAINER, description or model / DESCRIPTION
    elif (model / INDEX).exists() or (model / SINGLE).exists():
        description = description or model
        return HfFolder.of_model(model, read_config(description)), description
    elif not model.is_dir():
        raise CheckpointError(f"{model} is no folder; give a checkpoint folder such as RUN/checkpoints/version-000012")
    elif description is None:
        raise CheckpointError(
            f"{model} has no folder {TRAINER}: give a checkpoint folder, or for a torch_dist folder "
            "alone --config HF_DIR, a folder with config.json and tokenizer"
        )
    return DistCheckpoint(model, read_config(description)), description


def _open_adapter(folder: Path, base: Path | None) -> tuple[BoxReader, Adapter, Path]:
    """Opens the factors in a checkpoint or in a PEFT folder; returns also their adapter, and the folder of the model
    that they are for."""
    adapter, named = peft.read_description(folder)
    if base is None and not os.path.isdir(named):
        raise CheckpointError(
            f"{folder / ADAPTER} names {printable(named) or 'no model'} as its base, which is no folder here: give the "
            "folder as --base"
        )
    base = base or Path(named)
    if not os.path.isdir(base):  # also where this user may not look
        raise CheckpointError(f"--base: {printable(str(base))} is no folder")
    config = read_config(base)
    peft.check_targets(folder, adapter, model := architecture(config))
    if (folder / TRAINER).is_dir():
        return DistCheckpoint(folder / TRAINER, config, adapter), adapter, base
    return peft.PeftFolder(folder, model, adapter), adapter, base
