"""Checkpoints: Hugging Face folders read into any layout, and written from any trainer layout."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal_megatron.config import ConfigError
from areal_megatron.reshard.layout import Layout

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


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
            source = find(piece.tensor)
            shape, expected = source.get_shape(), list(layout.tensors[piece.tensor])
            if shape != expected:
                raise ConfigError(
                    f"model.path: {path}: {piece.tensor} has shape {shape}, config.json asks for {expected}"
                )
            piece.view(parameters[piece.parameter]).copy_(source[piece.box.slices])


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
