"""The elementwise parts of a layer, with hand-written gradients: rotary embeddings; on a CPU also RMSNorm and SwiGLU.

As many small operations, each of which reads and writes all of its activations, they take as long as the products of
small models. On CUDA fused kernels compute them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns weight · x / √(mean(x²) + ε) over the last dimension, computed in float32."""
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        # With n = x · scale: d weight = Σ d·n and d x = scale · (d·weight − n · mean(d·weight·n)).
        x, weight, scale = ctx.saved_tensors
        gradient, wide = gradient.float(), weight.float()
        normal = x * scale
        product = gradient * normal
        mean = (product @ wide).div_(x.size(-1))
        d_x = (gradient * wide).addcmul_(normal, mean[..., None], value=-1).mul_(scale)
        return d_x.to(x.dtype), product.flatten(0, -2).sum(0).to(weight.dtype), None


def swiglu(both: Tensor, bias: Tensor | None = None, *_: Any) -> Tensor:
    """Returns silu(gate) · up from [..., gate and up], in the place of Megatron's bias_swiglu_impl.

    Without a bias its backward pass writes the gradient over `both`, and a second one raises a RuntimeError.
    """
    return _SwiGLU.apply(both if bias is None else both + bias)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, both):
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, gradient):
        # Over what was saved, the output of a linear layer, which nothing else needs: a tenth faster than a new tensor.
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        to_silu = gradient * up
        torch.mul(F.silu(gate), gradient, out=up)
        torch.ops.aten.silu_backward.grad_input(to_silu, gate, grad_input=gate)
        return both


ROTATION = "rotation"
"""The attribute of Megatron's configuration of a model, which has no such field, with its Rotation."""


class Rotation(NamedTuple):
    """How a model rotates queries and keys."""

    factor: float = 1.0
    """By which it multiplies what it rotates."""
    in_one_pass: bool = False
    """Whether by a kernel that torch compiles."""


_PLAIN = Rotation()


def rotated(x: Tensor, angles: Tensor, how: Rotation = _PLAIN) -> Tensor:
    """Rotates the halves of the first d elements of the last dimension, [T, 1, heads, d or more] by angles
    [T, 1, 1, d], whose halves are equal, and multiplies these elements by the factor."""
    return _Rotated.apply(x, *_factors(angles, x.dtype, how.factor), _compiled() if how.in_one_pass else _turned)


@lru_cache(maxsize=1)  # queries and keys of all layers of a pass have the same angles
def _factors(angles: Tensor, dtype: torch.dtype, factor: float) -> tuple[Tensor, Tensor]:
    """Returns the cosines and the sines, of which the first half is negative, for `_swapped`."""
    cosines, sines = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
    sines[..., : sines.size(-1) // 2].neg_()
    return cosines, sines


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cosines, sines, turn):
        ctx.save_for_backward(cosines, sines)
        ctx.turn = turn
        return turn(x, cosines, sines)

    @staticmethod
    def backward(ctx, gradient):
        cosines, sines = ctx.saved_tensors
        return ctx.turn(gradient, cosines, -sines), None, None, None


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    part = x[..., : cosines.size(-1)]
    turned = _swapped(part).mul_(sines).addcmul_(part, cosines)
    return turned if turned.size(-1) == x.size(-1) else torch.cat((turned, x[..., turned.size(-1) :]), dim=-1)


@cache
def _compiled() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return torch.compile(_turned, dynamic=True)  # rows have any number of tokens


def _swapped(x: Tensor) -> Tensor:
    """A new tensor with the halves of the last dimension exchanged."""
    return torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)
