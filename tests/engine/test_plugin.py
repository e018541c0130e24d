"""What the plugin changes in vLLM on CPU computes the same as torch."""

import os

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
def test_fused_norms_compute_what_torch_does(dtype):
    from vllm import ir

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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("adapters", [[0] * 7, [-1] * 7, [2, 2, -1, 0, 0, 2, 1]], ids=str)
def test_each_token_gets_its_own_adapter_or_none(dtype, adapters):
    """Two layers of widths 24 and 8 that one layer fuses, of three adapters of rank 4."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    subject = PunicaWrapperCPU(64, 8, "cpu")
    subject._update_prefill_metadata(torch.tensor(adapters))
    subject.is_prefill = True
    torch.manual_seed(0)
    x, out = torch.randn(7, 16, dtype=dtype), torch.randn(7, 32, dtype=dtype)
    downs = [torch.randn(3, 1, 4, 16, dtype=dtype) / 8 for _ in range(2)]
    ups = [torch.randn(3, 1, size, 4, dtype=dtype) / 8 for size in (24, 8)]
    expected = out.double()
    for token, adapter in enumerate(adapters):
        if adapter >= 0:
            inner = [down[adapter, 0].double() @ x[token].double() for down in downs]
            expected[token] += torch.cat([up[adapter, 0].double() @ own for up, own in zip(ups, inner, strict=True)])
    subject.add_lora_linear(out, x, tuple(downs), tuple(ups), 1.0, (24, 8))
    assert_close(out, expected)


@pytest.fixture
def vllm_config():
    """What vLLM's layers look up when they are made."""
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_every_head_is_rotated_as_in_transformers(vllm_config, dtype, interleaved):
    """Latent attention passes queries [tokens, heads, d] and one key [tokens, 1, d], all others [tokens, heads × d]."""
    import transformers
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf
    from vllm.model_executor.layers.rotary_embedding import get_rope

    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = transformers.DeepseekV3Config(
        qk_rope_head_dim=16, head_dim=16, max_position_embeddings=64, rope_parameters=rope
    )
    torch.manual_seed(0)
    positions = torch.randperm(64)[:33]
    query, key = torch.randn(33, 4, 16, dtype=dtype), torch.randn(33, 1, 16, dtype=dtype)
    cos, sin = hf.DeepseekV3RotaryEmbedding(config)(query.double(), positions[None])
    rotate = hf.apply_rotary_pos_emb_interleave if interleaved else hf.apply_rotary_pos_emb
    rotated = rotate(*(x.double().transpose(0, 1)[None] for x in (query, key)), cos, sin)
    expected = [x[0].transpose(0, 1) for x in rotated]
    if interleaved:  # transformers leaves the halves of each head where vLLM has pairs
        expected = [torch.stack(x.chunk(2, -1), -1).flatten(-2) for x in expected]
    subject = get_rope(16, 64, not interleaved, rope_parameters=rope, dtype=dtype)
    for flat in (False, True):
        given = (x.clone().flatten(1) if flat else x.clone() for x in (query, key))
        found = subject.forward_cpu(positions, *given)
        for own, wanted in zip(found, expected, strict=True):
            assert_close(own.view(wanted.shape), wanted)


def test_weights_of_convolutions_are_packed_for_their_kernel(vllm_config):
    """The short convolution of a gated delta net, whose kernel takes the weight to be packed, for a prompt of 50."""
    from types import SimpleNamespace

    import transformers
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("vLLM packs weights of convolutions on CPUs with AVX-512 BF16 only")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "layer_types": ["linear_attention"], "intermediate_size": 64}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32}
    torch.manual_seed(0)
    oracle = Qwen3NextGatedDeltaNet(transformers.Qwen3NextConfig(**sizes, **heads, linear_value_head_dim=32), 0).conv1d
    oracle.bfloat16()
    x = torch.randn(50, oracle.in_channels, dtype=torch.bfloat16)
    layer = SimpleNamespace(weight=torch.nn.Parameter(oracle.weight.detach().clone()))
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    found = _custom_ops.causal_conv1d_fwd_cpu(
        x=x.transpose(0, 1),
        weight=layer.weight.detach(),
        bias=None,
        conv_states=torch.zeros(1, 3, oracle.in_channels, dtype=torch.bfloat16).transpose(1, 2),
        query_start_loc=torch.tensor([0, 50], dtype=torch.int32),
        cache_indices=torch.zeros(1, dtype=torch.int32),
        has_initial_state=torch.zeros(1, dtype=torch.bool),
        silu_activation=True,
        is_weight_packed=True,
    ).transpose(0, 1)
    with torch.no_grad():
        expected = F.silu(oracle.double()(x.double().T[None])[0, :, :50]).T
    assert_close(found, expected)


def test_linear_layers_compute_from_the_weight_that_updates_are_written_into():
    from types import SimpleNamespace

    from vllm.model_executor.layers import utils

    layer = SimpleNamespace(weight=torch.nn.Parameter(torch.randn(8, 8), requires_grad=False))
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert layer.cpu_linear is F.linear and layer.weight.shape == (8, 8)


def test_a_model_is_looked_at_in_the_process_that_computes_with_it():
    from vllm.model_executor.models import registry

    assert registry._run_in_subprocess(os.getpid) == os.getpid()
