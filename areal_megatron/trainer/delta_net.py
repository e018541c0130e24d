"""Gated delta nets over packed rows: the attention of a layer whose state does not grow with the sequence.

megatron-core (0.16.1) has the parameters and their checkpoints, but computes one sequence a row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from torch import Tensor

from areal_megatron.packing.row import whole_sequences
from areal_megatron.trainer import hardware
from areal_megatron.trainer.attention import Packed
from areal_megatron.trainer.convolution import convolved
from areal_megatron.trainer.delta_rule import delta_rule, delta_rule_by_fla
from areal_megatron.trainer.gathered import settle
from areal_megatron.trainer.made_again import made_again


class DeltaNet(GatedDeltaNet):
    """Megatron's gated delta net of this tensor-parallel rank's own heads, with convolutions and states that begin anew
    with every sequence, or with the prefix that a sequence continues.

    What comes after the first product is not kept for the backward pass, but recomputed in it: between chunks of tokens
    it would be many times the product.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Packed | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """[s, b, hidden] → the same, of b sequences; with `Packed`, b is 1, and s are the tokens of a row."""
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
        mixed = F.silu(convolved(mixed, self.conv1d.weight[:, 0], packed.earlier)).to(mixed.dtype)
        query, key, value = mixed.split((keys, keys, values), -1)
        by_fla = not hardware.lacks("delta_rule", hardware.found(mixed.device), str(mixed.dtype).removeprefix("torch."))
        read, runs = (delta_rule_by_fla, packed.stages) if by_fla else (delta_rule, packed.chunks)
        out = read(
            query.unflatten(-1, (-1, self.key_head_dim)),
            key.unflatten(-1, (-1, self.key_head_dim)),
            value.unflatten(-1, (-1, self.value_head_dim)),
            -self.A_log.float().exp() * F.softplus(decay.float() + self.dt_bias),
            strength.sigmoid().float(),
            runs,
        )
        return self._apply_gated_norm(out, gate.reshape(out.shape)).view(len(mixed), -1)
