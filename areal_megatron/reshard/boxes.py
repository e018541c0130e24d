"""Boxes and layouts: which part of the model each rank of a pool holds, and where.

Canonical tensors are the Hugging Face checkpoint's, by name and shape. Names are patterns (models/pattern.py): a `{}`
is the number of a layer or an expert. All tensors of a pattern together are one tensor with a leading axis for each
`{}`, so that layers and experts are cut, intersected and counted like rows and columns. A layout lists one rank's local
parameters (patterns too) and the pieces of canonical tensors that they hold; what no piece covers is padding. Pure
Python: no torch, no process group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from operator import sub
from typing import Any

from areal_megatron.models.pattern import name_at, numbers

Shape = tuple[int, ...]


class LayoutError(ValueError):
    """Tensors do not have the layout they should; the message is one line that names the tensor and both shapes."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region: axis k spans start[k] to stop[k], stop excluded."""

    start: Shape
    stop: Shape

    @property
    def shape(self) -> Shape:
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        return prod(map(sub, self.stop, self.start))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.start, self.stop))

    def intersection(self, other: Box) -> Box | None:
        """Returns the common region, or None if there is none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def within(self, outer: Box) -> Box:
        """Returns this box with its indices counted from the start of `outer`."""
        start = tuple(a - base for a, base in zip(self.start, outer.start, strict=True))
        return Box(start, tuple(b - base for b, base in zip(self.stop, outer.start, strict=True)))

    def shifted(self, by: Iterable[int]) -> Box:
        """Returns this box moved along each axis."""
        by = tuple(by)
        start = tuple(a + offset for a, offset in zip(self.start, by, strict=True))
        return Box(start, tuple(b + offset for b, offset in zip(self.stop, by, strict=True)))

    def cut(self, elements: int) -> Iterator[Box]:
        """Yields parts of at most `elements`, cut along the first axes, in row-major order; as equal as their rows
        allow."""
        return self._cut(elements, 0)

    def singles(self, axes: int) -> Iterator[Box]:
        """Yields the parts with one index along each of the first `axes` axes, such as the tensors of a pattern."""
        for index in product(*map(range, self.start[:axes], self.stop[:axes])):
            yield Box((*index, *self.start[axes:]), (*(n + 1 for n in index), *self.stop[axes:]))

    def _cut(self, elements: int, axis: int) -> Iterator[Box]:
        if self.size <= elements:
            yield self
            return
        rows = self.shape[axis]
        most = max(elements // (self.size // rows), 1)
        step = -(-rows // -(-rows // most))
        for start in range(self.start[axis], self.stop[axis], step):
            stop = min(start + step, self.stop[axis])
            part = Box(
                (*self.start[:axis], start, *self.start[axis + 1 :]),
                (*self.stop[:axis], stop, *self.stop[axis + 1 :]),
            )
            yield from part._cut(elements, axis + 1)


def whole(shape: Iterable[int]) -> Box:
    """Returns the box of a whole tensor."""
    shape = tuple(shape)
    return Box((0,) * len(shape), shape)


def boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Yields the boxes that the elements start to stop of a tensor fill, counted row by row, one after another.

    A tensor of n axes gives at most 2n − 1 boxes: part of a row, whole rows, part of a row.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    size = prod(shape[1:])
    first, last = -(-start // size), stop // size  # whole rows
    if first > last:
        yield from _in_row(shape, last, start - last * size, stop - last * size)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * size, size)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last, *shape[1:]))
    yield from _in_row(shape, last, 0, stop - last * size)


def _in_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes(shape[1:], start, stop):
        yield Box((row, *box.start), (row + 1, *box.stop))


def expand(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Turns pattern → shape with the axes of its numbers into name → shape of one tensor."""
    return {
        name_at(pattern, single.start[: numbers(pattern)]): shape[numbers(pattern) :]
        for pattern, shape in shapes.items()
        for single in whole(shape).singles(numbers(pattern))
    }


