"""The elementwise parts of a layer against plain formulas, with gradients by autograd in float64."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from areal_megatron.trainer import elementwise
from areal_megatron.trainer.elementwise import Rotation, rms_norm, rotated, swiglu

CUDA = torch.cuda.is_available()

SHAPES = {"hidden": (7, 1, 48), "heads": (5, 1, 3, 16), "one token": (1, 1, 8)}


def check(ours, plain, inputs, dtype):
    """Values and gradients of `ours` in `dtype` are those of `plain` in float64."""
    error = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    found, expected = ours(*leaves), plain(*exact)
    assert found.dtype == dtype
    slope = torch.randn(expected.shape).to(dtype)
    found.backward(slope)
    expected.backward(slope.double())
    pairs = [(found, expected), *((a.grad, b.grad) for a, b in zip(leaves, exact, strict=True))]
    for ours_is, plain_is in ((a.detach(), b.detach()) for a, b in pairs):
        scale = float(plain_is.abs().max()) or 1.0
        assert float((ours_is.double() - plain_is).abs().max()) < error * max(scale, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rms_norm(shape, dtype):
    torch.manual_seed(0)
    inputs = [torch.randn(shape), 1 + torch.randn(shape[-1])]
    check(
        lambda x, w: rms_norm(x, w, 1e-3),
        lambda x, w: w * x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt(),
        inputs,
        dtype,
    )


def test_rms_norm_of_a_token_that_is_zero():
    x = torch.zeros(2, 8, requires_grad=True)
    out = rms_norm(x, torch.ones(8), 1e-6)
    out.sum().backward()
    assert torch.equal(out, torch.zeros(2, 8))
    torch.testing.assert_close(x.grad, torch.full((2, 8), 1e3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_swiglu(shape, dtype):
    torch.manual_seed(1)

    def plain(both):
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up

    check(swiglu, plain, [torch.randn(shape)], dtype)


def test_swiglu_has_one_backward_pass():
    both = torch.randn(3, 1, 8, requires_grad=True)
    out = swiglu(both * 1)
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation(dtype):
    torch.manual_seed(2)
    angles = torch.outer(torch.arange(9.0), torch.rand(8))
    angles = torch.cat((angles, angles), -1)[:, None, None]
    plain = [lambda x: _apply_rotary_pos_emb_bshd(x, angles.double()), lambda x: complex_rotation(x, angles[..., :8])]
    for formula in plain:
        check(lambda x: rotated(x, angles), formula, [torch.randn(9, 1, 3, 16)], dtype)
    projection = torch.randn(9, 1, 3, 40)
    check(lambda x: rotated(x[..., 8:24], angles), lambda x: plain[1](x[..., 8:24]), [projection], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_of_a_part_by_a_factor(dtype):
    torch.manual_seed(3)
    angles = torch.outer(torch.arange(9.0), torch.rand(4))
    angles = torch.cat((angles, angles), -1)[:, None, None]
    check(
        lambda x: rotated(x, angles, Rotation(factor=1.25)),
        lambda x: torch.cat((1.25 * complex_rotation(x[..., :8], angles[..., :4]), x[..., 8:]), -1),
        [torch.randn(9, 1, 3, 16)],
        dtype,
    )


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="no CUDA")])]
)
def test_rotation_in_one_pass(device, monkeypatch):
    """On CPU without a code generator, which needs a C++ compiler there: of what is traced."""
    if device == "cpu":
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        elementwise._compiled.cache_clear()
    torch.manual_seed(4)
    for tokens, heads, size in ((9, 3, 16), (17, 2, 16), (300, 1, 24)):
        angles = torch.outer(torch.arange(float(tokens)), torch.rand(8))
        angles = torch.cat((angles, angles), -1)[:, None, None].to(device)
        inputs = [torch.randn(tokens, 1, heads, size, device=device)]
        turn = partial(rotated, angles=angles)
        check(partial(turn, how=Rotation(in_one_pass=True)), turn, inputs, torch.float32)
    elementwise._compiled.cache_clear()


def complex_rotation(x, angles):
    first, second = x.chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles).double(), angles.double())
    return torch.cat((turned.real, turned.imag), -1)
