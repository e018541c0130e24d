"""Gated delta nets over packed rows, against the recurrence and the convolution of each sequence by itself."""

import pytest
import torch
import torch.nn.functional as F

from areal_megatron.packing.row import TokenRow, View, divide
from areal_megatron.trainer.attention import Packed
from areal_megatron.trainer.convolution import convolved
from areal_megatron.trainer.delta_net import DeltaNet
from areal_megatron.trainer.delta_rule import Chunks, Stage, delta_rule, delta_rule_by_fla
from tests.support.delta_oracle import gated_delta_rule

ROWS = {
    "one": ((1,), ()),
    "short": ((3, 1, 2), ()),
    "whole-chunks": ((64, 128), ()),
    "nine": ((7, 64, 100, 1, 130, 2, 65, 63, 3), ()),
    "a-prefix": ((70, 5, 1, 130, 9), (-1, 0, 0, 0, -1)),
    "prefixes": ((1, 2, 66, 64, 3, 200, 4, 1), (-1, 0, 0, -1, 3, 3, -1, 6)),
}
"""The lengths of the segments of a row, and which segment each one continues."""
HEADS, GROUPS, KEY, VALUE = 4, 2, 8, 6


def packed_row(lengths, prefixes, multiple=16):
    """Returns a row with filler at its end, and for each of its sequences the places of all its tokens, with how many
    of them are of the prefix."""
    row = TokenRow.of(lengths, prefixes)
    view = View(row, divide(row, 1, multiple), 0)
    sequences = []
    for segment, prefix in enumerate(row.prefixes):
        own = torch.arange(row.starts[segment], row.starts[segment + 1])
        before = torch.arange(row.starts[prefix], row.starts[prefix + 1]) if prefix >= 0 else own[:0]
        sequences.append((torch.cat((before, own)), len(before)))
    return Packed(view=view), sequences


def exact(q, k, v, g, beta):
    q, k = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (q, k))
    return gated_delta_rule(q, k, v, g, beta)[0]


def close(found, wanted):
    return (found - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize("name", ROWS)
def test_states_begin_anew_with_every_sequence(name):
    packed, sequences = packed_row(*ROWS[name])
    tokens, random = packed.view.length, torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(tokens, *shape, generator=random, dtype=torch.float64)

    decay = -16 * torch.rand(tokens, HEADS, generator=random, dtype=torch.float64) ** 6
    inputs = [normal(GROUPS, KEY), normal(GROUPS, KEY), normal(HEADS, VALUE), decay, normal(HEADS).sigmoid()]
    weight = normal(HEADS, VALUE)
    weight[sum(ROWS[name][0]) :] = 0
    theirs = [x.clone().requires_grad_() for x in inputs]
    ours = [x.float().requires_grad_() for x in inputs]
    out = delta_rule(*ours, packed.chunks)
    (out * weight).sum().backward()
    total = 0.0
    for places, before in sequences:
        wanted = exact(*(x[places] for x in theirs))[before:]
        assert close(out[places[before:]], wanted)
        total = total + (wanted * weight[places[before:]]).sum()
    total.backward()
    for mine, own in zip(ours, theirs, strict=True):
        assert close(mine.grad, own.grad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ROWS)
def test_the_kernels_of_fla_compute_the_same(name, device="cuda", dtype=torch.bfloat16, rounding=0.02):
    pytest.importorskip("fla")
    packed, _ = packed_row(*ROWS[name])
    tokens, random = packed.view.length, torch.Generator().manual_seed(1)
    shapes = [(GROUPS, 64), (GROUPS, 64), (HEADS, 64), (HEADS,), (HEADS,)]
    *inputs, decay, strength = (torch.randn(tokens, *shape, generator=random) for shape in shapes)
    inputs = [*(x.to(device, dtype) for x in inputs), -decay.exp().to(device), strength.sigmoid().to(device)]
    fused, plain = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    runs = *packed.view.whole_runs, device
    found = delta_rule_by_fla(*fused, Stage.all_of(*runs))
    wanted = delta_rule(*plain, Chunks.of(*runs))
    gradient = torch.randn(found.shape, generator=random).to(found)
    found.backward(gradient)
    wanted.backward(gradient)
    for ours, theirs in ((found, wanted), *((x.grad, y.grad) for x, y in zip(fused, plain, strict=True))):
        assert (ours.float() - theirs.float()).norm() <= rounding * theirs.float().norm()


def test_padded_rows_are_refused():
    padded, mask = torch.zeros(4, 2, 8), torch.ones(2, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"^gated delta nets take packed rows, or sequences of one length, .*padding$"):
        DeltaNet.forward(torch.nn.Module(), padded, mask)


@pytest.mark.parametrize("name", ROWS)
def test_convolutions_begin_anew_with_every_sequence(name):
    packed, sequences = packed_row(*ROWS[name])
    random = torch.Generator().manual_seed(2)
    x, out_weight = torch.randn(2, packed.view.length, 5, generator=random)
    kernel = torch.randn(5, 4, generator=random)
    out_weight[sum(ROWS[name][0]) :] = 0
    ours = [x.clone().requires_grad_(), kernel.clone().requires_grad_()]
    theirs = [x.clone().requires_grad_(), kernel.clone().requires_grad_()]
    out = convolved(*ours, packed.earlier)
    (out * out_weight).sum().backward()
    total = 0.0
    for places, before in sequences:
        wanted = F.conv1d(F.pad(theirs[0][places].T, (3, 0)), theirs[1][:, None], groups=5).T[before:]
        torch.testing.assert_close(out[places[before:]], wanted)
        total = total + (wanted * out_weight[places[before:]]).sum()
    total.backward()
    for mine, own in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, own.grad)
