"""Tensors that are not kept for the backward pass, but recomputed in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from torch import Tensor


def made_again(make: Callable[..., Tensor], inputs: tuple[Any, ...], use: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns use(make(*inputs)); the backward pass recomputes the input that `use` keeps for it.

    Everything that `make` keeps is recomputed, too. `use` must keep its input as it is.
    """
    again = CheckpointWithoutOutput()
    output = use(again.checkpoint(make, *inputs))
    again.discard_output_and_register_recompute(output)
    return output


def not_kept(
    tensors: tuple[Tensor, ...], make: Callable[[], tuple[Tensor, ...]]
) -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which autograd keeps neither these tensors nor views of them: where it would, `make`, which gets no
    gradient, recomputes them in the backward pass, in the same order and strides.

    For tensors that are gathered or selected, so that nothing is kept of how they came about. What is computed with
    them may keep any part of them, and they have gradients as usual.
    """
    again = _Again(tensors, make)
    return torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack)


class _Again:
    def __init__(self, tensors: tuple[Tensor, ...], make: Callable[[], tuple[Tensor, ...]]):
        self._storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        self._make, self._missing, self._made = make, 0, None

    def pack(self, tensor: Tensor) -> Tensor | tuple:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in self._storages:
            return tensor
        self._missing += 1
        return self._storages.index(storage), tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Tensor | tuple) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self._made is None:
            with torch.no_grad():
                self._made = self._make()
        number, *place = packed
        tensor = self._made[number].as_strided(*place)
        self._missing -= 1
        if not self._missing:
            self._made = None
        return tensor
