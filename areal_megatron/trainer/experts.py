"""The experts of a layer without TransformerEngine: one product for all of them where torch has a kernel for that, one
after another elsewhere. Both have the parameters of Megatron's SequentialMLP, and so its checkpoints and layouts. And
the order in which tokens come to them."""

from __future__ import annotations

import logging
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import permute as _permute
from torch import Tensor
from torch.nn import ModuleList

from areal_megatron.trainer.gathered import settle
from areal_megatron.trainer.made_again import made_again

_ALIGNED = 16
"""Rows of matrices must begin at multiples of this number of bytes for torch to multiply groups of them."""


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: Any = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns the tokens in the order of their experts, their probabilities, and which tokens they are, in the place of
    Megatron's function.

    tokens [tokens, hidden], routing_map bool [tokens, experts], probs [tokens, experts]. Where num_out_tokens is an
    int, as it is unless tokens are dropped, nothing waits for the device; Megatron's waits twice. It must be the number
    of ones in the map: a token's experts differ, as the top k of a router and routes that data/routes.py takes do.
    """
    if fused or drop_and_pad or not isinstance(num_out_tokens, int):
        return _permute(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad)
    chosen = torch.nonzero_static(routing_map.bool().T.flatten(), size=num_out_tokens).squeeze(1)
    rows = chosen % len(tokens)
    permuted = None if probs is None else probs.T.flatten().index_select(0, chosen)
    return tokens.index_select(0, rows), permuted, rows


class Experts(SequentialMLP):
    """Megatron's experts; with `grouped` all of a rank are multiplied in one kernel."""

    def __init__(self, *args: Any, grouped: bool = False, **options: Any):
        super().__init__(*args, **options)
        widths = {weight.size(1) * weight.element_size() for weight in self.parameters()}
        if grouped and any(width % _ALIGNED for width in widths):
            _warn(f"experts are multiplied one after another: {sorted(widths)} bytes a row are no multiples of 16")
            grouped = False
        self.grouped = grouped and self.num_local_experts > 1
        self.recompute = "none"
        """What the backward pass computes again where experts are grouped: none, elementwise or mlp."""
        if self.grouped:
            self.local_experts = _LastFirst(self.local_experts)

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        rows, probs = permuted_local_hidden_states, permuted_probs
        if not self.grouped or not len(rows):
            return super().forward(rows, tokens_per_expert, probs)
        experts: list[Any] = [*self.local_experts]
        for expert in reversed(experts):
            settle(*expert.modules())
        counts = tokens_per_expert.tolist()

        def multiply(rows: Tensor) -> Tensor:
            return _product(rows, counts, [expert.linear_fc1 for expert in experts])

        def last(inner: Tensor) -> Tensor:
            return _product(inner, counts, [expert.linear_fc2 for expert in experts])

        if self.recompute == "none" or not torch.is_grad_enabled():
            return last(self._activate(multiply(rows), probs)), None
        if self.recompute == "mlp":
            return made_again(lambda rows, probs: self._activate(multiply(rows), probs), (rows, probs), last), None
        return made_again(self._activate, (multiply(rows), probs), last), None

    def _activate(self, inner: Tensor, probs: Tensor) -> Tensor:
        if self.config.bias_activation_fusion:
            return weighted_bias_swiglu_impl(inner, None, probs.unsqueeze(-1))
        gate, up = inner.chunk(2, dim=-1)
        return (F.silu(gate) * up * probs.unsqueeze(-1)).to(inner.dtype)


class _LastFirst(ModuleList):
    """Modules that are registered last first, under their names.

    Megatron's buffers hold parameters in reverse order of registration: so the weights of the experts lie in the order
    of the experts, at equal distances, and need no copy to be one tensor.
    """

    def __init__(self, modules: ModuleList):
        super().__init__()
        for name, module in reversed(list(modules.named_children())):
            self.add_module(name, module)

    def __iter__(self):
        return (self[number] for number in range(len(self)))


def _product(rows: Tensor, counts: list[int], linears: list[Any]) -> Tensor:
    """Returns what linear layers of all experts give of their rows, with their adapters (trainer/adapter.py)."""
    product = _Products.apply(rows, counts, *(linear.weight for linear in linears))
    adapters = [linear.adapter for linear in linears if hasattr(linear, "adapter") and linear.adapter.enabled]
    if not adapters:
        return product
    first, factors = adapters[0], torch.stack([adapter.lora_B for adapter in adapters])
    inner = _Products.apply(first.dropped(rows), counts, *(adapter.lora_A for adapter in adapters))
    return product + _Products.apply(inner * first.scale, counts, *first.wide(factors).unbind())


class _Products(torch.autograd.Function):
    """[rows, in], an expert's rows after the previous one's, times its weight [out, in]ᵀ → [rows, out]"""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, *weights)
        ctx.counts = counts
        return F.grouped_mm(rows, stacked(weights).transpose(1, 2), offs=_ends(counts, rows.device))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        gradient, ends = gradient.contiguous(), _ends(ctx.counts, rows.device)
        to_rows = F.grouped_mm(gradient, stacked(weights), offs=ends) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return to_rows, None, *[None] * len(weights)
        to_weights = F.grouped_mm(gradient.t(), rows, offs=ends).unbind()
        for count, to_weight in zip(ctx.counts, to_weights, strict=True):
            if not count:  # nothing was multiplied, and so perhaps nothing written
                to_weight.zero_()
        return to_rows, None, *to_weights


def stacked(weights: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """Returns [len(weights), …] of tensors of one shape: a view if they lie at equal distances in one buffer, as in
    Megatron's, else a copy."""
    first, second = weights[0], weights[1]
    distance = (second.data_ptr() - first.data_ptr()) // first.element_size()
    if distance > 0 and all(
        weight.is_contiguous()
        and weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and weight.storage_offset() == first.storage_offset() + number * distance
        for number, weight in enumerate(weights)
    ):
        return first.detach().as_strided((len(weights), *first.shape), (distance, *first.stride()))
    return torch.stack([weight.detach() for weight in weights])


def _ends(counts: list[int], device: torch.device) -> Tensor:
    return torch.tensor([*accumulate(counts)], dtype=torch.int32).to(device, non_blocking=True)


@cache
def _warn(line: str) -> None:
    logging.warning(line)
