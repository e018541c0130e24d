"""Writing torch_dist folders that megatron-core loads, a chunk at a time and without a process group."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from pathlib import Path

import torch
from numpy import ndarray
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import BytesIOWriteData, SavePlan, TensorWriteData, WriteItem, WriteItemType

from areal_megatron.checkpoint.disk import ITEMSIZE, CheckpointError
from areal_megatron.checkpoint.torch_dist_metadata import BACKEND
from areal_megatron.reshard.boxes import Box, Piece, Shape, numbers


def write(
    folder: Path,
    tensors: Mapping[str, tuple[str, Shape]],
    chunks: Iterable[tuple[str, Box]],
    resolve: Callable[[str, Box], ndarray],
    objects: Iterable[str] = (),
    file_bytes: int = 4 * 2**30,
) -> None:
    """Writes a torch_dist folder of files of at most file_bytes (or one chunk).

    tensors: name → dtype and whole shape; `resolve` makes the array of a chunk (name, box), as extents.empty does, when
    its turn has come, in the order of `chunks`. objects: names of entries that hold None. Raises CheckpointError where
    writing fails.
    """
    items = [[WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, BytesIOWriteData(0)) for name in objects]]
    size = 0
    for name, box in chunks:
        dtype, shape = tensors[name]
        size += box.size * ITEMSIZE[dtype]
        if size > file_bytes and items[-1]:
            items.append([])
            size = box.size * ITEMSIZE[dtype]
        chunk = ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))
        data = TensorWriteData(chunk, TensorProperties(dtype=getattr(torch, dtype)), torch.Size(shape))
        items[-1].append(WriteItem(MetadataIndex(name, box.start), WriteItemType.SHARD, tensor_data=data))
    try:
        _write_plans([SavePlan(part) for part in items], folder, _Resolver(resolve))
        torch.save({}, folder / "common.pt")
        (folder / "metadata.json").write_text(json.dumps(BACKEND))
    except RuntimeError as e:  # what torch.save makes of an OSError
        raise CheckpointError(f"cannot write {folder}: {e.__context__ or e}") from None


def extra_states(held: Mapping[str, Shape], pieces: Mapping[str, list[Piece]]) -> list[str]:
    """Names of the entries without content that megatron-core keeps, and misses, for every linear layer."""
    names = []
    for name, shape in held.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or ".linear_" not in name:
            continue
        counts = shape[: numbers(pieces[name][0].tensor)]
        for number in product(*map(range, counts)):
            names.append(f"{module}._extra_state/shard_{'.'.join(map(str, number))}_{'.'.join(map(str, counts))}")
    return names


def _write_plans(plans: list[SavePlan], folder: Path, resolver: _Resolver) -> None:
    plans, metadata = create_default_global_save_plan(plans)
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(is_coordinator=True)
    plans = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    writer.finish(metadata, [writer.write_data(plan, resolver).wait() for plan in plans])


class _Resolver:
    """What FileSystemWriter asks of a save planner."""

    def __init__(self, resolve: Callable[[str, Box], ndarray]):
        self._resolve = resolve
        buffer = io.BytesIO()
        torch.save([None], buffer)
        self._nothing = buffer.getvalue()

    def resolve_data(self, item: WriteItem) -> Tensor | io.BytesIO:
        if item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._nothing)
        chunk = item.tensor_data.chunk
        start, stop = chunk.offsets, (a + n for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
        array = self._resolve(item.index.fqn, Box(tuple(start), tuple(stop)))
        return torch.from_numpy(array).view(item.tensor_data.properties.dtype)
