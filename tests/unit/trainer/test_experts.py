"""Experts that are multiplied together, against the same ones one after another."""

from __future__ import annotations

import pytest
import torch

from areal_megatron.trainer.experts import _Products, permute, stacked

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


def chosen_tokens(count, experts, k):
    """Probabilities [count, experts] of the k experts that each token chose, 0 of the others."""
    probs = torch.rand(count, experts, dtype=torch.double)
    chosen = torch.zeros_like(probs, dtype=torch.bool).scatter(1, probs.topk(k).indices, True)
    return chosen, (probs * chosen).requires_grad_()


@pytest.mark.parametrize(("count", "experts", "k"), [(50, 8, 2), (1, 4, 4), (0, 4, 2), (30, 4, 1)])
def test_tokens_come_in_the_order_of_their_experts(count, experts, k):
    torch.manual_seed(count)
    chosen, probs = chosen_tokens(count, experts, k)
    tokens = torch.randn(count, 3, dtype=torch.double, requires_grad=True)
    wanted = [token for expert in range(experts) for token in range(count) if chosen[token, expert]]
    weights = [probs[token, expert] for expert in range(experts) for token in range(count) if chosen[token, expert]]
    rows, permuted, order = permute(tokens, chosen, probs, num_out_tokens=count * k)
    assert order.tolist() == wanted and permuted.tolist() == [float(weight) for weight in weights]
    assert torch.equal(rows, tokens[wanted])
    if count:
        torch.autograd.gradcheck(lambda *a: permute(a[0], chosen, a[1], num_out_tokens=count * k)[:2], (tokens, probs))
    without, none, _ = permute(tokens, chosen, num_out_tokens=count * k)
    assert torch.equal(without, rows) and none is None


def test_a_number_of_rows_that_the_host_does_not_know_is_left_to_megatron():
    torch.manual_seed(0)
    chosen, probs = chosen_tokens(20, 4, 2)
    chosen[3] = False  # dropped
    tokens = torch.randn(20, 3, dtype=torch.double)
    rows, permuted, order = permute(tokens, chosen, probs, num_out_tokens=chosen.sum())
    assert len(rows) == len(permuted) == 38 and 3 not in order


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tokens_are_put_in_order_on_cuda_without_waiting():
    chosen, probs = chosen_tokens(500, 16, 3)
    tokens = torch.randn(500, 8, dtype=torch.double)
    expected = permute(tokens, chosen, probs, num_out_tokens=1500)
    given = [each.detach().cuda() for each in (tokens, chosen, probs)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = permute(*given, num_out_tokens=1500)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result.cpu(), wanted)
