"""Attention over rows whose sequences share a prefix, or are divided over ranks, against the formula with a mask."""

import pytest
import torch
from torch.nn.attention import varlen

from areal_megatron.packing import row as rows
from areal_megatron.packing.row import TokenRow, View, divide
from areal_megatron.trainer import attention, attention_blocks, made_again
from areal_megatron.trainer.attention import Packed
from areal_megatron.trainer.attention_blocks import attend_in_blocks, attend_with_past
from areal_megatron.trainer.attention_kernels import plain

ROWS = {
    "one": TokenRow.of((70,)),
    "several": TokenRow.of((33, 5, 70, 40, 1, 17)),
    "answers": TokenRow.of((20, 9, 30, 2, 64, 11, 8), (-1, 0, 0, 0, -1, 4, 4)),
    "answers and others": TokenRow.of((5, 50, 3, 3, 70, 1, 12), (-1, -1, 1, 1, -1, 4, -1)),
}
HEADS, GROUPS, SIZE = 4, 2, 16


def by_mask(row: TokenRow, query, key, value, scale):
    """The attention of the whole row, from a mask that says which token attends to which."""
    segment = torch.repeat_interleave(torch.arange(len(row.lengths)), torch.tensor(row.lengths))
    prefix = torch.tensor(row.prefixes)[segment]
    same = segment[:, None] == segment
    before = torch.arange(len(segment))[:, None] >= torch.arange(len(segment))
    mask = (same & before) | (prefix[:, None] == segment)
    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), value)


def inputs(tokens: int):
    torch.manual_seed(0)
    shapes = ((tokens, HEADS, SIZE), (tokens, GROUPS, SIZE), (tokens, GROUPS, SIZE))
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def on_ranks(row: TokenRow, division, query, key, value, scale):
    """The attention of the whole row, computed by each rank of `division` for its own tokens."""
    views = [View(row, division, rank) for rank in range(len(division.runs))]
    local = [[take(x, view.tokens) for x in (query, key, value)] for view in views]
    out = torch.zeros_like(query)
    for rank, view in enumerate(views):
        packed = Packed(view=view)
        mine, *kept = local[rank]
        if view.cut:
            kept = [torch.cat([parts[number] for parts in local]) for number in (1, 2)]
        attend = attend_with_past if view.pasts or view.cut else attend_in_blocks
        own = torch.from_numpy(view.tokens)
        out = out.index_add(0, own[own >= 0], attend(mine, *kept, packed, scale)[own >= 0])
    return out


def take(values, places):
    places = torch.from_numpy(places)
    return values.index_select(0, places.clamp(min=0)) * (places >= 0)[:, None, None]


@pytest.mark.parametrize("kernel", ["cpu", "formula"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ROWS)
def test_attention_and_gradients_are_those_of_the_mask(name, ranks, kernel, monkeypatch):
    monkeypatch.setattr(rows, "LEAST_CUT", 3)
    monkeypatch.setattr(rows, "WORTH_GATHERING", -1.0)
    if kernel == "formula":  # what devices use that have neither kernel
        monkeypatch.setattr(attention_blocks, "_fused", lambda query: False)
    row = ROWS[name]
    division = divide(row, ranks, 2)
    assert division.cut == (ranks > 1)
    given = inputs(sum(row.lengths))
    expected = by_mask(row, *given, 0.3)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), given)
    found = on_ranks(row, division, *given, 0.3)
    gradients = torch.autograd.grad((found * weights).sum(), given)
    precision = {"rtol": 1e-4, "atol": 1e-5} if kernel == "formula" else {}  # which computes in float32
    torch.testing.assert_close(found, expected, **precision)
    torch.testing.assert_close(gradients, wanted, **precision)


def by_runs(query, key, value, starts, key_starts, longest, most_keys, *, scale, window_size, enable_gqa=True):
    """The formula of torch's varlen_attn, whose kernel runs on GPUs alone (tests marked gpu)."""
    runs = list(zip(starts.diff().tolist(), key_starts.diff().tolist(), strict=True))
    assert window_size == (-1, 0) and [max(column) for column in zip(*runs, strict=True)] == [longest, most_keys]
    return plain(query, key, value, runs, scale)


class KeepsItsInputs(torch.autograd.Function):
    """by_runs, keeping query, keys and values for the backward pass as kernels do."""

    @staticmethod
    def forward(ctx, query, key, value, arguments, options):
        ctx.save_for_backward(query, key, value)
        ctx.arguments, ctx.options = arguments, options
        return by_runs(query, key, value, *arguments, **options)

    @staticmethod
    def backward(ctx, gradient):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = by_runs(*inputs, *ctx.arguments, **ctx.options)
        return *torch.autograd.grad(out, inputs, gradient), None, None


@pytest.mark.parametrize("name", ["answers", "answers and others"])
def test_keys_of_a_kernel_for_rows_are_made_again_in_the_backward_pass(name, monkeypatch):
    monkeypatch.setattr(attention, "_has_varlen", lambda query: True)
    monkeypatch.setattr(
        varlen, "varlen_attn", lambda q, k, v, *arguments, **options: KeepsItsInputs.apply(q, k, v, arguments, options)
    )
    row = ROWS[name]
    view = View(row, divide(row, 1, 1), 0)
    given = inputs(sum(row.lengths))
    expected = by_mask(row, *given, 0.3)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), given)
    kept, pack = [], made_again._Again.pack
    monkeypatch.setattr(made_again._Again, "pack", lambda self, x: kept.append(pack(self, x)) or kept[-1])
    found = attention.attend(*given, Packed(view=view), 0.3)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad((found * weights).sum(), given), wanted)
    assert [isinstance(x, torch.Tensor) for x in kept] == [True, False, False]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ROWS)
def test_runs_of_queries_and_their_keys_are_what_a_kernel_for_rows_asks_for(name, ranks, monkeypatch):
    """Kernels take runs of queries, each with keys of its own, and align the last query of a run with its last key."""
    monkeypatch.setattr(varlen, "varlen_attn", by_runs)
    monkeypatch.setattr(rows, "LEAST_CUT", 3)
    monkeypatch.setattr(rows, "WORTH_GATHERING", -1.0)
    row = ROWS[name]
    division = divide(row, ranks, 2)
    query, key, value = inputs(sum(row.lengths))
    expected = by_mask(row, query, key, value, 0.3)
    views = [View(row, division, rank) for rank in range(ranks)]
    for view in views:
        packed = Packed(view=view)
        mine = take(query, view.tokens)
        kept = [torch.cat([take(x, other.tokens) for other in views]) for x in (key, value)]
        if not view.cut:
            kept = [take(x, view.tokens) for x in (key, value)]
        kept = [x[packed.key_places] for x in kept]
        found = attention._packed_varlen(mine, *kept, packed, 0.3)
        own = torch.from_numpy(view.tokens)
        torch.testing.assert_close(found[own >= 0], expected[own[own >= 0]])
