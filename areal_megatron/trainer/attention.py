"""Causal attention over packed sequences with grouped queries: the trainer's only `core_attention`.

Megatron's own DotProductAttention refuses packing. A micro-batch is one row of T tokens [T, 1, ...] of whole
sequences, one after another; `Packed` says where each begins. Without `Packed` the tokens are [s, b, ...], b sequences
of the same length.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule


@dataclass
class Packed(PackedSeqParams):
    """The lengths of the sequences of a micro-batch, in their order.

    `qkv_format` stays None: with "thd" Megatron would apply rotary embeddings to each sequence in a Python loop, while
    `positions` lets it treat all tokens at once.
    """

    lengths: tuple[int, ...] = ()
    device: torch.device | str = "cpu"
    routes: torch.Tensor | None = None
    """int16 [layers, T, k]: the experts that tokens go to (trainer/routing.py), −1 where the router chooses; None if it
    chooses for all tokens."""

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [T]: the place of each token in its sequence."""
        return torch.from_numpy(np.concatenate([np.arange(n) for n in self.lengths])).to(self.device)

    @cached_property
    def boundaries(self) -> torch.Tensor:
        """int32 [sequences + 1]: the first token of each sequence, then T."""
        return torch.from_numpy(np.cumsum((0, *self.lengths), dtype=np.int32)).to(self.device)

    @cached_property
    def blocks(self) -> Blocks:
        return Blocks.of(self.lengths, self.device)


@dataclass(frozen=True)
class Blocks:
    """The sequences in a few padded blocks [rows, width], each with sequences of similar length.

    One long row would cost T² operations, one call for each sequence too many calls, and a single block would be padded
    to the longest sequence. Padding comes last in a row of a block, where causal attention hides it from all real
    tokens: it may hold anything finite, and receives no gradient.
    """

    shapes: tuple[tuple[int, int], ...]
    """(rows, width) of each block."""
    taken: torch.Tensor
    """int64 [Σ rows × width]: the token at each place of the blocks, in order."""
    padding: torch.Tensor
    """bool [Σ rows × width]: the places that hold padding."""
    place: torch.Tensor
    """int64 [T]: the place of each token in the blocks."""

    WASTE = 1.5
    """The most that the longest sequence of a block may be a multiple of the shortest."""
    SHORT = 32
    """Sequences of up to so many tokens share a block, whatever their lengths."""

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device | str) -> Blocks:
        sizes = np.asarray(lengths)
        starts = np.cumsum(sizes) - sizes
        order = np.argsort(-sizes, kind="stable")
        shapes, taken, padding = [], [], []
        first = 0
        while first < len(order):
            width = int(sizes[order[first]])
            least = 0 if width <= cls.SHORT else width / cls.WASTE
            stop = int(np.searchsorted(-sizes[order], -least, side="right"))
            rows = order[first:stop]
            column = np.arange(width)
            real = column < sizes[rows, None]
            taken.append(np.where(real, starts[rows, None] + column, starts[rows, None]).ravel())
            padding.append(~real.ravel())
            shapes.append((len(rows), width))
            first = stop
        taken, padding = np.concatenate(taken), np.concatenate(padding)
        place = np.empty(sizes.sum(), dtype=np.int64)
        place[taken[~padding]] = np.flatnonzero(~padding)
        return cls(tuple(shapes), *(torch.from_numpy(array).to(device) for array in (taken, padding, place)))


class _ToBlocks(torch.autograd.Function):
    """[T, ...] → [Σ rows × width, ...]. The backward pass selects instead of scattering: padding has no gradient."""

    @staticmethod
    def forward(ctx, tokens, blocks):
        ctx.place = blocks.place
        return tokens.index_select(0, blocks.taken)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.index_select(0, ctx.place), None


class _FromBlocks(torch.autograd.Function):
    """[Σ rows × width, ...] → [T, ...]"""

    @staticmethod
    def forward(ctx, padded, blocks):
        ctx.blocks = blocks
        return padded.index_select(0, blocks.place)

    @staticmethod
    def backward(ctx, gradient):
        padded = gradient.index_select(0, ctx.blocks.taken)
        padded[ctx.blocks.padding] = 0
        return padded, None


class CoreAttention(MegatronModule):
    """softmax(q·kᵀ/√d)·v, causal within each sequence; the tensor-parallel rank's own heads."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
        **_,
    ):
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):
        """[s, b, heads, d], [s, b, groups, d] twice → [s, b, heads × d]."""
        if packed_seq_params is None:
            out = _causal(*(x.permute(1, 2, 0, 3) for x in (query, key, value)), self.scale)
            return out.permute(2, 0, 1, 3).flatten(2)
        # The kernel behind varlen_attn has neither a CPU nor a float32 version.
        attend = _packed_varlen if query.is_cuda and query.dtype != torch.float32 else _packed_blocks
        out = attend(query.squeeze(1), key.squeeze(1), value.squeeze(1), packed_seq_params, self.scale)
        return out.flatten(1).unsqueeze(1)


def _causal(query, key, value, scale):
    """[b, heads, s, d] → the same"""
    grouped = query.size(1) != key.size(1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)


def _packed_varlen(query, key, value, packed, scale):
    """[T, heads, d] → the same"""
    from torch.nn.attention import varlen  # imports compiler machinery that a CPU does without

    starts, longest, grouped = packed.boundaries, max(packed.lengths), query.size(1) != key.size(1)
    sequences = (starts, starts, longest, longest)
    flag = {"enable_gqa": True} if grouped and _asks_for_groups(varlen.varlen_attn) else {}
    return varlen.varlen_attn(query, key, value, *sequences, scale=scale, window_size=(-1, 0), **flag)


@cache
def _asks_for_groups(attend) -> bool:
    """Whether grouped queries need a flag, as from torch 2.12 on; the kernel has always taken them."""
    return "enable_gqa" in inspect.signature(attend).parameters


def _packed_blocks(query, key, value, packed, scale):
    """[T, heads, d] → the same"""
    blocks = packed.blocks
    if len(blocks.shapes) == 1 and blocks.shapes[0][0] == 1:
        return _causal(*(x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)), scale)[0].transpose(0, 1)
    sizes = [rows * width for rows, width in blocks.shapes]
    parts = zip(*(_ToBlocks.apply(x, blocks).split(sizes) for x in (query, key, value)), strict=True)
    outs = []
    for (rows, width), part in zip(blocks.shapes, parts, strict=True):
        out = _causal(*(x.unflatten(0, (rows, width)).transpose(1, 2) for x in part), scale)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return _FromBlocks.apply(torch.cat(outs), blocks)
