"""Adds the gradient of a weight to Megatron's float32 buffer in the product that makes it, with torch alone.

megatron-core looks for this in apex's extension `fused_weight_gradient_mlp_cuda`, and refuses to build an output layer
without it even where TransformerEngine's layers bring their own.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor


def accumulate_in_products() -> None:
    """Gives megatron-core's linear layers the products below, unless apex has brought its own."""
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = _Products
        layers._grad_accum_fusion_available = True


class _Products:
    @staticmethod
    def wgrad_gemm_accum_fp32(rows: Tensor, gradient: Tensor, total: Tensor) -> None:
        """total [out, in] float32 += gradient [tokens, out]ᵀ · rows [tokens, in]"""
        wider = {} if rows.dtype == total.dtype else {"out_dtype": total.dtype}
        torch.addmm(total, gradient.t(), rows, out=total, **wider)
