"""Attention of a packed row on devices without a kernel for rows of sequences: sequences in a few padded blocks.

Keys before a run of tokens (a shared prompt, the earlier part of a sequence divided over ranks) take a second softmax,
over these keys alone; both are merged by the logarithms of their sums. So nothing is computed that a mask would hide,
and no key is copied for each run that attends to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal_megatron.packing.row import Past
from areal_megatron.trainer.copies import to_device


@dataclass(frozen=True)
class Blocks:
    """Runs of tokens in a few padded blocks [rows, width], each with runs of similar length.

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
    are_row: bool
    """Whether the blocks are the row as it is, as of runs of the same length: nothing is copied then."""

    WASTE = 1.5
    """The most that the longest sequence of a block may be a multiple of the shortest."""
    SHORT = 32
    """Sequences of up to this number of tokens share a block, whatever their lengths."""

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
        places = (to_device(array, device) for array in (taken, padding, place))
        return cls(tuple(shapes), *places, are_row=np.array_equal(taken, np.arange(len(taken))))

    def fill(self, tokens: Tensor) -> Tensor:
        """[T, ...] → [Σ rows × width, ...]"""
        return tokens if self.are_row else _ToBlocks.apply(tokens, self)

    def take(self, places: Tensor) -> Tensor:
        """[Σ rows × width, ...] → [T, ...]"""
        return places if self.are_row else _FromBlocks.apply(places, self)

    def cut(self, places: Tensor) -> list[Tensor]:
        """[Σ rows × width, heads, d] → for each block [rows, heads, width, d]"""
        parts = places.split([rows * width for rows, width in self.shapes])
        return [part.unflatten(0, shape).transpose(1, 2) for part, shape in zip(parts, self.shapes, strict=True)]

    @staticmethod
    def join(parts: Sequence[Tensor]) -> Tensor:
        """What `cut` has cut."""
        joined = [part.transpose(1, 2).flatten(0, 1) for part in parts]
        return joined[0] if len(joined) == 1 else torch.cat(joined)


@dataclass(frozen=True)
class PastBlock:
    """A few pasts of similar sizes, and the queries that attend to them, padded to the longest: b pasts of k keys, each
    with q queries."""

    keys: Tensor
    """int64 [b, k]: the place of each key; at padding, the first key's."""
    hidden: Tensor | None
    """float32 [b, 1, 1, k]: −∞ at padding, else 0; None if no key is padding."""
    queries: Tensor
    """int64 [b, q]: the place of each query; at padding, the first query's."""
    padding: Tensor
    """bool [b, 1, q]: the queries that are padding."""
    tokens: Tensor
    """int64 [n]: the place of each query that is none, in order"""
    real: Tensor
    """int64 [n]: where it is among b · q."""

    @classmethod
    def of(cls, pasts: Sequence[Past], device: torch.device | str) -> PastBlock:
        keys, no_keys = _padded([past.keys for past in pasts])
        queries, no_queries = _padded([past.queries for past in pasts])
        real = np.flatnonzero(~no_queries)
        hidden = np.where(no_keys, -np.inf, 0.0).astype(np.float32)[:, None, None] if no_keys.any() else None
        arrays = (queries, no_queries[:, None], queries.ravel()[real], real)
        return cls(
            to_device(keys, device),
            None if hidden is None else to_device(hidden, device),
            *(to_device(array, device) for array in arrays),
        )

    @classmethod
    def all_of(cls, pasts: Sequence[Past], device: torch.device | str) -> list[PastBlock]:
        """Returns blocks of pasts whose numbers of keys and of queries are at most WASTE times the others'."""
        found, left = [], sorted(pasts, key=lambda past: (-len(past.keys), -len(past.queries)))
        while left:
            alike = [_alike(past, left[0]) for past in left]
            found.append(cls.of([past for past, same in zip(left, alike, strict=True) if same], device))
            left = [past for past, same in zip(left, alike, strict=True) if not same]
        return found

    def queried(self, tokens: Tensor) -> Tensor:
        """[T, heads, d] → [b, heads, q, d]"""
        return tokens.index_select(0, self.queries.view(-1)).unflatten(0, self.queries.shape).transpose(1, 2)

    def known(self, keys: Tensor) -> Tensor:
        """[keys, groups, d] → [b, groups, k, d]"""
        return keys.index_select(0, self.keys.view(-1)).unflatten(0, self.keys.shape).transpose(1, 2)

    def back(self, found: Tensor) -> Tensor:
        """[b, heads, q, d] → [n, heads, d]"""
        return found.transpose(1, 2).flatten(0, 1).index_select(0, self.real)


def _alike(past: Past, other: Past) -> bool:
    counts = zip((past.keys, past.queries), (other.keys, other.queries), strict=True)
    pairs = [sorted((max(len(one), Blocks.SHORT), max(len(two), Blocks.SHORT))) for one, two in counts]
    return all(more <= Blocks.WASTE * less for less, more in pairs)


