"""The elementwise parts of a layer on a CPU: RMSNorm, SwiGLU and rotary embeddings, with hand-written gradients.

As many small operations, each of which reads and writes all of its activations, they take as long as the products of
small models. On CUDA fused kernels compute them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

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


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates the halves of the last dimension: [T, 1, heads, d] by angles [T, 1, 1, d], whose halves are equal."""
    return _Rotated.apply(x, *_factors(angles, x.dtype))


@lru_cache(maxsize=1)  # queries and keys of all layers of a pass have the same angles
def _factors(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the cosines and the sines, of which the first half is negative, for `_swapped`."""
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    sines[..., : sines.size(-1) // 2].neg_()
    return cosines, sines


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cosines, sines):
        ctx.save_for_backward(cosines, sines)
        return _swapped(x).mul_(sines).addcmul_(x, cosines)

    @staticmethod
    def backward(ctx, gradient):
        cosines, sines = ctx.saved_tensors
        return _swapped(gradient).mul_(sines).neg_().addcmul_(gradient, cosines), None, None


def _swapped(x: Tensor) -> Tensor:
    """A new tensor with the halves of the last dimension exchanged."""
    return torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)
