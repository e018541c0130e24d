"""Boxes and layouts: where each rank of a pool holds which part of the model.

Canonical tensors are the Hugging Face checkpoint's, by name and shape. A layout lists, for one rank, the
shapes of its local parameters and the pieces of canonical tensors that lie in them; what no piece covers
is padding. Pure Python: no torch, no process group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

STACKED = -1
"""In Piece.axes: a local axis of extent 1 that the canonical tensor does not have (an expert's place in a stack)."""


class LayoutError(ValueError):
    """A layout and the tensors that should have it disagree; one line naming the tensor and both shapes."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region: axis k spans start[k] to stop[k], stop excluded."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))

    def intersection(self, other: Box) -> Box | None:
        """The common region, or None where there is none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None


def whole(shape: Iterable[int]) -> Box:
    shape = tuple(shape)
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """`box` of the canonical `tensor` lies in `local` of the rank's `parameter`.

    Local axis k runs along canonical axis axes[k], so transposed and stacked weights are pieces as well.
    """

    parameter: str
    local: Box
    tensor: str
    box: Box
    axes: tuple[int, ...]

    def narrow(self, box: Box) -> Piece:
        """The part of this piece that lies in the canonical `box`, which must be inside it."""
        start, stop = list(self.local.start), list(self.local.stop)
        for axis, canonical in enumerate(self.axes):
            if canonical != STACKED:
                start[axis] += box.start[canonical] - self.box.start[canonical]
                stop[axis] = start[axis] + box.shape[canonical]
        return Piece(self.parameter, Box(tuple(start), tuple(stop)), self.tensor, box, self.axes)

    def view(self, parameter: Any) -> Any:
        """The piece inside its local parameter (a torch tensor), without a copy, axes in canonical order."""
        held = [axis for axis in self.axes if axis != STACKED]
        index = tuple(
            where.start if axis == STACKED else where for axis, where in zip(self.axes, self.local.slices, strict=True)
        )
        return parameter[index].permute([held.index(axis) for axis in range(len(held))])


@dataclass(frozen=True)
class Layout:
    """What one rank holds."""

    parameters: dict[str, tuple[int, ...]]
    """Local parameter → shape."""
    tensors: dict[str, tuple[int, ...]]
    """Canonical tensor of which this rank holds a part → its whole shape."""
    pieces: tuple[Piece, ...]
    """In the order of the model."""

    @property
    def padded(self) -> set[str]:
        """Parameters that hold more than their pieces: padding, always zero."""
        covered = dict.fromkeys(self.parameters, 0)
        for piece in self.pieces:
            covered[piece.parameter] += piece.box.size
        return {name for name, shape in self.parameters.items() if covered[name] < prod(shape)}

    def check(self, shapes: Mapping[str, Iterable[int]], holder: str) -> None:
        """Raises LayoutError unless `shapes` (name → shape) are exactly this layout's parameters."""
        for name, shape in self.parameters.items():
            if name not in shapes:
                raise LayoutError(f"{holder} has no parameter {name}, expected with shape {list(shape)}")
            if tuple(shapes[name]) != shape:
                raise LayoutError(f"{holder}: {name} has shape {list(shapes[name])}, expected {list(shape)}")
        for name, shape in shapes.items():
            if name not in self.parameters:
                raise LayoutError(f"{holder} has parameter {name} of shape {list(shape)}, which no table knows")


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows start to stop of a canonical tensor: what a fused parameter stacks along its first axis."""

    tensor: str
    start: int
    stop: int


def window(stack: Iterable[Rows], start: int, stop: int) -> Iterator[Rows]:
    """The part of a stack of rows that lies between its rows start and stop."""
    top = 0
    for rows in stack:
        first, last = max(start - top, 0), min(stop - top, rows.stop - rows.start)
        if first < last:
            yield Rows(rows.tensor, rows.start + first, rows.start + last)
        top += rows.stop - rows.start
