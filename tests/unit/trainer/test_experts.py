"""Experts that are multiplied together, against the same ones one after another."""

from __future__ import annotations

import pytest
import torch

from areal_megatron.trainer.experts import _Products, stacked

COUNTS = [[3, 0, 5, 1], [0, 0, 0, 7], [2, 2, 2, 2]]


def weights(count, *shape, dtype=torch.float32, device="cpu"):
    """As in Megatron's buffers: at equal distances."""
    buffer = torch.randn(count, 2, *shape, dtype=dtype, device=device)
    return [buffer[number, 0].requires_grad_() for number in range(count)]


def one_by_one(rows, counts, *matrices):
    parts = rows.split(counts)
    return torch.cat([part @ matrix.t() for part, matrix in zip(parts, matrices, strict=True)])


@pytest.mark.parametrize("counts", COUNTS)
def test_products_and_gradients_are_those_of_a_loop(counts):
    torch.manual_seed(0)
    rows, matrices = torch.randn(sum(counts), 8, requires_grad=True), weights(4, 12, 8)
    results = []
    for multiply in (_Products.apply, one_by_one):
        out = multiply(rows, counts, *matrices)
        results.append([out, *torch.autograd.grad(out.sum(), (rows, *matrices))])  # an expanded gradient
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_weights_in_one_buffer_are_not_copied():
    inside = weights(3, 4, 5)
    view = stacked(inside)
    assert view.data_ptr() == inside[0].data_ptr() and torch.equal(view, torch.stack(inside))
    apart = [torch.randn(4, 5) for _ in range(3)]
    backwards, uneven = inside[::-1], [inside[0], *weights(3, 4, 5)[1:]]
    for tensors in (apart, backwards, uneven, [inside[0], inside[2], inside[1]]):
        assert torch.equal(stacked(tensors), torch.stack(tensors))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("counts", [*COUNTS, [1000, 0, 17, 333]])
def test_products_are_those_of_a_loop_on_cuda(counts):
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    matrices = weights(4, 192, 128, dtype=torch.bfloat16, device="cuda")
    gradient, results = torch.randn(sum(counts), 192, device="cuda", dtype=torch.bfloat16), []
    for multiply in (_Products.apply, one_by_one):
        out = multiply(rows, counts, *matrices)
        results.append([out, *torch.autograd.grad(out, (rows, *matrices), gradient)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.float(), expected.float(), atol=0.25, rtol=0.02)
