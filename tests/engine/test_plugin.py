"""What the plugin changes in vLLM on CPU computes the same as torch."""

import pytest
import torch
import torch.nn.functional as F

from areal_megatron.engine import plugin

EPSILON = 1e-6
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


@pytest.fixture(scope="module", autouse=True)
def registered():
    plugin.register()


def rms(x, weight):
    """Returns the norm, computed in float64."""
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()


def assert_close(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[found.dtype], atol=TOLERANCE[found.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_fused_kernels_compute_what_torch_does(dtype):
    from vllm import ir
    from vllm.model_executor.layers.activation import SiluAndMul

    torch.manual_seed(0)
    norms, fused = ir.ops.rms_norm.impls["areal"], ir.ops.fused_add_rms_norm.impls["areal"]
    x, residual = torch.randn(2, 33, 128, dtype=dtype)
    weight, head = torch.randn(128, dtype=dtype), torch.randn(32, dtype=dtype)
    assert_close(norms.impl_fn(x, weight, EPSILON), rms(x, weight))
    heads = torch.randn(33, 512, dtype=dtype)[:, 128:384].view(33, 8, 32)  # a part of a row, as the queries of qkv are
    assert_close(norms.impl_fn(heads, head, EPSILON), rms(heads, head))
    added = x.double() + residual.double()
    normed, kept = fused.impl_fn(x, residual, weight, EPSILON)
    assert_close(kept, added)
    assert_close(normed, rms(added, weight))
    gate, up = torch.randn(2, 33, 48, dtype=dtype)
    assert_close(SiluAndMul.forward_cpu(None, torch.cat((gate, up), -1)), F.silu(gate.double()) * up.double())


def test_what_the_kernels_do_not_support_is_left_to_vllm():
    from vllm import ir

    impls = [ir.ops.rms_norm.impls["areal"], ir.ops.fused_add_rms_norm.impls["areal"]]
    x, weight = torch.ones(2, 32), torch.ones(32)
    alone, added = ((x, weight, EPSILON), (x, x, weight, EPSILON))
    for impl, (*inputs, given, epsilon) in zip(impls, (alone, added), strict=True):
        assert impl.supports_args(*inputs, given, epsilon)
        assert not impl.supports_args(*inputs, None, epsilon)
        assert not impl.supports_args(*inputs, given.double(), epsilon)
        assert not impl.supports_args(*inputs, given, epsilon, 16)
    assert not impls[1].supports_args(x.T.contiguous().T, x, weight, EPSILON)
