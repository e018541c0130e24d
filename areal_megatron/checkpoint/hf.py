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

from areal_megatron.checkpoint import peft
from areal_megatron.checkpoint.disk import BlockBuffers, CheckpointError
from areal_megatron.checkpoint.hf_folder import (
    SHARD_BYTES,
    HfFolder,
    HfTensor,
    copy_description,
    hf_tensors,
    write_file,
)
from areal_megatron.checkpoint.tower import write_model
from areal_megatron.config import Config, ConfigError
from areal_megatron.models.adapter import Adapter, adapted
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
            _load_pieces(parameters, layout, weights)
    except CheckpointError as e:
        raise ConfigError(f"model.path: {e}") from None


@torch.no_grad()
def load_adapter(factors: Mapping[str, Tensor], layout: Layout, config: Config, hf_config: Mapping[str, Any]) -> None:
    """Fills `factors`, named and shaped as `layout` has them, from the PEFT folder lora.start. Raises ConfigError."""
    with closing(peft.open_start(config, hf_config)) as adapter:
        try:
            _load_pieces(factors, layout, adapter)
        except CheckpointError as e:
            raise ConfigError(f"lora.start: {e}") from None


def _load_pieces(parameters: Mapping[str, Tensor], layout: Layout, weights: HfFolder | peft.PeftFolder) -> None:
    blocks = BlockBuffers()
    for piece in layout.pieces:
        _load_piece(parameters, piece, weights, blocks)


def _load_piece(
    parameters: Mapping[str, Tensor], piece: Piece, weights: HfFolder | peft.PeftFolder, blocks: BlockBuffers
) -> None:
    named = numbers(piece.tensor)
    for single in piece.box.singles(named):
        dtype = weights.dtype(piece.tensor, single.start[:named])
        for block, rows in blocks.of(single, dtype):
            weights.read(piece.tensor, block, rows, dtype)
            (view,) = piece.narrow(block).views(parameters)
            view.copy_(torch.from_numpy(rows).view(getattr(torch, dtype)).view(view.shape))


def checkpoint_layout(hf_config: Mapping[str, Any], adapter: Adapter | None = None) -> Layout:
    """Returns the layout of a Hugging Face folder itself, or of a PEFT folder: every canonical tensor whole, on one
    rank."""
    model = adapted(architecture(hf_config), adapter)
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
    checkpoint = checkpoint_layout(hf_config)
    collect = _Collected(parameters, trainer_layout.layouts(hf_config, sizes), checkpoint, rank, group)
    tensors = hf_tensors(checkpoint.canonical, lambda pattern: checkpoint.dtypes.get(pattern, collect.dtype))
    if rank:
        collect.send(tensors)
        return
    with whole_folder(Path(path)) as folder:
        write_model(folder, tensors, collect, Path(source), shard_bytes)
        copy_description(Path(source), folder, collect.dtype, hf_config)


@torch.no_grad()
def export_adapter(
    factors: Mapping[str, Tensor],
    *,
    hf_config: Mapping[str, Any],
    adapter: Adapter,
    sizes: MegatronSizes,
    rank: int,
    base: str,
    path: str | Path,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes the factors of the trainer's adapters as a PEFT folder; otherwise like `export`. `base`: the folder of the
    model, which PEFT loads with them."""
    checkpoint = checkpoint_layout(hf_config, adapter)
    collect = _Collected(factors, trainer_layout.layouts(hf_config, sizes, adapter), checkpoint, rank, group)
    tensors = peft.factor_tensors(checkpoint.canonical, collect.dtype)
    if rank:
        collect.send(tensors)
        return
    with whole_folder(Path(path)) as folder:
        write_file(folder / peft.WEIGHTS, tensors, collect)
        peft.write_description(folder, adapter, hf_config, base)


class _Collected:
    """The canonical tensors of all trainer ranks, whole on rank 0, one at a time."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        layouts: Sequence[Layout],
        checkpoint: Layout,
        rank: int,
        group: dist.ProcessGroup | None,
    ):
        layouts[rank].check({name: each.shape for name, each in parameters.items()}, f"trainer rank {rank}")
        self._parameters, self._rank, self._group = parameters, rank, group
        self._needs: dict[str, list[Need]] = defaultdict(list)
        for need in needs(layouts, [checkpoint]):
            self._needs[need.receive.tensor].append(need)
        self.dtype = str(next(iter(parameters.values())).dtype).removeprefix("torch.")

    def __call__(self, tensor: HfTensor) -> Iterator[ndarray]:
        """Yields the elements of a tensor, on rank 0."""
        whole = self._gather(tensor)
        assert whole is not None  # on rank 0
        yield whole.view(torch.uint8).numpy()

    def send(self, tensors: Sequence[HfTensor]) -> None:
        """Sends rank 0 what it asks for as it writes these tensors; on the other ranks."""
        for tensor in tensors:
            self._gather(tensor)

    def _gather(self, tensor: HfTensor) -> Tensor | None:
        """Returns one canonical tensor whole on rank 0, None on the others; collective. The first holder of a box sends
        it."""
        rank, group = self._rank, self._group
        dtype = getattr(torch, tensor.dtype)
        result = torch.empty(tensor.box.shape, dtype=dtype) if rank == 0 else None
        for need in self._needs[tensor.pattern]:
            box = need.receive.box.intersection(tensor.box)
            if box is None:
                continue
            holder, held = min(need.holders.items())
            if rank == holder:
                (part,) = held.narrow(box).views(self._parameters)
                part = part.to("cpu").contiguous()
                if rank:
                    dist.send(part, 0, group=group)
            elif rank == 0:
                part = torch.empty(box.shape, dtype=dtype)
                dist.recv(part, holder, group=group)
            else:
                continue
            if result is not None:
                result[box.within(tensor.box).slices] = part.view(box.shape)
        return result
