"""Checkpoints: Hugging Face folders read into any layout, and written from any trainer layout."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from areal_megatron.checkpoint.hf_folder import INDEX, SINGLE, copy_description
from areal_megatron.config import ConfigError
from areal_megatron.models.architecture import architecture
from areal_megatron.reshard import trainer_layout
from areal_megatron.reshard.boxes import Box, Layout, Piece, numbers, whole
from areal_megatron.reshard.plan import Need, needs
from areal_megatron.reshard.trainer_layout import MegatronSizes


@torch.no_grad()
def load(parameters: Mapping[str, Tensor], layout: Layout, path: str | Path) -> None:
    """Fills `parameters` (as `layout` names and shapes them, any dtype and device) from a checkpoint folder.

    Reads only the slices this rank holds; padding becomes zero. Raises LayoutError where the parameters
    are not the layout's, ConfigError where the checkpoint lacks a tensor or has another shape.
    """
    layout.check({name: parameter.shape for name, parameter in parameters.items()}, "the model to load")
    for name in layout.padded:
        parameters[name].zero_()
    with _reader(Path(path)) as find:
        for piece in layout.pieces:
            expected = list(layout.canonical[piece.tensor][numbers(piece.tensor) :])
            for tensor, region, view in piece.tensors(parameters):
                source = find(tensor)
                if (shape := source.get_shape()) != expected:
                    raise ConfigError(
                        f"model.path: {path}: {tensor} has shape {shape}, config.json asks for {expected}"
                    )
                view.copy_(source[region])


@contextlib.contextmanager
def _reader(path: Path) -> Iterator[Callable[[str], Any]]:
    """A function from a tensor's name to its slice object; each file is opened once, when first needed."""
    try:
        if (path / INDEX).exists():
            file_of = json.loads((path / INDEX).read_text())["weight_map"]
        else:
            with safe_open(path / SINGLE, "pt") as file:
                file_of = dict.fromkeys(file.keys(), SINGLE)
    except (OSError, ValueError, KeyError, SafetensorError) as e:
        raise ConfigError(f"model.path: {path} has no readable {INDEX} or {SINGLE}: {e}") from None

    with contextlib.ExitStack() as stack:
        opened: dict[str, Any] = {}

        def find(tensor: str) -> Any:
            if tensor not in file_of:
                raise ConfigError(f"model.path: {path} has no tensor {tensor}")
            name = file_of[tensor]
            if name not in opened:
                try:
                    opened[name] = stack.enter_context(safe_open(path / name, "pt"))
                except (OSError, SafetensorError) as e:
                    raise ConfigError(f"model.path: cannot read {path / name}: {e}") from None
            return opened[name].get_slice(tensor)

        yield find


def checkpoint_layout(hf_config: Mapping[str, Any]) -> Layout:
    """The checkpoint's own layout: every canonical tensor whole, on one rank."""
    canonical = architecture(hf_config).canonical
    pieces = [
        Piece(name, whole(shape), name, whole(shape), tuple(range(len(shape)))) for name, shape in canonical.items()
    ]
    return Layout(canonical, canonical, tuple(pieces))


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
    shard_bytes: int = 4 * 2**30,
) -> None:
    """Writes the trainer's weights as a Hugging Face folder; every trainer rank calls it, rank 0 writes.

    Tensors travel one at a time to rank 0 over `group` (gloo, all trainer ranks; None: the default group),
    so rank 0 holds at most one file of `shard_bytes` in memory. config.json, tokenizer and generation config
    come from the folder `source`. The folder appears under `path` whole or not at all; an older one is
    replaced. Raises LayoutError where the parameters are not the layout's.
    """
    source, path = Path(source), Path(path)
    layouts = trainer_layout.layouts(hf_config, sizes)
    layouts[rank].check({name: parameter.shape for name, parameter in parameters.items()}, f"trainer rank {rank}")
    gathered = _gather(parameters, layouts, checkpoint_layout(hf_config), rank, group)
    if rank:
        for _ in gathered:
            pass
        return
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_shards(partial, gathered, shard_bytes)
    dtype = str(next(iter(parameters.values())).dtype).removeprefix("torch.")
    copy_description(source, partial, dtype)
    _replace(partial, path)


def _gather(
    parameters: Mapping[str, Tensor],
    sources: list[Layout],
    checkpoint: Layout,
    rank: int,
    group: dist.ProcessGroup | None,
) -> Iterator[tuple[str, Tensor]]:
    """Canonical tensors one after another, whole, on rank 0; on the other ranks nothing, but they must iterate."""
    dtype = next(iter(parameters.values())).dtype
    for pattern, wanted in itertools.groupby(needs(sources, [checkpoint]), key=lambda need: need.receive.tensor):
        wanted = list(wanted)
        for name, box in _each(pattern, checkpoint.canonical[pattern]):
            tensor = torch.empty(box.shape, dtype=dtype) if rank == 0 else None
            for need in wanted:
                if region := need.receive.box.intersection(box):
                    _bring(parameters, need.narrow(region), box, tensor, rank, group)
            if tensor is not None:
                yield name, tensor.view(box.shape[numbers(pattern) :])


def _each(pattern: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Box]]:
    """Name and box of each tensor of a pattern."""
    named = numbers(pattern)
    for number in itertools.product(*map(range, shape[:named])):
        start, stop = (*number, *(0 for _ in shape[named:])), (*(n + 1 for n in number), *shape[named:])
        yield pattern.format(*number), Box(start, stop)


def _bring(
    parameters: Mapping[str, Tensor],
    need: Need,
    box: Box,
    tensor: Tensor | None,
    rank: int,
    group: dist.ProcessGroup | None,
) -> None:
    """The need's box from its first holder into rank 0's `tensor`, which is the canonical `box`."""
    holder, held = min(need.holders.items())
    if rank == holder:
        (part,) = held.narrow(need.receive.box).views(parameters)
        part = part.to("cpu").contiguous()
        if rank:
            dist.send(part, 0, group=group)
    elif tensor is not None:
        part = torch.empty(need.receive.box.shape, dtype=tensor.dtype)
        dist.recv(part, holder, group=group)
    if tensor is not None:
        region = tuple(
            slice(a - base, b - base)
            for a, b, base in zip(need.receive.box.start, need.receive.box.stop, box.start, strict=True)
        )
        tensor[region].copy_(part.view(need.receive.box.shape))


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    """Files of at most shard_bytes (or one tensor) and their index; one plain file where everything fits."""
    files: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        save_file(shard, folder / f"{len(files)}.shard", metadata={"format": "pt"})
        files.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and sum(held.nbytes for held in shard.values()) + tensor.nbytes > shard_bytes:
            flush()
        shard[name] = tensor
        total += tensor.nbytes
    flush()
    if len(files) == 1:
        os.replace(folder / "0.shard", folder / SINGLE)
        return
    weight_map = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        os.replace(folder / f"{number}.shard", folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _replace(new: Path, path: Path) -> None:
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)
    os.rename(new, path)
    shutil.rmtree(old, ignore_errors=True)
