"""Which kernels which hardware gets, and that megatron-core agrees to the switches."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from packaging.requirements import Requirement
from torch.utils._python_dispatch import TorchDispatchMode

from areal_megatron.config import ConfigError
from areal_megatron.models.table import Dimensions
from areal_megatron.run import versions
from areal_megatron.run.extras import EXTRAS
from areal_megatron.trainer import hardware
from areal_megatron.trainer.attention_kernels import FASTEST
from areal_megatron.trainer.hardware import KERNELS, PACKAGES, Hardware, fusions, lacks

ROOT = Path(__file__).resolve().parents[3]

TORCH = {"triton", "a C compiler", "torch.addmm with out_dtype", "torch.nn.functional.grouped_mm"}
TE, FA3, FA4, DEEP_EP, FLA = "TransformerEngine", "flash_attn_interface", "flash_attn.cute", "deep_ep", "fla-core 0.6"
PLAIN = {"swiglu", "gradients", "rotary", "fa2"}
"""What torch alone brings on any GPU from Ampere on."""


@pytest.mark.parametrize(("there", "enough"), [("0.5.9", False), ("0.6.0", True), ("0.10.1", True), (None, False)])
def test_an_older_fla_is_none(monkeypatch, there, enough):
    monkeypatch.setattr(versions, "_installed", {"fla-core": there}.get)
    monkeypatch.setattr(versions, "_can_import", lambda module: module == "fla")
    assert versions.has_fla() == enough


@pytest.mark.parametrize(
    ("major", "has", "dtype", "expected"),
    [
        (0, set(), "bfloat16", set()),
        (8, TORCH, "bfloat16", PLAIN),
        (9, TORCH, "bfloat16", {*PLAIN, "experts"}),
        (9, TORCH, "float16", PLAIN),
        (9, TORCH, "float32", {"swiglu", "rotary"}),
        (9, {*TORCH, TE, FA3, FA4, DEEP_EP, FLA}, "bfloat16", set(KERNELS)),
        (10, {*TORCH, TE, FA3, FA4, DEEP_EP, FLA}, "bfloat16", set(KERNELS) - {"fa3"}),
        (9, {*TORCH, FLA}, "float32", {"swiglu", "rotary"}),
        (8, {*TORCH, TE, FA3, FA4}, "bfloat16", {*PLAIN, "permutation"}),
        (9, TORCH - {"a C compiler"}, "bfloat16", {"gradients", "fa2", "experts"}),
        (7, {*TORCH, TE}, "float16", set()),
    ],
)
def test_each_hardware_gets_what_it_has(major, has, dtype, expected):
    assert {name for name in KERNELS if not lacks(name, Hardware(major, frozenset(has)), dtype)} == expected


@pytest.mark.parametrize(
    ("name", "hardware", "dtype", "reason"),
    [
        ("swiglu", Hardware(0, frozenset()), "bfloat16", "there is no GPU"),
        ("swiglu", Hardware(9, frozenset({"triton"})), "bfloat16", "a C compiler is missing"),
        ("swiglu", Hardware(9, frozenset()), "bfloat16", "triton is missing and a C compiler is missing"),
        ("fa3", Hardware(10, frozenset({FA3})), "bfloat16", "it is not written for GPUs of compute capability 10"),
        ("experts", Hardware(9, frozenset(TORCH)), "float16", "it does not compute in float16"),
    ],
)
def test_a_missing_kernel_has_a_reason(name, hardware, dtype, reason):
    assert lacks(name, hardware, dtype) == reason


def test_this_machine_is_looked_at_without_a_gpu():
    assert set(hardware.kernels(torch.device("cpu"), "bfloat16").values()) == {"there is no GPU"}


def test_dense_models_have_no_switches_for_experts():
    absent = dict.fromkeys(KERNELS, "") | {"permutation": "TransformerEngine is missing"}
    expected = {"bias_activation_fusion": True, "gradient_accumulation_fusion": True}
    assert fusions(absent, experts=False) == expected
    assert fusions(absent, experts=True) == expected | {"moe_permute_fusion": False}


def test_a_dispatcher_without_its_package_is_refused():
    absent = {"deep_ep": "deep_ep is missing"}
    hardware.check_dispatch("alltoall", absent)
    hardware.check_dispatch("flex", {"deep_ep": ""})
    with pytest.raises(ConfigError, match=r"trainer\.expert_dispatch: flex needs DeepEP, and deep_ep is missing"):
        hardware.check_dispatch("flex", absent)


def test_one_line_says_what_is_used_and_what_is_not():
    dense = Dimensions(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=16, vocabulary=32)
    sparse = replace(dense, experts=4)
    absent = dict.fromkeys(KERNELS, "") | {"rotary": "triton is missing", "experts": "no reason"}
    assert hardware.describe(absent, dense, grouped=False) == (
        "SwiGLU in one pass, products that add to float32 gradients; "
        "without rotary embeddings in one pass (triton is missing)"
    )
    line = hardware.describe(absent, sparse, grouped=False)
    assert "one product for all experts (no reason)" in line and "\n" not in line
    assert line.endswith("; experts are multiplied one by one, in a loop")
    assert "one product for all experts" not in hardware.describe(absent, sparse, grouped=True)
    assert "rotary" not in hardware.describe(absent, replace(dense, latent=2), grouped=False)
    absent |= {"delta_rule": "fla is missing"}
    assert "gated delta" not in hardware.describe(absent, dense, grouped=False)
    line = hardware.describe(absent, replace(dense, linear=(0,)), grouped=False)
    assert line.endswith(", gated delta nets in a few passes (fla is missing)")
    half = {name: lacks(name, Hardware(9, frozenset(TORCH)), "float16") for name in KERNELS}
    assert hardware.describe(half, sparse, grouped=False).endswith(
        "one product for all experts (it does not compute in float16); experts are multiplied one by one, in a loop"
    )


class Computed(TorchDispatchMode):
    """Notes what is computed."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(str(function))
        return function(*arguments, **(options or {}))


