"""Hugging Face folders of live models: read into any layout, and written from any trainer layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from numpy import ndarray
from torch import Tensor

from areal_megatron.checkpoint.disk import BlockBuffers, CheckpointError
from areal_megatron.checkpoint.hf_folder import (
    SHARD_BYTES,
    HfFolder,
    HfTensor,
    copy_description,
    hf_tensors,
    write_weights,
)
from areal_megatron.config import ConfigError
from areal_megatron.models.architecture import architecture
from areal_megatron.process.files import whole_folder
from areal_megatron.reshard import trainer_layout
from areal_megatron.reshard.boxes import Layout, Piece, numbers, whole
from areal_megatron.reshard.plan import Need, needs
from areal_megatron.reshard.trainer_layout import MegatronSizes


@torch.no_grad()
def load(parameters: Mapping[str, Tensor], layout: Layout, path: str | Path) -> None:
    """Fills `parameters` (as `layout` names and shapes them, any dtype and device) from a Hugging Face folder.

    Reads only the slices this rank holds; padding becomes zero. Raises LayoutError where the parameters
    are not the layout's, ConfigError where the folder lacks a tensor or has another shape.
    """
    layout.check({name: parameter.shape for name, parameter in parameters.items()}, "the model to load")
    for name in layout.padded:
        parameters[name].zero_()
    try:
        with closing(HfFolder(Path(path), layout.canonical)) as weights:
            blocks = BlockBuffers()
            for piece in layout.pieces:
                _load_piece(parameters, piece, weights, blocks)
    except CheckpointError as e:
        raise ConfigError(f"model.path: {e}") from None


def _load_piece(parameters: Mapping[str, Tensor], piece: Piece, weights: HfFolder, blocks: BlockBuffers) -> None:
    named = numbers(piece.tensor)
    for single in piece.box.singles(named):
        dtype = weights.dtype(piece.tensor, single.start[:named])
        for block, rows in blocks.of(single, dtype):
            weights.read(piece.tensor, block, rows, dtype)
            (view,) = piece.narrow(block).views(parameters)
            view.copy_(torch.from_numpy(rows).view(getattr(torch, dtype)).view(view.shape))


def checkpoint_layout(hf_config: Mapping[str, Any]) -> Layout:
    """Returns the layout of a Hugging Face folder itself: every canonical tensor whole, on one rank."""
    model = architecture(hf_config)
    pieces = [
        Piece(name, whole(shape), name, whole(shape), tuple(range(len(shape))))
        for name, shape in model.canonical.items()
    ]
    return Layout(model.canonical, model.canonical, tuple(pieces), model.dtypes)


@torch.no_grad()
def export(
    parameters: Mapping[str, Tensor],
    *,
    hf_config: Mapping[str, Any],
    sizes: MegatronSizes,
    rank: int,
    source: str | Path,
    path: str | Path,
    group: dist.ProcessGroup | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the trainer's weights as a Hugging Face folder; every trainer rank calls it, rank 0 writes.

    Tensors travel one at a time to rank 0 over `group` (gloo, all trainer ranks; None: the default group), which holds
    one of them while it writes the one before. config.json is `hf_config`; tokenizer and generation config come from
    the folder `source`. The folder appears under `path` whole or not at all; an older one is replaced. Raises
    LayoutError where the parameters are not the layout's.
    """
    layouts = trainer_layout.layouts(hf_config, sizes)
    layouts[rank].check({name: parameter.shape for name, parameter in parameters.items()}, f"trainer rank {rank}")
    checkpoint = checkpoint_layout(hf_config)
    needs_of = defaultdict(list)
    for need in needs(layouts, [checkpoint]):
        needs_of[need.receive.tensor].append(need)
    dtype = str(next(iter(parameters.values())).dtype).removeprefix("torch.")
    tensors = hf_tensors(checkpoint.canonical, lambda pattern: checkpoint.dtypes.get(pattern, dtype))

    def gathered(tensor: HfTensor) -> Iterator[ndarray]:
        yield _gather(parameters, tensor, needs_of[tensor.pattern], rank, group).view(torch.uint8).numpy()

    if rank:
        for tensor in tensors:
            _gather(parameters, tensor, needs_of[tensor.pattern], rank, group)
        return
    with whole_folder(Path(path)) as folder:
        write_weights(folder, tensors, gathered, shard_bytes)
        copy_description(Path(source), folder, dtype, hf_config)


def _gather(
    parameters: Mapping[str, Tensor],
    tensor: HfTensor,
    wanted: Sequence[Need],
    rank: int,
    group: dist.ProcessGroup | None,
) -> Tensor | None:
    """Returns one canonical tensor whole on rank 0, None on the others; collective. The first holder of a box sends
    it."""
    dtype = getattr(torch, tensor.dtype)
    result = torch.empty(tensor.box.shape, dtype=dtype) if rank == 0 else None
    for need in wanted:
        box = need.receive.box.intersection(tensor.box)
        if box is None:
            continue
        holder, held = min(need.holders.items())
        if rank == holder:
            (part,) = held.narrow(box).views(parameters)
            part = part.to("cpu").contiguous()
            if rank:
                dist.send(part, 0, group=group)
        elif rank == 0:
            part = torch.empty(box.shape, dtype=dtype)
            dist.recv(part, holder, group=group)
        if rank == 0:
            result[box.within(tensor.box).slices] = part.view(box.shape)
    return result
