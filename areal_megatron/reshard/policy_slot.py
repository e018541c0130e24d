"""The adapter that the trainers send, on an engine rank: as it was received, and where vLLM computes from it.

Each layer of vLLM that may have adapters has stacks of factors, with a slot for every adapter of a batch. There B is
multiplied by the scale, and what is beyond the adapter's rank is zero. Updates are written into tensors of their own,
which have the trainers' bits, and from those into the slot at each commit. Imports no vllm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from areal_megatron.models.adapter import FACTORS, Adapter

POLICY = 1
"""The number that vLLM gives the first adapter which its command line names: the policy's."""


class PolicySlot:
    """The slot of the policy's adapter in all layers.

    `tensors` is what updates are written into, by the names and with the shapes of engine_layout.layout: zeros at
    first. `manager` is vLLM's LoRAModelManager, which a model with adapters has as `lora_manager`.
    """

    def __init__(self, manager: Any, adapter: Adapter):
        self._manager, self._adapter = manager, adapter
        self.tensors: dict[str, Tensor] = {}
        self._parts: list[tuple[Tensor, Tensor, float]] = []
        """A factor of one target, the stack that has it in its slots, and what it is multiplied by there."""
        a, b = FACTORS
        for layer, module in manager.modules.items():
            for factor, stacks, scale in ((a, module.lora_a_stacked, 1.0), (b, module.lora_b_stacked, adapter.scale)):
                own = [stacks[number] for number in self._targets(layer)]
                if not own:  # a layer that another adapter of the engine has
                    continue
                shapes = [self._shape(factor, stack) for stack in own]
                rows = [shape[0] for shape in shapes]
                received = torch.zeros(sum(rows), shapes[0][1], dtype=own[0].dtype, device=own[0].device)
                self.tensors[f"{layer}.{factor}"] = received
                self._parts += [(part, stack, scale) for part, stack in zip(received.split(rows), own, strict=True)]

    def _targets(self, layer: str) -> Iterator[int]:
        """Yields which of the layers of a checkpoint that are fused in a layer of vLLM have adapters."""
        for number, fused in enumerate(self._manager.packed_modules.get(layer, [layer])):
            if fused.rpartition(".")[2] in self._adapter.targets:
                yield number

    def _shape(self, factor: str, stack: Tensor) -> tuple[int, int]:
        """The shape of a factor whose stack is [slots, 1, largest rank, in] or [slots, 1, out, largest rank]."""
        rank = self._adapter.rank
        return (rank, stack.size(3)) if factor == FACTORS[0] else (stack.size(2), rank)

    @torch.no_grad()
    def write(self) -> None:
        """Writes what was received into the slot."""
        slot = self._manager.lora_index_to_id.index(POLICY)
        for part, stack, scale in self._parts:
            rows, columns = part.shape
            stack[slot, 0, :rows, :columns].copy_(part if scale == 1 else part * scale)
