"""What trainers replace in megatron-core 0.16.1 on every device; trainer/cpu.py has what a machine without CUDA needs.

`apply` runs when the package of the trainer is imported, before any model is built.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import layers
from megatron.core.utils import local_multi_tensor_l2_norm
from torch import Tensor

from areal_megatron.process.patching import patch
from areal_megatron.trainer.experts import permute
from areal_megatron.trainer.host_optimizer import HostOptimizer


def apply() -> None:
    """Replaces all of them. Raises RuntimeError if megatron-core lacks one of the names."""
    routing = sys.modules["megatron.core.transformer.moe.moe_utils"]
    vars(routing).setdefault("te_general_gemm", None)  # its callers check for None without TransformerEngine
    # Latent attention believes that TransformerEngine is there, and looks for its classes.
    engine = sys.modules["megatron.core.extensions.transformer_engine"]
    patch(sys.modules["megatron.core.transformer.multi_latent_attention"], "HAVE_TE", engine.HAVE_TE)
    # Gated delta nets believe that they need a library for GPUs; trainer/delta_net.py computes without it, too.
    patch(sys.modules["megatron.core.ssm.gated_delta_net"], "HAVE_FLA", True)
    # Its default fp8=False is not None, which it treats as a request for FP8, and that needs TransformerEngine.
    recomputation = sys.modules["megatron.core.tensor_parallel.random"].CheckpointWithoutOutput
    patch(recomputation.__init__, "__defaults__", (None,))
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        # Without TransformerEngine and apex, Megatron takes the norm of each tensor to the host.
        patch(clip_grads, "l2_norm_impl", _norm)
    for of in ("megatron.core.optimizer", "megatron.core.optimizer.distrib_optimizer"):
        patch(sys.modules[of], "HybridDeviceOptimizer", HostOptimizer)
    # Megatron's waits twice for the device.
    patch(sys.modules["megatron.core.transformer.moe.token_dispatcher"], "permute", permute)
    # It would advise CUDA_DEVICE_MAX_CONNECTIONS=1, which run/gpu_settings.py refuses.
    patch(layers.linear_with_grad_accumulation_and_async_allreduce, "warned", True)


def accumulate_in_products() -> None:
    """Makes linear layers add a weight's gradient to its float32 buffer in the product that computes it.

    megatron-core looks for this in apex's extension `fused_weight_gradient_mlp_cuda`, and refuses to build an output
    layer without it even where TransformerEngine's layers bring their own.
    """
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = _Products  # not there without apex
        patch(layers, "_grad_accum_fusion_available", True)


class _Products:
    @staticmethod
    def wgrad_gemm_accum_fp32(rows: Tensor, gradient: Tensor, total: Tensor) -> None:
        """total [out, in] float32 += gradient [tokens, out]ᵀ · rows [tokens, in]"""
        wider: dict[str, Any] = {} if rows.dtype == total.dtype else {"out_dtype": total.dtype}
        torch.addmm(total, gradient.t(), rows, out=total, **wider)


def _norm(_: int, __: Tensor, lists: list[list[Tensor]], *___: Any) -> tuple[Tensor, None]:
    """Returns the norm of all tensors as one, [1]."""
    return torch.stack(torch._foreach_norm(lists[0])).norm().unsqueeze(0), None
