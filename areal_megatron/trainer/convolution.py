"""Short causal convolutions over packed rows, one filter for each channel, with hand-written gradients.

As products, shifts and sums of their own, each of which reads and writes all activations, they take a third of the time
of a gated delta net on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from areal_megatron.trainer.copies import to_device


@dataclass(frozen=True)
class Earlier:
    """Where each of a row's T tokens finds the one that is a number of places before it in its sequence."""

    back: int
    """The number of places."""
    crossing: Tensor
    """int64: the tokens from `back` on for which the one `back` places before them in the row is not of their run."""
    after: Tensor | None
    """int64: the tokens that find it at the end of the prefix that they continue; None if no run continues one."""
    found: Tensor | None
    """int64: what these find."""

    @classmethod
    def of(cls, sizes: Sequence[int], parents: Sequence[int], back: int, device: torch.device | str) -> Earlier:
        """`sizes`: the tokens of each run; `parents`: the number of the run that it continues, −1 if none."""
        starts = np.cumsum((0, *sizes))
        crossing = np.flatnonzero(np.concatenate([np.arange(size) < back for size in sizes]))
        crossing = to_device(crossing[crossing >= back], device)
        pairs = [
            (starts[run] + place, starts[parent + 1] + place - back)
            for run, (size, parent) in enumerate(zip(sizes, parents, strict=True))
            if parent >= 0
            for place in range(max(back - sizes[parent], 0), min(back, size))
        ]
        if not pairs:
            return cls(back, crossing, None, None)
        after, found = np.array(pairs, np.int64).T.copy()
        return cls(back, crossing, to_device(after, device), to_device(found, device))


def convolved(x: Tensor, weight: Tensor, earlier: Callable[[int], Earlier]) -> Tensor:
    """Returns float32 [T, channels]: x [T, channels] of each token and of those before it in its sequence, times
    `weight`, [channels, tokens], whose last column is for the token itself."""
    return _Convolution.apply(x, weight, [earlier(back) for back in range(1, weight.size(1))])


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, steps: list[Earlier]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.steps = steps
        x, factors = x.float(), weight.float().T.contiguous()
        out = x * factors[-1]
        for step in steps:
            own = factors[-1 - step.back]
            _add_but_for(step.crossing, out[step.back :], step.back, x[: -step.back], own)
            if step.after is not None and step.found is not None:
                out.index_add_(0, step.after, x.index_select(0, step.found) * own)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight), dtype = ctx.saved_tensors, ctx.saved_tensors[0].dtype
        x, factors, gradient = x.float(), weight.float().T.contiguous(), gradient.contiguous()
        d_x = gradient * factors[-1]
        product = gradient * x
        d_factors = [product.sum(0)]
        for step in ctx.steps:
            own, later = factors[-1 - step.back], gradient[step.back :]
            _add_but_for(step.crossing, d_x[: -step.back], step.back, later, own)
            shifted = torch.mul(later, x[: -step.back], out=product[: len(later)])
            d_own = shifted.index_fill_(0, step.crossing - step.back, 0).sum(0)
            if step.after is not None:
                after = gradient.index_select(0, step.after)
                d_x.index_add_(0, step.found, after * own)
                d_own += (after * x.index_select(0, step.found)).sum(0)
            d_factors.append(d_own)
        return d_x.to(dtype), torch.stack(d_factors[::-1], 1).to(weight.dtype), None


def _add_but_for(crossing: Tensor, out: Tensor, back: int, x: Tensor, factor: Tensor) -> None:
    """Adds x · factor to `out`, [T − back, channels] each, but not where a token would meet one of another run."""
    places = crossing - back
    kept = out.index_select(0, places)
    out.addcmul_(x, factor).index_copy_(0, places, kept)
