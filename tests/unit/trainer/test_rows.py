"""Attention over rows whose sequences share a prefix, or are divided over ranks, against the formula with a mask."""

import itertools

import pytest
import torch

from areal_megatron.packing import row as rows
from areal_megatron.packing.row import TokenRow, View, divide
from areal_megatron.trainer import attention_blocks
from areal_megatron.trainer.attention import Packed
from areal_megatron.trainer.attention_blocks import attend_in_blocks, attend_with_past

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


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ROWS)
def test_runs_of_queries_and_their_keys_are_what_a_kernel_for_rows_asks_for(name, ranks, monkeypatch):
    """Kernels take runs of queries, each with keys of its own, and align the last query of a run with its last key."""
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
        kept = [x[packed.key_places].repeat_interleave(HEADS // GROUPS, 1) for x in kept]
        bounds, key_bounds = packed.boundaries.tolist(), packed.key_boundaries.tolist()
        found = torch.zeros_like(mine)
        for (first, stop), (key_first, key_stop) in zip(
            itertools.pairwise(bounds), itertools.pairwise(key_bounds), strict=True
        ):
            own = [x[key_first:key_stop] for x in kept]
            scores = torch.einsum("qhd,khd->hqk", mine[first:stop], own[0]) * 0.3
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + key_stop - key_first - (stop - first))
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            found[first:stop] = torch.einsum("hqk,khd->qhd", weights, own[1])
        own = torch.from_numpy(view.tokens)
        torch.testing.assert_close(found[own >= 0], expected[own[own >= 0]])
