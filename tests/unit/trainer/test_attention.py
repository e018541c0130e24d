"""Attention of packed sequences asks torch for what the torch that is there knows."""

import inspect

import pytest
import torch
from torch.nn.attention import varlen

from areal_megatron.packing.row import whole_sequences
from areal_megatron.trainer.attention import Packed, _packed_varlen
from areal_megatron.trainer.attention_blocks import attend_in_blocks

LENGTHS = (5, 1, 7)


def attend(query, key, value, starts, _starts, _longest, _longest_key, scale):
    packed = Packed(view=whole_sequences(starts.diff().tolist()))
    return attend_in_blocks(query, key, value, packed, scale)


def of_torch_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    assert window_size == (-1, 0)
    return attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale)


def of_torch_2_13(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    if key.size(1) != query.size(1) and not enable_gqa:
        raise ValueError("key has fewer heads; set enable_gqa")
    return of_torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


@pytest.mark.parametrize("function", [of_torch_2_11, of_torch_2_13])
@pytest.mark.parametrize("groups", [2, 4])
def test_grouped_queries_are_asked_for_where_torch_wants_that(monkeypatch, function, groups):
    """The functions have torch's signatures; the kernel behind them runs on GPUs alone (tests marked gpu)."""
    monkeypatch.setattr(varlen, "varlen_attn", function)
    torch.manual_seed(0)
    query, key, value = (torch.randn(sum(LENGTHS), heads, 8) for heads in (4, groups, groups))
    packed = Packed(view=whole_sequences(LENGTHS))
    expected = attend_in_blocks(query, key, value, packed, 0.3)
    assert torch.equal(_packed_varlen(query, key, value, packed, 0.3), expected)


@pytest.mark.parametrize(
    ("lengths", "copied"),
    [((4, 4, 4), False), ((6,), False), ((60, 40, 40, 1), True), ((5, 9), True), ((5, 5, 4), True)],
)
def test_blocks_attend_as_each_sequence_alone(lengths, copied):
    """Sequences of equal length are a block as they are."""
    torch.manual_seed(0)
    leaves = [torch.randn(sum(lengths), heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    packed = Packed(view=whole_sequences(lengths))
    alone = [
        torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in part), is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        for part in zip(*(leaf.split(lengths) for leaf in leaves), strict=True)
    ]
    found = [attend_in_blocks(*leaves, packed, None), torch.cat(alone)]
    torch.testing.assert_close(*found)
    slope = torch.randn_like(found[0])
    torch.testing.assert_close(*(torch.autograd.grad(out, leaves, slope) for out in found))
    assert packed.blocks.are_row is not copied
    assert (packed.blocks.fill(leaves[0]) is leaves[0]) is not copied


def test_the_torch_that_is_here_has_what_the_call_needs():
    assert {"scale", "window_size"} <= set(inspect.signature(varlen.varlen_attn).parameters)
