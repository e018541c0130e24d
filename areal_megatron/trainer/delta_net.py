"""Gated delta nets over packed rows: the attention of a layer whose state does not grow with the sequence.

megatron-core (0.16.1) has the parameters and their checkpoints, but computes one sequence a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

from areal_megatron.packing.row import whole_sequences
from areal_megatron.trainer import hardware
from areal_megatron.trainer.attention import Packed
from areal_megatron.trainer.convolution import convolved
from areal_megatron.trainer.delta_rule import delta_rule, delta_rule_by_fla
from areal_megatron.trainer.gathered import settle
from areal_megatron.trainer.made_again import made_again
from areal_megatron.trainer.parallel import context_parallel_group


class DeltaNet(GatedDeltaNet):
    """Megatron's gated delta net of this tensor-parallel rank's own heads, with convolutions and states that begin anew
    with every sequence, or with the prefix that a sequence continues.

    Where context parallelism cuts sequences, each rank computes a share of the heads for all tokens of the row.

    What comes after the first product is not kept for the backward pass, but recomputed in it: between chunks of tokens
    it would be many times the product.
    """

    qk_dim: int
    v_dim: int
    key_head_dim: int
    value_head_dim: int
    num_value_heads: int

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Packed | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """[s, b, hidden] → the same, of b sequences; with `Packed`, b is 1, and s are the tokens of a row.

        Raises ValueError for a mask: states would take in the padding that it hides from attention.
        """
        if attention_mask is not None:
            raise ValueError("gated delta nets take packed rows, or sequences of one length, without a mask of padding")
        mixed, _ = self.in_proj(hidden_states)
        length, rows = mixed.shape[:2]
        packed = packed_seq_params or Packed(view=whole_sequences((length,) * rows), device=mixed.device)

        def inner(mixed: Tensor) -> Tensor:
            out = self._mix(mixed.transpose(0, 1).flatten(0, 1), packed)
            return out.view(rows, length, -1).transpose(0, 1).contiguous()

        settle(self.conv1d)
        if not torch.is_grad_enabled():
            return self.out_proj(inner(mixed))
        return made_again(inner, (mixed,), lambda out: self.out_proj(out)[0]), None

    def _mix(self, mixed: Tensor, packed: Packed) -> Tensor:
        """[T, queries, keys, values, gates, strengths and decays of the heads] → [T, values]"""
        keys, values, heads = (size // self.tp_size for size in (self.qk_dim, self.v_dim, self.num_value_heads))
        mixed, gate, strength, decay = mixed.split((2 * keys + values, values, heads, heads), -1)
        filters, log, bias = self.conv1d.weight[:, 0], self.A_log, self.dt_bias
        if packed.view.cut:
            sections = (keys, keys, values)
            mixed, strength, decay = _by_heads((*mixed.split(sections, -1), strength, decay), packed)
            filters = torch.cat([*map(_own_share, filters.split(sections))])
            log, bias = _own_share(log), _own_share(bias)
        mixed = F.silu(convolved(mixed, filters, packed.earlier)).to(gate.dtype)
        out = self._read(mixed, -log.float().exp() * F.softplus(decay.float() + bias), strength, packed)
        if packed.view.cut:
            out = _by_tokens(out, packed)
        out = self._apply_gated_norm(out.view(-1, self.value_head_dim), gate.reshape(-1, self.value_head_dim))
        return out.view(len(gate), values)

    def _read(self, mixed: Tensor, decay: Tensor, strength: Tensor, packed: Packed) -> Tensor:
        """Returns what the tokens of whole sequences read, [tokens, values]."""
        values = decay.size(-1) * self.value_head_dim
        keys = (mixed.size(-1) - values) // 2
        query, key, value = mixed.split((keys, keys, values), -1)
        dtype = str(mixed.dtype).removeprefix("torch.")
        inputs = (
            query.unflatten(-1, (-1, self.key_head_dim)),
            key.unflatten(-1, (-1, self.key_head_dim)),
            value.unflatten(-1, (-1, self.value_head_dim)),
            decay,
            strength.sigmoid().float(),
        )
        if hardware.lacks("delta_rule", hardware.found(mixed.device), dtype):
            return delta_rule(*inputs, packed.chunks).flatten(1)
        return delta_rule_by_fla(*inputs, packed.stages).flatten(1)


def _own_share(parameter: Tensor) -> Tensor:
    """Returns the rows of the heads that this context-parallel rank computes."""
    group = context_parallel_group()
    return parameter.chunk(group.size())[group.rank()]


def _by_heads(parts: Sequence[Tensor], packed: Packed) -> tuple[Tensor, Tensor, Tensor]:
    """Exchanges this context-parallel rank's tokens for a share of the heads of all tokens of the row.

    [T, width] each → [tokens of the row, width / cp] each, the first three parts side by side.
    """
    group = context_parallel_group()
    rows = torch.cat([part.unflatten(-1, (group.size(), -1)) for part in parts], -1)
    rows = all_to_all(group, rows.transpose(0, 1).contiguous()).flatten(0, 1).index_select(0, packed.gathered)
    *mixed, strength, decay = (part.size(-1) // group.size() for part in parts)
    return rows.split((sum(mixed), strength, decay), -1)


def _by_tokens(out: Tensor, packed: Packed) -> Tensor:
    """Undoes `_by_heads`: [tokens of the row, width / cp] → [T, width]."""
    group = context_parallel_group()
    rows = out.new_zeros(group.size() * packed.view.length, out.size(-1)).index_copy(0, packed.gathered, out)
    return all_to_all(group, rows.unflatten(0, (group.size(), -1))).transpose(0, 1).flatten(1)