def test_the_residual_is_one_addition_without_bias_dropout_fusion():
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add  # once areal_megatron.trainer replaced it

    x, residual = torch.randn(8, 4, requires_grad=True), torch.randn(8, 4)
    with Computed() as computed:
        get_bias_dropout_add(training=True, fused=False)((x, None), residual, 0.0)
    assert computed.names == ["aten.add.Tensor"]


def gated(x, weight=None):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up if weight is None else F.silu(gate) * up * weight


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("rows", [[128, 77, 1, 4096, 128]], ids=["lengths-that-change"])
@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu_is_the_formula_on_cuda(rows, weighted):
    """Compiled, for rows of any length. The formula is in float32, from the same bfloat16 numbers."""
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, weighted_bias_swiglu_impl

    for count in rows:
        x = torch.randn(count, 192, device="cuda", dtype=torch.bfloat16)
        probability, gradient = torch.rand(count, 1, device="cuda"), torch.randn(count, 96, device="cuda").bfloat16()
        leaves = [x.clone().requires_grad_(), probability.clone().requires_grad_()]
        plain = [x.float().requires_grad_(), probability.clone().requires_grad_()]
        used = slice(None) if weighted else slice(1)
        fused = weighted_bias_swiglu_impl(leaves[0], None, leaves[1]) if weighted else bias_swiglu_impl(leaves[0], None)
        expected = gated(*plain[used])
        assert fused.dtype == torch.bfloat16
        torch.testing.assert_close(fused.float(), expected, atol=0.02, rtol=0.02)
        found = torch.autograd.grad(fused, leaves[used], gradient)
        for ours, right in zip(found, torch.autograd.grad(expected, plain[used], gradient.float()), strict=True):
            torch.testing.assert_close(ours.float(), right, atol=0.05, rtol=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_added_in_float32_on_cuda(dtype):
    from areal_megatron.trainer.patches import _Products

    rows, gradient = (torch.randn(300, size, device="cuda", dtype=dtype) for size in (64, 96))
    total = torch.randn(96, 64, device="cuda")
    expected = total.double() + gradient.double().t() @ rows.double()
    _Products.wgrad_gemm_accum_fp32(rows, gradient, total)
    torch.testing.assert_close(total.double(), expected, atol=1e-3, rtol=1e-5)
    before = total.clone()
    _Products.wgrad_gemm_accum_fp32(rows[:0], gradient[:0], total)  # an expert without tokens
    assert torch.equal(total, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_permutation_of_transformer_engine_is_the_plain_one():
    pytest.importorskip("transformer_engine.pytorch")
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    chosen = torch.rand(100, 8, device="cuda").topk(2).indices
    routes = torch.zeros(100, 8, device="cuda", dtype=torch.bool).scatter(1, chosen, True)
    tokens, probs = torch.randn(100, 64, device="cuda", requires_grad=True), torch.rand(100, 8, device="cuda")
    results = []
    for fused in (True, False):
        rows, weights, order = permute(tokens, routes, probs=probs * routes, num_out_tokens=200, fused=fused)
        back = unpermute(rows * weights[:, None], order, tokens.shape, routing_map=routes, fused=fused)
        results.append((rows, weights, back, *torch.autograd.grad(back.square().sum(), tokens)))
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("major", [9, 10])
def test_the_gpu_lock_file_has_what_attention_prefers(major):
    """The packages of all kernels that Hopper and Blackwell take first and a package index has, and what they need."""
    held = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements-gpu.lock").read_text(), re.M))
    assert set(PACKAGES) >= {need for name in FASTEST[major] for need in KERNELS[name].needs}
    packages = {PACKAGES[need] for name in FASTEST[major] for need in KERNELS[name].needs} - {""}
    assert packages == {"flash-attn-4"} <= held.keys()
    assert held.keys() >= {"nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "quack-kernels", "torch-c-dlpack-ext"}
    [ours] = map(Requirement, EXTRAS["fa4"])
    assert ours.specifier.contains(held[ours.name], prereleases=True)
