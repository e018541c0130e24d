"""Tensor parallelism: what one rank holds of a row of an architecture table.

Megatron and vLLM agree in everything but the order in which they fuse query, key and value heads and the
padding of the vocabulary, so both layouts are built here.
"""

from __future__ import annotations

from collections.abc import Callable

from areal_megatron.config import ConfigError
from areal_megatron.reshard.architectures.table import Cut, Dimensions, Row
from areal_megatron.reshard.layout import Box, Layout, Piece, Rows

FuseHeads = Callable[[Dimensions, int, int, tuple[str, str, str]], list[Rows]]
"""(dimensions, tp, rank, names of query, key, value) → the rows that this rank stacks."""


class ShardBuilder:
    """Collects the parameters of tensor-parallel rank `rank` of `tp`; `key` names tp in errors."""

    def __init__(self, dimensions: Dimensions, tp: int, rank: int, *, vocabulary: int, fuse_heads: FuseHeads, key: str):
        self.dimensions, self.tp, self.rank, self.fuse_heads = dimensions, tp, rank, fuse_heads
        self.padded_vocabulary = vocabulary
        self._parameters: dict[str, tuple[int, ...]] = {}
        self._tensors: dict[str, tuple[int, ...]] = {}
        self._pieces: list[Piece] = []
        for what, size in (
            ("num_attention_heads", dimensions.heads),
            ("intermediate_size", dimensions.ffn),
            ("the padded vocabulary", vocabulary),
        ):
            if size % tp:
                raise ConfigError(f"{key}: {tp} does not divide {what}={size} of the model")
        if dimensions.kv_heads % tp and tp % dimensions.kv_heads:
            raise ConfigError(f"{key}: {tp} is neither a divisor nor a multiple of "
                              f"num_key_value_heads={dimensions.kv_heads} of the model")  # fmt: skip

    def add(self, row: Row, parameter: str, prefix: str = "") -> None:
        """Adds `parameter`, which holds this rank's part of the row's tensors (their names under `prefix`)."""
        shapes = {prefix + name: self.dimensions.shape(axes) for name, axes in row.tensors.items()}
        trailing = next(iter(shapes.values()))[1:]
        columns = Box((0,) * len(trailing), trailing)
        height = None
        match row.cut:
            case Cut.WHOLE:
                stack = [Rows(name, 0, shape[0]) for name, shape in shapes.items()]
            case Cut.COLUMNS:
                stack = [Rows(name, 0, shape[0]) for name, shape in shapes.items()]
                columns = Box(*(((edge,)) for edge in self._share(trailing[0])))
            case Cut.ROWS:
                stack = [Rows(name, *self._share(shape[0])) for name, shape in shapes.items()]
            case Cut.HEADS:
                stack = self.fuse_heads(self.dimensions, self.tp, self.rank, tuple(shapes))
            case Cut.VOCABULARY:
                start, stop = self._share(self.padded_vocabulary)
                height = stop - start
                stack = [Rows(name, start, min(stop, shape[0])) for name, shape in shapes.items() if start < shape[0]]
        self._tensors |= {rows.tensor: shapes[rows.tensor] for rows in stack}
        self._add(parameter, stack, columns, height)

    def build(self) -> Layout:
        return Layout(self._parameters, self._tensors, tuple(self._pieces))

    def _share(self, size: int) -> tuple[int, int]:
        return self.rank * size // self.tp, (self.rank + 1) * size // self.tp

    def _add(self, parameter: str, stack: list[Rows], columns: Box, height: int | None) -> None:
        top = 0
        for rows in stack:
            bottom = top + rows.stop - rows.start
            self._pieces.append(
                Piece(
                    parameter,
                    local=Box((top, *(0 for _ in columns.shape)), (bottom, *columns.shape)),
                    tensor=rows.tensor,
                    box=Box((rows.start, *columns.start), (rows.stop, *columns.stop)),
                    axes=tuple(range(1 + len(columns.shape))),
                )
            )
            top = bottom
        self._parameters[parameter] = (top if height is None else height, *columns.shape)