@dataclass(frozen=True, slots=True)
class Piece:
    """The region `box` of the canonical pattern `tensor`, held in the region `local` of a rank's pattern `parameter`.

    Local axis k runs along canonical axis axes[k], so that transposed weights are pieces too. `parameter` has the
    numbers of `tensor` or fewer: an expert may be a number in the checkpoint's name and an index into the parameter.
    """

    parameter: str
    local: Box
    tensor: str
    box: Box
    axes: Shape

    def narrow(self, box: Box) -> Piece:
        """Returns the part of this piece that holds the canonical `box`, which must be inside it."""
        if box is self.box:
            return self
        offset = [local - self.box.start[axis] for local, axis in zip(self.local.start, self.axes, strict=True)]
        start = tuple([box.start[axis] + by for axis, by in zip(self.axes, offset, strict=True)])
        stop = tuple([box.stop[axis] + by for axis, by in zip(self.axes, offset, strict=True)])
        return Piece(self.parameter, Box(start, stop), self.tensor, box, self.axes)

    def views(self, parameters: Mapping[str, Any]) -> Iterator[Any]:
        """Yields views of the piece in its local parameters (torch tensors by name), without copies.

        There is one view for each parameter, with axes in canonical order; one after another they are the whole box.
        """
        named = numbers(self.parameter)
        inner, region = self.axes[named:], self.local.slices[named:]
        order = [inner.index(axis) for axis in sorted(inner)]
        in_order = order == sorted(order)
        for number in product(*map(range, self.local.start[:named], self.local.stop[:named])):
            view = parameters[name_at(self.parameter, number)][region]
            yield view if in_order else view.permute(order)

    def tensors(self, parameters: Mapping[str, Any]) -> Iterator[tuple[str, tuple[slice, ...], Any]]:
        """Yields (canonical name, region of that tensor, view of it in the local parameters) for each tensor."""
        named = numbers(self.tensor)
        region = self.box.slices[named:]
        for single in self.box.singles(named):
            (view,) = self.narrow(single).views(parameters)
            yield name_at(self.tensor, single.start[:named]), region, view[(0,) * (view.dim() - len(region))]


@dataclass(frozen=True)
class Layout:
    """What one rank holds. All shapes belong to patterns, with the axes of their numbers first.

    Example:
        held = layout(hf_config, MegatronSizes(tp=2), rank=0)  # from trainer_layout.py
        held.check({name: p.shape for name, p in model.named_parameters()}, "trainer rank 0")
        for piece in held.pieces:
            print(piece.parameter, piece.local, "holds", piece.tensor, piece.box)
    """

    held: dict[str, Shape]
    """Local parameter → its shape."""
    canonical: dict[str, Shape]
    """Canonical tensor of which this rank holds a part → its whole shape."""
    pieces: tuple[Piece, ...]
    """The pieces in the order of the model."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Local parameter → its dtype, of those that have another than the model."""

    @cached_property
    def parameters(self) -> dict[str, Shape]:
        """The name of each local parameter → its shape."""
        return expand(self.held)

    @cached_property
    def parameter_dtypes(self) -> dict[str, str]:
        """The name of each local parameter that has another dtype than the model → its dtype."""
        return {name: dtype for pattern, dtype in self.dtypes.items() for name in expand({pattern: self.held[pattern]})}

    @cached_property
    def size(self) -> int:
        """The number of elements that the pieces cover, without padding."""
        return sum(piece.box.size for piece in self.pieces)

    @property
    def padded(self) -> set[str]:
        """The names of parameters that hold padding, which is always zero, beside their pieces."""
        covered = dict.fromkeys(self.held, 0)
        for piece in self.pieces:
            covered[piece.parameter] += piece.box.size
        return set(expand({pattern: shape for pattern, shape in self.held.items() if covered[pattern] < prod(shape)}))

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
    """Rows start to stop of a canonical tensor; a fused parameter stacks several of these along its first axis."""

    tensor: str
    start: int
    stop: int


def window(stack: Iterable[Rows], start: int, stop: int) -> Iterator[Rows]:
    """Yields the part of a stack of rows that is between its rows start and stop."""
    top = 0
    for rows in stack:
        first, last = max(start - top, 0), min(stop - top, rows.stop - rows.start)
        if first < last:
            yield Rows(rows.tensor, rows.start + first, rows.start + last)
        top += rows.stop - rows.start
