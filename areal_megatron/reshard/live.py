"""The parameters of a vLLM model as its layout says, also where vLLM rearranges them after loading.

Experts are the one case. On CUDA the Triton kernels compute from the loaded weights as they are, and any other
is refused. On CPU the kernels compute from a packed form, which replaces the loaded one: here updates are
written into plain tensors of their own and packed again after each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

from areal_megatron.reshard.boxes import LayoutError


def live_parameters(model: torch.nn.Module) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Tensors to write updates into, by vLLM's names, and what to call when all are written.

    Raises LayoutError for experts that vLLM keeps in an order which nobody here knows.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    packed = []
    for name, experts in _experts(model):
        if current_platform.is_cpu():
            plain = _Plain(experts)
            parameters |= {f"{name}.{kind}": tensor for kind, tensor in plain.tensors.items()}
            packed.append(plain)
        elif (backend := experts.quant_method.unquantized_backend.value) != "TRITON":
            raise LayoutError(f"vLLM keeps {name}.w13_weight as {backend} wants it; start it with --moe-backend triton")

    def repack() -> None:
        for plain in packed:
            plain.repack()

    return parameters, repack


def _experts(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    return (
        (name, module)
        for name, module in model.named_modules()
        if "w13_weight" in dict(module.named_parameters(recurse=False))
    )


class _Plain:
    """Experts of one layer as they are loaded, beside the packed ones that the CPU computes from."""

    def __init__(self, experts: Any):
        self._experts = experts
        self._isa = experts.quant_method.moe_kernel.fused_experts.isa
        self._width = experts.moe_config.intermediate_size_per_partition
        w13, w2 = experts.w13_weight, experts.w2_weight
        self.tensors = {
            "w13_weight": torch.zeros(w13.shape[0], 2 * self._width, w13.shape[2], dtype=w13.dtype),
            "w2_weight": torch.zeros(*w2.shape[:2], self._width, dtype=w2.dtype),
        }

    @torch.no_grad()
    def repack(self) -> None:
        from vllm._custom_ops import cpu_prepack_moe_weight

        w13, w2 = self._experts.w13_weight, self._experts.w2_weight
        padding = w2.shape[2] - self._width  # zeros, in the gate's rows, in the up's rows and in the columns of down
        pad = torch.nn.functional.pad
        halves = (pad(half, (0, 0, 0, padding)) for half in self.tensors["w13_weight"].chunk(2, dim=1))
        w13.copy_(cpu_prepack_moe_weight(torch.cat(list(halves), dim=1), self._isa))
        w2.copy_(cpu_prepack_moe_weight(pad(self.tensors["w2_weight"], (0, padding)), self._isa))
