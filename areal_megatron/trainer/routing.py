"""Routing replay: the trainer sends each token through the experts that the engine chose for it.

The routers of trainer and engine compute with different kernels, so that a token near a decision boundary may go to
different experts; the ratio of its probabilities then reflects numerics instead of policies (Ma et al., arXiv
2510.11370). Only the choice is replayed: the weights of the chosen experts are the trainer's, so that routers keep
learning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from areal_megatron.config import ConfigError
from areal_megatron.data.trajectory import Trajectory

UNKNOWN = -1
"""The number of no expert: the router chooses."""


@dataclass(frozen=True)
class Routing:
    """The dimensions of a model's routes."""

    layers: int
    experts: int
    chosen: int
    """The number of experts that a layer sends a token to (k)."""

    @classmethod
    def of(cls, config: TransformerConfig) -> Routing | None:
        if not config.num_moe_experts:
            return None
        return cls(config.num_layers, config.num_moe_experts, config.moe_router_topk)

    def joined(self, trajectories: Sequence[Trajectory]) -> np.ndarray | None:
        """Returns the routes of all tokens, int16 [tokens, layers, k], or None if no token has any.

        They are UNKNOWN at tokens without routes. Raises ConfigError for routes of another model.
        """
        if not any(len(t.routes) for t in trajectories):
            return None
        joined = np.full((sum(t.length for t in trajectories), self.layers, self.chosen), UNKNOWN, np.int16)
        start = 0
        for t in trajectories:
            rows, rest = divmod(len(t.routes), self.layers * self.chosen)
            if rest or rows > t.length or t.routes.max(initial=0) >= self.experts:
                raise ConfigError(
                    f"trajectory {t.uid}: {len(t.routes)} expert numbers for {t.length} tokens are of another "
                    f"model: this one has {self.layers} layers that choose {self.chosen} of {self.experts}"
                )
            joined[start : start + rows] = t.routes.reshape(rows, self.layers, self.chosen)
            start += t.length
        return joined


class RouteOverride:
    """Megatron's `router_replay` of one router: its top-k function for all tokens of this rank."""

    def __init__(self):
        self.routes: Tensor | None = None
        """int16 [tokens of this rank, k] for the next forward pass; None if the router chooses."""

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.routes is None:
            return values, chosen
        replayed = self.routes.to(scores.device, non_blocking=True).long()
        chosen = torch.where(replayed == UNKNOWN, chosen, replayed)
        return scores.gather(1, chosen), chosen


def replay_routes(chunk: GPTModel) -> None:
    """Makes the chunk's layers with experts use the routes of the micro-batch (`Packed.routes`) in each forward pass.

    This includes the pass that recomputes activations, which is given the same micro-batch whatever the schedule.
    """
    for layer in chunk.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            number, replay = layer.layer_number - 1, layer.mlp.router.router_replay
            layer.register_forward_pre_hook(
                partial(_set, number=number, replay=replay, sharded=chunk.config.sequence_parallel), with_kwargs=True
            )


def _set(
    _layer: Any, _inputs: Any, options: dict[str, Any], *, number: int, replay: RouteOverride, sharded: bool
) -> None:
    packed = options.get("packed_seq_params")
    replay.routes = None if packed is None or packed.routes is None else packed.routes[number]
    if sharded and replay.routes is not None:
        group = parallel_state.get_tensor_model_parallel_group()
        replay.routes = replay.routes.chunk(group.size())[group.rank()]