def _padded(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows as one array [rows, longest], each filled up with its first element, and where it is filled."""
    sizes = np.array([len(row) for row in rows])
    filled = np.arange(sizes.max()) >= sizes[:, None]
    padded = np.repeat(np.array([row[0] for row in rows])[:, None], sizes.max(), 1)
    padded[~filled] = np.concatenate(rows)
    return padded, filled


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


def attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, packed, scale: float | None) -> Tensor:
    """Returns the attention of each run of the row to itself: [T, heads, d], [T, groups, d] twice → [T, heads, d]."""
    blocks, grouped = packed.blocks, query.size(1) != key.size(1)
    outs = [
        F.scaled_dot_product_attention(*block, is_causal=True, scale=scale, enable_gqa=grouped)
        for block in zip(*(blocks.cut(blocks.fill(x)) for x in (query, key, value)), strict=True)
    ]
    return blocks.take(blocks.join(outs))


def attend_with_past(query: Tensor, key: Tensor, value: Tensor, packed, scale: float | None) -> Tensor:
    """Returns the attention of each run of the row to itself and to its past.

    [T, heads, d], [keys of the view, groups, d] twice → [T, heads, d]
    """
    return _AttendWithPast.apply(query, key, value, packed, scale)


class _AttendWithPast(torch.autograd.Function):
    """With the sums of both softmaxes known, each part has the gradient of a softmax over all of its keys: each part's
    backward pass takes the merged output and the merged logarithm of the sums."""

    @staticmethod
    def forward(ctx, query, key, value, packed, scale):
        blocks, own = packed.blocks, packed.own_keys
        parts = zip(*(blocks.cut(blocks.fill(x)) for x in (query, key[own], value[own])), strict=True)
        found = [_softmax(q, k, v, True, scale) for q, k, v in parts]
        out = blocks.take(blocks.join([out for out, _ in found]))
        total = blocks.take(blocks.join([total.unsqueeze(-1) for _, total in found]))
        for past in packed.pasts:
            past_out, past_total = _softmax(
                past.queried(query), past.known(key), past.known(value), False, scale, past.hidden
            )
            past_out, past_total = past.back(past_out), past.back(past_total.unsqueeze(-1))
            own_total = total.index_select(0, past.tokens)
            merged = torch.logaddexp(own_total, past_total)
            own_out = out.index_select(0, past.tokens) * (own_total - merged).exp()
            out.index_copy_(0, past.tokens, (own_out + past_out * (past_total - merged).exp()).to(out.dtype))
            total.index_copy_(0, past.tokens, merged)
        ctx.packed, ctx.scale = packed, scale
        ctx.save_for_backward(query, key, value, out, total)
        return out

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, out, total = ctx.saved_tensors
        blocks, own, scale = ctx.packed.blocks, ctx.packed.own_keys, ctx.scale
        d_query = torch.zeros_like(query)
        d_key, d_value = torch.zeros_like(key), torch.zeros_like(value)
        filled = (blocks.fill(x) for x in (gradient, query, key[own], value[own], out, total))
        gradient_, query_, key_, value_, out_, total_ = filled
        gradient_ = gradient_.masked_fill(blocks.padding[:, None, None], 0)
        total_ = total_.masked_fill(blocks.padding[:, None, None], torch.inf)  # padding has attended to nothing
        parts = zip(*(blocks.cut(x) for x in (gradient_, query_, key_, value_, out_, total_)), strict=True)
        slopes = (_softmax_backward(g, q, k, v, o, t.squeeze(-1), True, scale) for g, q, k, v, o, t in parts)
        found = zip(*slopes, strict=True)
        for to, parts in zip((d_query, d_key[own], d_value[own]), found, strict=True):
            to += blocks.take(blocks.join(parts))
        for past in ctx.packed.pasts:
            # Padding has attended to nothing, and neither has nor gives a gradient.
            gradient_, total_ = past.queried(gradient), past.queried(total).squeeze(-1)
            gradient_ = gradient_.masked_fill(past.padding.unsqueeze(-1), 0)
            total_ = total_.masked_fill(past.padding, torch.inf)
            known = (past.queried(query), past.known(key), past.known(value), past.queried(out), total_)
            found = _softmax_backward(gradient_, *known, False, scale, past.hidden)
            places = (past.queries, past.keys, past.keys)
            for to, at, part in zip((d_query, d_key, d_value), places, found, strict=True):
                to.index_add_(0, at.view(-1), part.transpose(1, 2).flatten(0, 1))
        return d_query, d_key, d_value, None, None


def _fused(query: Tensor) -> bool:
    """Whether torch has a kernel that returns the sum of the softmax, and takes it."""
    return query.device.type == "cpu"


def _softmax(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the attention [b, heads, q, d] and the logarithm of the softmax's sum, float32 [b, heads, q].

    `hidden` is added to the scores.
    """
    if _fused(query):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=None if hidden is None else hidden.to(query.dtype), scale=scale
        )
    scores = _scores(query, key, causal, scale, hidden)
    groups = query.size(1) // key.size(1)
    return scores.softmax(-1).to(value.dtype) @ value.repeat_interleave(groups, 1), scores.logsumexp(-1)


def _softmax_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    total: Tensor,
    causal: bool,
    scale: float | None,
    hidden: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value; `total` is the logarithm of the sum over all keys."""
    if _fused(query):
        mask = None if hidden is None else hidden.to(query.dtype)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, total.contiguous(), 0.0, causal, attn_mask=mask, scale=scale
        )
    groups = query.size(1) // key.size(1)
    weights = (_scores(query, key, causal, scale, hidden) - total.unsqueeze(-1)).exp()
    d_weights = gradient.float() @ value.repeat_interleave(groups, 1).float().mT
    d_scores = (
        weights * (d_weights - (gradient * out).float().sum(-1, keepdim=True)) * (scale or query.size(-1) ** -0.5)
    )
    d_key = (d_scores.mT @ query.float()).unflatten(1, (-1, groups)).sum(2)
    d_value = (weights.mT @ gradient.float()).unflatten(1, (-1, groups)).sum(2)
    d_query = d_scores @ key.repeat_interleave(groups, 1).float()
    return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype)


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float | None, hidden: Tensor | None) -> Tensor:
    """float32 [b, heads, q, k]; −inf where a causal query does not attend"""
    scores = query.float() @ key.repeat_interleave(query.size(1) // key.size(1), 1).float().mT
    scores *= scale or query.size(-1) ** -0.5
    if hidden is not None:
        scores += hidden
    if causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores
