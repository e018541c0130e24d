"""Builds one rank's layout from the rows of an architecture table.

Megatron and vLLM differ only in the order in which they fuse query, key and value heads, in the padding of the
vocabulary, and in the layers and experts that a rank holds; so both layouts are built here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from areal_megatron.config import ConfigError
from areal_megatron.models.pattern import numbered
from areal_megatron.models.table import Cut, Dimensions, Row
from areal_megatron.reshard.boxes import Box, Layout, Piece, Rows, Shape


@dataclass(frozen=True, slots=True)
class Share:
    """One of `count` equal parts. `key` is the config key that sets `count`, for errors."""

    index: int
    count: int
    key: str

    def of(self, size: int) -> tuple[int, int]:
        """Returns start and stop of the part of an axis of `size`."""
        return self.index * size // self.count, (self.index + 1) * size // self.count

    def check(self, what: str, size: int) -> None:
        """Raises ConfigError if `size` cannot be divided into `count` equal parts."""
        if size % self.count:
            raise ConfigError(f"{self.key}: {self.count} does not divide {what}={size} of the model")


FuseHeads = Callable[[Dimensions, Share, tuple[str, ...], bool], list[Rows]]
"""(dimensions, share of this rank, names of the query, key and value tensors, whether the first has gates too) → the
rows that this rank stacks."""


class ShardBuilder:
    """Collects the parameters of one rank: the `expert_tensor` share of each expert in `experts`, and the `tensor`
    share of everything else.

    `vocabulary` is its padded size; `sections_apart` says how groups of heads are stacked: the first section of all,
    then the next one; or group after group, as in the checkpoint. Raises ConfigError if the shares do not divide the
    model.
    """

    def __init__(
        self,
        dimensions: Dimensions,
        *,
        tensor: Share,
        expert_tensor: Share,
        experts: range,
        vocabulary: int,
        fuse_heads: FuseHeads,
        sections_apart: bool,
    ):
        self.dimensions, self.tensor, self.expert_tensor, self.experts = dimensions, tensor, expert_tensor, experts
        self.padded_vocabulary, self.fuse_heads = vocabulary, fuse_heads
        self.sections_apart = sections_apart
        self._held: dict[str, Shape] = {}
        self._canonical: dict[str, Shape] = {}
        self._pieces: list[Piece] = []
        self._dtypes: dict[str, str] = {}
        tensor.check("num_attention_heads", dimensions.heads)
        tensor.check("the padded vocabulary", vocabulary)
        expert_tensor.check("moe_intermediate_size", dimensions.expert_ffn)
        tensor.check("intermediate_size", dimensions.ffn)
        tensor.check("the width of the shared experts", dimensions.shared_ffn)
        tensor.check("linear_num_key_heads", dimensions.linear_key_heads)
        if dimensions.kv_heads % tensor.count and tensor.count % dimensions.kv_heads:
            raise ConfigError(
                f"{tensor.key}: {tensor.count} is neither a divisor nor a multiple of "
                f"num_key_value_heads={dimensions.kv_heads} of the model"
            )

    def add_layers(self, row: Row, parameter: str, layers: range, dtype: str = "") -> None:
        """Adds the pattern `parameter` for the decoder layers among `layers` that have the row; its first number counts
        from 0 over `layers`."""
        all_with = self.dimensions.layers_with(row)
        own = [number for number in all_with if number in layers]
        if own:
            parameter = numbered(parameter, [number - layers.start for number in own])
            first = all_with.index(own[0])
            at = range(first, first + len(own))
            self.add(row.of_layers(self.dimensions), parameter, at, dtype)

    def add(self, row: Row, parameter: str, layers: range | None = None, dtype: str = "") -> None:
        """Adds the pattern `parameter`, which holds this rank's part of the row's tensors; if their first axis counts
        layers, of the layers in `layers`. `dtype`: the parameter's, "" for the model's. Rows added to the same
        parameter are stacked."""
        shapes = {name: self.dimensions.shape(axes) for name, axes in row.tensors.items()}
        leading = [*([] if layers is None else [layers]), *([self.experts] if row.of_experts else [])]
        if dtype:
            self._dtypes[parameter] = dtype
        rows, *trailing = next(iter(shapes.values()))[len(leading) :]
        columns, height = whole_axes(trailing), None
        share = self.expert_tensor if row.of_experts else self.tensor
        match row.cut:
            case Cut.WHOLE:
                stack = [Rows(name, 0, rows) for name in shapes]
            case Cut.COLUMNS:
                stack = [Rows(name, 0, rows) for name in shapes]
                columns = [share.of(trailing[0])]
            case Cut.ROWS:
                stack = [Rows(name, *share.of(rows)) for name in shapes]
            case Cut.HEADS | Cut.GATED_HEADS:
                names = row.among or tuple(shapes)
                fused = self.fuse_heads(self.dimensions, share, names, row.cut is Cut.GATED_HEADS)
                stack = [rows for rows in fused if rows.tensor in shapes]
            case Cut.SECTIONS | Cut.GROUPS:
                stack = list(self._sections(row, next(iter(shapes)), share))
            case Cut.VOCABULARY:
                start, stop = share.of(self.padded_vocabulary)
                height = stop - start
                stack = [Rows(name, start, min(stop, rows)) for name in shapes if start < rows]
        self._canonical |= {rows.tensor: shapes[rows.tensor] for rows in stack}
        self._add(parameter, [(axis.start, axis.stop) for axis in leading], stack, columns, height)

    def _sections(self, row: Row, tensor: str, share: Share) -> Iterator[Rows]:
        """Yields this rank's rows of a tensor with sections."""
        d = self.dimensions
        groups = d.linear_key_heads if row.cut is Cut.GROUPS else 1
        widths = [d.shape(axis)[0] // groups for _, axis in row.sections]
        tops = [sum(widths[:number]) for number in range(len(widths))]
        if row.cut is Cut.SECTIONS:
            for top, width in zip(tops, widths, strict=True):
                yield Rows(tensor, *(top + at for at in share.of(width)))
        elif not self.sections_apart:
            yield Rows(tensor, *share.of(groups * sum(widths)))
        else:
            for top, width in zip(tops, widths, strict=True):
                for group in range(*share.of(groups)):
                    start = group * sum(widths) + top
                    yield Rows(tensor, start, start + width)

    def build(self) -> Layout:
        return Layout(self._held, self._canonical, tuple(self._pieces), self._dtypes)

    def _add(self, parameter: str, leading: list, stack: list[Rows], columns: list, height: int | None) -> None:
        counts, widths = ([stop - start for start, stop in axes] for axes in (leading, columns))
        top = self._held[parameter][len(counts)] if parameter in self._held else 0
        for rows in stack:
            bottom = top + rows.stop - rows.start
            region = [*leading, (rows.start, rows.stop), *columns]
            self._pieces.append(
                Piece(
                    parameter,
                    local=Box((*(0 for _ in counts), top, *(0 for _ in widths)), (*counts, bottom, *widths)),
                    tensor=rows.tensor,
                    box=Box(tuple(start for start, _ in region), tuple(stop for _, stop in region)),
                    axes=tuple(range(len(region))),
                )
            )
            top = bottom
        self._held[parameter] = (*counts, top if height is None else height, *widths)


def whole_axes(shape: list[int]) -> list[tuple[int, int]]:
    return [(0, size) for size in shape]
