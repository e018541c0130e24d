"""Causal attention over packed rows with grouped queries: the trainer's only `core_attention`.

Megatron's own DotProductAttention refuses packing. A micro-batch is one row of whole sequences; with context
parallelism each rank has a part of its tokens, and keys and values of the others are gathered. `Packed` says which
tokens attend to which. Without `Packed` the tokens are [s, b, ...], b sequences of the same length.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from areal_megatron.packing.row import View, whole_sequences
from areal_megatron.trainer.attention_blocks import Blocks, PastBlock, attend_in_blocks, attend_with_past
from areal_megatron.trainer.convolution import Earlier
from areal_megatron.trainer.copies import to_device
from areal_megatron.trainer.delta_rule import Chunks, Stage
from areal_megatron.trainer.made_again import not_kept
from areal_megatron.trainer.parallel import context_parallel_group


@dataclass
class Packed(PackedSeqParams):
    """What this context-parallel rank has of a micro-batch, on its device.

    `qkv_format` stays None: with "thd" Megatron would apply rotary embeddings to each sequence in a Python loop, while
    `positions` lets it treat all tokens at once.
    """

    view: View = field(default_factory=lambda: whole_sequences((1,)))
    device: torch.device | str = "cpu"
    routes: Tensor | None = None
    """int16 [layers, T, k]: the experts that this rank's T tokens go to (trainer/routing.py), −1 where the router
    chooses; None if it chooses for all tokens."""
    _earlier: dict[int, Earlier] = field(default_factory=dict)

    @cached_property
    def positions(self) -> Tensor:
        """int64 [T]: the place of each token in its sequence."""
        return to_device(self.view.positions, self.device)

    @cached_property
    def boundaries(self) -> Tensor:
        """int32 [runs + 1]: the first token of each run of queries, then T."""
        return to_device(np.cumsum((0, *self.view.sizes), dtype=np.int32), self.device)

    @cached_property
    def key_boundaries(self) -> Tensor:
        """int32 [runs + 1]: the first of the keys that each run attends to, among all in `key_places`."""
        return to_device(np.cumsum((0, *self.view.key_counts), dtype=np.int32), self.device)

    @cached_property
    def key_places(self) -> Tensor:
        """int64: for each run, the places of the keys that its last token attends to, in order."""
        return to_device(self.view.key_places, self.device)

    @cached_property
    def blocks(self) -> Blocks:
        return Blocks.of(self.view.sizes, self.device)

    @cached_property
    def gathered(self) -> Tensor:
        """int64: the place of each token of the row among all context-parallel ranks' tokens."""
        return to_device(self.view.gathered, self.device)

    @cached_property
    def chunks(self) -> Chunks:
        return Chunks.of(*self.view.whole_runs, self.device)

    @cached_property
    def stages(self) -> list[Stage]:
        return Stage.all_of(*self.view.whole_runs, self.device)

    def earlier(self, back: int) -> Earlier:
        """Where tokens find the one `back` places before them."""
        if back not in self._earlier:
            self._earlier[back] = Earlier.of(*self.view.whole_runs, back, self.device)
        return self._earlier[back]

    @property
    def own_keys(self) -> slice:
        """The place of this rank's own tokens among its keys."""
        return slice(self.view.first_key, self.view.first_key + self.view.length)

    @cached_property
    def pasts(self) -> list[PastBlock]:
        return PastBlock.all_of(self.view.pasts, self.device)


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
        """[s, b, heads, d], [s, b, groups, d], [s, b, groups, v] → [s, b, heads × v], v being no more than d.

        With `Packed`, b is 1, and Megatron's latent attention leaves that axis out.
        """
        width = value.size(-1)
        if width < query.size(-1):  # kernels take values as wide as keys
            value = F.pad(value, (0, query.size(-1) - width))
        if packed_seq_params is None:
            query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = _causal(query, key, value, self.scale)
            return out.permute(2, 0, 1, 3)[..., :width].flatten(2)
        query, key, value = (x.flatten(0, -3) for x in (query, key, value))
        out = attend(query, key, value, packed_seq_params, self.scale)
        return out[..., :width].flatten(1).unsqueeze(1)


def attend(query: Tensor, key: Tensor, value: Tensor, packed: Packed, scale: float | None) -> Tensor:
    """Returns the attention of this rank's tokens: [T, heads, d], [T, groups, d] twice → [T, heads, d].

    Keys and values of other context-parallel ranks, and keys and values shared by several runs, are not kept for the
    backward pass but recomputed, so a rank keeps no more than its own tokens' share.
    """
    by_varlen = _has_varlen(query)
    if not packed.view.pasts and not packed.view.cut:
        return (_packed_varlen if by_varlen else attend_in_blocks)(query, key, value, packed, scale)

    def reached(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if packed.view.cut:
            key, value = _gathered(key, value)
        if by_varlen:
            key, value = key.index_select(0, packed.key_places), value.index_select(0, packed.key_places)
        return key, value

    made, own = reached(key, value), (key.detach(), value.detach())
    with not_kept(made, lambda: reached(*own)):
        return (_packed_varlen if by_varlen else attend_with_past)(query, *made, packed, scale)


def _has_varlen(query: Tensor) -> bool:
    """Whether the kernel behind varlen_attn takes these: it has neither a CPU nor a float32 version."""
    return query.is_cuda and query.dtype != torch.float32


def _gathered(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values of all context-parallel ranks, in the order of the ranks: [cp × T, groups, d] each."""
    both = torch.cat((key, value), -1).contiguous()
    group = context_parallel_group()
    gathered = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=group)
    return gathered.split((key.size(-1), value.size(-1)), -1)


def _causal(query, key, value, scale):
    """[b, heads, s, d] → the same"""
    grouped = query.size(1) != key.size(1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)


def _packed_varlen(query, key, value, packed, scale):
    """[T, heads, d] → the same. Each run of queries attends to its keys, the last query to all of them."""
    view = packed.view
    runs = (packed.boundaries, packed.key_boundaries, max(view.sizes), max(view.key_counts))
    return attend_runs(query, key, value, *runs, scale)


def attend_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    key_boundaries: Tensor,
    longest: int,
    most_keys: int,
    scale: float | None,
) -> Tensor:
    """Returns the attention of runs of queries to runs of keys by torch's kernel, on CUDA in half precision.

    [queries, heads, d], [keys, groups, d] twice → [queries, heads, d]. A run is from one of the boundaries, int32
    [runs + 1], to the next. Its last query attends to all of its keys, each query before that to one less.
    """
    from torch.nn.attention import varlen  # imports compiler machinery that a CPU does without

    runs, grouped = (boundaries, key_boundaries, longest, most_keys), query.size(1) != key.size(1)
    flag: dict[str, Any] = {"enable_gqa": True} if grouped and _asks_for_groups(varlen.varlen_attn) else {}
    found = varlen.varlen_attn(query, key, value, *runs, scale=scale, window_size=(-1, 0), **flag)
    return cast(Tensor, found)  # a pair only where more is asked for


@cache
def _asks_for_groups(attend) -> bool:
    """Whether grouped queries need a flag, as from torch 2.12 on; the kernel has always taken them."""
    return "enable_gqa" in inspect.signature(attend).parameters
