"""Changes of a message as new values for some elements of live parameters, ready to be written at a commit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from areal_megatron.reshard.boxes import Piece
from areal_megatron.reshard.changes import Changes, bits

_ALIGNED = 8
"""Every address in a Room is a multiple of this number of bytes."""


class Room:
    """The bytes `start` to `stop` of a tensor, given out from the front."""

    def __init__(self, memory: Tensor, start: int, stop: int):
        self._memory, self._next, self._stop = memory.view(torch.uint8), start, stop

    def place(self, elements: int, dtype: torch.dtype) -> Tensor | None:
        """Returns a part of the room for a flat tensor, or None if it does not fit any more."""
        start = -(-self._next // _ALIGNED) * _ALIGNED
        stop = start + elements * dtype.itemsize
        if stop > self._stop:
            return None
        self._next = stop
        return self._memory[start:stop].view(dtype)

    def rest(self, elements: int, dtype: torch.dtype) -> Tensor | None:
        """Like `place`, but reserves nothing."""
        before = self._next
        place = self.place(elements, dtype)
        self._next = before
        return place

    def copy(self, source: Tensor) -> Tensor | None:
        """Returns a copy of `source` in the room, or None if it does not fit any more."""
        place = self.place(source.numel(), source.dtype)
        return None if place is None else place.copy_(source)


@dataclass(frozen=True)
class Edit:
    """New values of some elements of one live parameter."""

    memory: Tensor
    """The memory in which the parameter is, one axis; as integers if it has the message's dtype."""
    where: Tensor
    """[elements] places in `memory`, int32 where that is enough."""
    values: Tensor
    """[elements] as in `memory`."""

    def moved(self, room: Room) -> Edit | None:
        """Returns the edit with its places and values in `room`, or None if they do not fit."""
        where = room.copy(self.where)
        values = None if where is None else room.copy(self.values)
        return None if where is None or values is None else Edit(self.memory, where, values)

    def write(self) -> None:
        """Changes the parameter."""
        self.memory.scatter_(0, self.where.long(), self.values)


class Places:
    """Where the elements of a message of `dtype` are in the live parameters: its `pieces`, one after another.

    A live parameter may be of a wider dtype, which has all values of the message's.
    """

    def __init__(self, pieces: Iterable[Piece], parameters: Mapping[str, Tensor], dtype: torch.dtype):
        self._dtype = dtype
        views = [view for piece in pieces for view in piece.views(parameters)]
        self._views = [bits(view) if view.dtype == dtype else view.detach() for view in views]
        self._starts = np.cumsum([0, *(view.numel() for view in self._views)])

    def edits(self, changes: Changes) -> tuple[list[Edit], np.ndarray]:
        """Returns the edits that make these changes of the message, and the later bits of the changed elements.

        Raises ChangesError if the parameters are not what the changes are based on.
        """
        cuts = np.searchsorted(changes.places, self._starts)
        found: list[tuple[Tensor, Tensor, slice]] = []
        earlier = np.empty_like(changes.differences)
        for view, start, (first, last) in zip(self._views, self._starts, pairwise(cuts), strict=False):
            if first < last:
                own = slice(first, last)
                memory = _memory(view)
                where = torch.from_numpy(_in_memory(changes.places[own] - start, view))
                where = where.to(memory.device, torch.int32 if memory.numel() < 2**31 else torch.int64)
                earlier[own] = self._sent(memory[where.long()]).cpu().numpy()
                found.append((memory, where, own))
        later = changes.after(earlier)
        values = torch.from_numpy(later)
        return [Edit(memory, where, self._held(values[own], memory)) for memory, where, own in found], later

    def _sent(self, values: Tensor) -> Tensor:
        """Returns the bits of live values as they come in a message."""
        return bits(values.to(self._dtype)) if values.is_floating_point() else values

    def _held(self, values: Tensor, memory: Tensor) -> Tensor:
        """Returns bits of a message as values of a live parameter."""
        wider = memory.is_floating_point()
        return values.view(self._dtype).to(memory.device, memory.dtype) if wider else values.to(memory.device)


def move(edits: Sequence[Edit], room: Room) -> list[Edit] | None:
    """Returns the edits with their places and values in `room`, or None if they do not all fit."""
    moved = [there for edit in edits if (there := edit.moved(room)) is not None]
    return moved if len(moved) == len(edits) else None


def _memory(view: Tensor) -> Tensor:
    """Returns all memory of a view's storage, as a tensor of one axis."""
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(view.untyped_storage())


def _in_memory(places: np.ndarray, view: Tensor) -> np.ndarray:
    """Returns where elements of a view are in its memory; `places` counts them row by row."""
    if view.is_contiguous():
        return places + view.storage_offset()
    where = np.full_like(places, view.storage_offset())
    for index, stride in zip(np.unravel_index(places, view.shape), view.stride(), strict=True):
        where += index * stride
    return where
