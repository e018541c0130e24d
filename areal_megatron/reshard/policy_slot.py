"""The adapter that the trainers send, on an engine rank: as it was received, and where vLLM computes from it.

Each layer of vLLM that may have adapters has stacks of factors, with a slot for every adapter of a batch. There B is
multiplied by the scale, and what is beyond the adapter's rank is zero. Updates are written into tensors of their own,
which have the trainers' bits, and from those into the slot at each commit, and again when vLLM brings the adapter back
after others have had all slots. Imports no vllm.
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
        self._received, self._activate = False, manager.activate_adapter
        manager.activate_adapter = self._activated
        self.tensors: dict[str, Tensor] = {}
        self._parts: list[tuple[Tensor, Tensor, float]] = []
        """Rows of a factor of one target, a stack that has them in its slots, and what they are multiplied by there."""
        down, up = FACTORS
        for layer, module in manager.modules.items():
            own = list(self._targets(layer, len(module.lora_b_stacked)))
            if not own:  # another adapter of the engine has the layer
                continue
            first = module.lora_a_stacked[0]
            rows = [[module.lora_b_stacked[number].size(2) for number in of_target] for of_target in own]
            held = {"dtype": first.dtype, "device": first.device}
            a = torch.zeros(len(own) * adapter.rank, first.size(3), **held)
            b = torch.zeros(sum(map(sum, rows)), adapter.rank, **held)
            self.tensors |= {f"{layer}.{down}": a, f"{layer}.{up}": b}
            for of_target, part in zip(own, a.split(adapter.rank), strict=True):
                self._parts += [(part, module.lora_a_stacked[number], 1.0) for number in of_target]
            stacks = [module.lora_b_stacked[number] for of_target in own for number in of_target]
            parts = b.split([count for of_target in rows for count in of_target])
            self._parts += [(part, stack, adapter.scale) for part, stack in zip(parts, stacks, strict=True)]

    def _targets(self, layer: str, stacks: int) -> Iterator[range]:
        """Yields which of a layer's stacks each target has. A layer of vLLM has one for each layer of a checkpoint that
        is fused in it; further ones are the first's (queries, keys and values of a gated delta net)."""
        fused = self._manager.packed_modules.get(layer, [layer])
        more = stacks - len(fused)
        for number, own in enumerate(fused):
            if own.rpartition(".")[2] in self._adapter.targets:
                yield range(number + more * (number > 0), number + more + 1)

    @torch.no_grad()
    def write(self) -> None:
        """Writes what was received into the slot, if there is one at the moment."""
        self._received = True
        if POLICY not in self._manager.lora_index_to_id:
            return
        slot = self._manager.lora_index_to_id.index(POLICY)
        for part, stack, scale in self._parts:
            rows, columns = part.shape
            stack[slot, 0, :rows, :columns].copy_(part if scale == 1 else part * scale)

    def _activated(self, number: int) -> bool:
        """Takes the place of the manager's activate_adapter."""
        changed = self._activate(number)
        if changed and number == POLICY and self._received:
            self.write()
        return changed
