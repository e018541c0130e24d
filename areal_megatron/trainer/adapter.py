"""Low-rank adapters beside the linear layers of a GPTModel, whose own weights are frozen.

A linear layer of megatron-core keeps its name, weight and layout, and gets a module `adapter`, whose output is added to
its own. Where it fuses several layers of a checkpoint, A has the rows of all these layers' A one after another, and B
has the rows of the weight, each the row of its own layer's B:

| the layer is cut by | A | B | what ranks exchange |
|---|---|---|---|
| rows | whole | rows | A·x of their tokens is gathered: r numbers a token for each layer, where the weight gathers x |
| columns | columns | whole | A·x is summed, and each rank keeps its tokens |
| not | whole | whole | nothing |

A factor that is whole on several tensor-parallel ranks sees each rank's tokens there: it is marked as norms are, and
megatron-core sums its gradient. One that is cut is marked as the weight is, or the norm of the gradient would count it
on one rank only. Experts are whole on a rank that has them, which exchanges nothing; their factors are marked as they
are.
"""

from __future__ import annotations

import contextlib
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from areal_megatron.models.adapter import FACTORS, MEGATRON, Adapter, linear_rows, module_of
from areal_megatron.models.architecture import Architecture
from areal_megatron.models.pattern import numbers
from areal_megatron.models.table import Cut, Row
from areal_megatron.reshard.boxes import Layout
from areal_megatron.trainer.marks import mark

Runs = Sequence[tuple[int | None, int]]
"""Rows of a weight on this rank, in order: the number of the layer among those with an adapter that its linear layer
fuses, None for one without; and how many rows."""


class LowRank(torch.nn.Module):
    """scale · B·A of the layers that one linear layer fuses; both factors are zero at first.

    weight: this rank's part of the linear layer's. cut: how that is cut, None for an expert. layers: how many layers
    have an adapter.
    dropout: the share of x that is zero within `dropping`, where the rest is multiplied by 1 / (1 − dropout).
    """

    dropping: ClassVar[bool] = False

    def __init__(
        self,
        config: TransformerConfig,
        weight: Tensor,
        adapter: Adapter,
        cut: Cut | None,
        layers: int,
        runs: Runs,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.enabled, self.scale, self._dropout = True, adapter.scale, dropout
        self._cut, self._sharded = cut, config.sequence_parallel and cut is not None
        rows = torch.cat([torch.full((count,), -1 if layer is None else layer) for layer, count in runs])
        own = rows >= 0
        self.lora_A = torch.nn.Parameter(weight.new_zeros(layers * adapter.rank, weight.size(1)))
        self.lora_B = torch.nn.Parameter(weight.new_zeros(int(own.sum()), adapter.rank))
        self._mark()
        self._layer_of = F.one_hot(rows[own], layers).to(weight)[:, :, None] if layers > 1 else None
        self._row_of = None if own.all() else torch.where(own, own.cumsum(0) - 1, own.sum()).to(weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """x: what the linear layer gets, [tokens of this rank, 1, in] → what is to be added to its output"""
        inner = F.linear(self.dropped(x), self.lora_A) * self.scale
        if self._sharded and self._cut is Cut.COLUMNS:
            inner = reduce_scatter_to_sequence_parallel_region(inner)
        elif self._sharded and self._cut is not Cut.WHOLE:
            inner = gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True)
        return F.linear(inner, self.wide(self.lora_B))

    def dropped(self, x: Tensor) -> Tensor:
        """Returns what is left of x by dropout."""
        return F.dropout(x, self._dropout) if self._dropout and self.dropping else x

    @torch.no_grad()
    def product(self) -> Tensor:
        """Returns scale · B·A in the shape of this rank's part of the weight, float32."""
        return self.wide(self.lora_B).float() @ self.lora_A.float() * self.scale

    def wide(self, rows: Tensor) -> Tensor:
        """rows: B, or every expert's B [experts, rows of B, rank] → B as the factor of all A together, [rows of the
        weight, layers · rank], or of each expert: zero where a row meets the A of another layer"""
        if self._layer_of is not None:
            rows = (rows[..., None, :] * self._layer_of).flatten(-2)
        if self._row_of is not None:
            rows = F.pad(rows, (0, 0, 0, 1))[..., self._row_of, :]
        return rows

    def _mark(self) -> None:
        """Tells megatron-core which gradients to sum over tensor-parallel ranks, and which to count on each of them."""
        if self._cut is None:
            for factor in (self.lora_A, self.lora_B):
                mark(factor, allreduce=False)
                set_tensor_model_parallel_attributes(factor, True, 0, 1)
            return
        axis_of = {self.lora_A: 1 if self._cut is Cut.COLUMNS else None}
        axis_of[self.lora_B] = None if self._cut in (Cut.COLUMNS, Cut.WHOLE) else 0
        for factor, axis in axis_of.items():
            if axis is None:
                mark(factor, sequence_parallel=self._sharded)
            else:
                set_tensor_model_parallel_attributes(factor, True, axis, 1)


class Adapted(torch.nn.Module):
    """What is used of a linear layer of megatron-core that has got an adapter."""

    weight: Tensor
    adapter: LowRank


def add_adapters(chunk: GPTModel, model: Architecture, adapter: Adapter, base: Layout, dropout: float = 0.0) -> None:
    """Freezes a virtual stage of this rank and adds adapters to its linear layers. `base`: what the rank holds of the
    model."""
    chunk.requires_grad_(False)
    targeted = adapter.modules(model)
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in linear_rows(model, adapter.experts):
        rows[row.megatron.removesuffix(".weight")].append(row)
    for name, linear in list(chunk.named_modules()):
        layer = name.removeprefix("decoder.layers.").partition(".")[2]
        fused = rows.get(re.sub(r"(?<=\.local_experts\.)\d+", "{}", layer), [])
        own = [module for row in fused for module in map(module_of, row.tensors) if module in targeted]
        if own:
            stack = _stack(fused[0].megatron, base)
            runs = [(own.index(module) if module in own else None, count) for module, count in stack]
            weight, cut = cast(Tensor, linear.weight), None if fused[0].of_experts else fused[0].cut
            linear.adapter = LowRank(chunk.config, weight, adapter, cut, len(own), runs, dropout)
            cast(Adapted, linear).register_forward_hook(_add)
    if chunk.pre_process:
        # Where layers are recomputed, what they begin with must need a gradient: else nothing within them gets one.
        chunk.embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())


