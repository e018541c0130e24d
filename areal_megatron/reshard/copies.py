"""Copies between the parameters of a rank and a message: the pieces that it has, one after another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from areal_megatron.reshard.changes import bits

Copies = tuple[list[Tensor], list[Tensor]] | tuple[list[np.ndarray], list[np.ndarray]]
"""Views into parameters, and views of the same shapes into a message: arrays on a CPU if no element need be cast."""


def bind(pieces: Iterable, parameters: Mapping[str, Tensor], flat: Tensor) -> Copies:
    """Returns views of `pieces` in their parameters, and of their places in the message `flat`, one after another."""
    views = [list(piece.views(parameters)) for piece in pieces]
    held, packed, offset = [view for own in views for view in own], [], 0
    if flat.device.type == "cpu" and all(view.dtype == flat.dtype for view in held):
        held, message = [_array(view) for view in held], _array(flat)
    else:
        message = flat
    for own in views:
        size = len(own) * own[0].numel()
        packed.extend(message[offset : offset + size].reshape(len(own), *own[0].shape))
        offset += size
    return held, packed


def pack(copies: Copies) -> None:
    """Copies parameters into the message, cast to its dtype."""
    held, packed = copies
    _copy(packed, held)


def unpack(copies: Copies) -> None:
    """Copies the message into the parameters."""
    held, packed = copies
    _copy(held, packed)


def _array(view: Tensor) -> np.ndarray:
    """Returns the same memory as integers, because numpy has no bfloat16."""
    return bits(view).numpy()


def settle(device: torch.device) -> None:
    """Returns when everything that this thread has issued on `device` is done."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()


def _copy(targets: list, sources: list) -> None:
    if targets and isinstance(targets[0], np.ndarray):
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)  # memcpy, which may go past the caches (orders.py); torch's copy does not
    else:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