def _stack(weight: str, base: Layout) -> list[tuple[str, int]]:
    """The layers of a checkpoint whose rows a rank's weight holds, by module_of, in the order of the rows, and how many
    rows."""
    pieces = [piece for piece in base.pieces if piece.parameter.endswith(f".{weight}")]
    axis = numbers(pieces[0].parameter)
    first = sorted((p for p in pieces if p.parameter == pieces[0].parameter), key=lambda p: p.local.start[axis])
    return [(module_of(piece.tensor), piece.local.shape[axis]) for piece in first]


def _add(linear: Adapted, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
    if not linear.adapter.enabled:
        return None
    return output[0] + linear.adapter(inputs[0]), output[1]


def adapters_of(chunks: Sequence[torch.nn.Module]) -> list[LowRank]:
    """Returns the adapters of a model; looking through all its modules takes milliseconds."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, LowRank)]


@contextlib.contextmanager
def dropping() -> Iterator[None]:
    """A context in which adapters have dropout, for what gradients are computed of. What is recomputed there drops the
    same: megatron-core sets the random generator back for it."""
    LowRank.dropping = True
    try:
        yield
    finally:
        LowRank.dropping = False


@contextlib.contextmanager
def switched_off(adapters: Sequence[LowRank]) -> Iterator[None]:
    """A context in which their model is the one without adapters; nothing is to be computed backwards through it."""
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


@torch.no_grad()
def begin(factors: Mapping[str, Tensor], layout: Layout, seed: int) -> None:
    """Gives factors the values that PEFT begins with: uniform within ±1/√in for A, and zero for B, so that the model
    is the one without adapters. They depend on the seed and the tensor's name alone."""
    for piece in layout.pieces:
        for name, region, view in piece.tensors(factors):
            if f".{FACTORS[0]}." in name:
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
                shape = layout.canonical[piece.tensor][numbers(piece.tensor) :]
                bound = 1 / math.sqrt(shape[1])
                view.copy_(torch.empty(shape).uniform_(-bound, bound, generator=generator)[region])
            else:
                view.zero_()


class Merged(Mapping[str, Tensor]):
    """A rank's parameters, by name, with the adapters' products added to the weights, each sum rounded once.

    chunks: the models whose adapters they are; parameters: of the model without them. A sum is computed when it is
    asked for, and kept until the next one is, or for good by `kept`.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], parameters: Mapping[str, Tensor]):
        self._parameters = parameters
        names = {values.data_ptr(): name for name, values in parameters.items()}
        adapted = (module for chunk in chunks for module in chunk.modules() if hasattr(module, "adapter"))
        linears = (cast(Adapted, module) for module in adapted)
        self._linears = {names[linear.weight.data_ptr()]: linear for linear in linears}
        self._last: tuple[str, Tensor] | None = None
        self._kept: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._linears:
            return self._parameters[name]
        if self._last is None or self._last[0] != name:
            self._last = (name, self._sum(name))
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def forget(self) -> None:
        """Is to be called when factors have changed."""
        self._last = None

    def kept(self) -> dict[str, Tensor]:
        """Returns the parameters as they are now. The sums have memory of their own, the same at each call: what an
        earlier call returned changes."""
        for name in self._linears:
            found = self._sum(name)
            self._kept.setdefault(name, found)
            if self._kept[name] is not found:
                self._kept[name].copy_(found)
        return {name: self._kept.get(name, values) for name, values in self._parameters.items()}

    @torch.no_grad()
    def _sum(self, name: str) -> Tensor:
        linear = self._linears[name]
        return (linear.weight.float() + linear.adapter.product()).to(linear.weight.dtype)


def is_factor(name: str) -> bool:
    """Returns whether a parameter of Megatron's is a factor of an adapter."""
    return MEGATRON in name
