"""Routing replay: the trainer sends each token through the experts that the engine chose for it.

The routers of trainer and engine compute with different kernels, so that a token near a decision boundary may go to
different experts; the ratio of its probabilities then reflects numerics instead of policies (Ma et al., arXiv
2510.11370). Only the choice is replayed: the weights of the chosen experts are the trainer's, so that routers keep
learning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from areal_megatron.data.routes import UNKNOWN, Routing
from areal_megatron.trainer.parallel import tensor_parallel_group


def routing_of(config: TransformerConfig) -> Routing | None:
    if not config.num_moe_experts:
        return None
    kinds = config.moe_layer_freq
    dense = kinds.count(0) if isinstance(kinds, list) else 0
    return Routing(config.num_layers, config.num_moe_experts, config.moe_router_topk, dense)


class RouteOverride:
    """Megatron's `router_replay` of one router: its top-k function for all tokens of this rank."""

    def __init__(self):
        self.routes: Tensor | None = None
        """int16 [tokens of this rank, k] for the next forward pass; None if the router chooses."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[[Tensor, int], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        limited = scores
        if num_groups and group_topk:
            limited = scores.masked_fill(~in_best_groups(scores, num_groups, group_topk), -torch.inf)
        values, chosen = default_compute_topk(limited, topk)
        if self.routes is None:
            return values, chosen
        replayed = self.routes.to(scores.device, non_blocking=True).long()
        chosen = torch.where(replayed == UNKNOWN, chosen, replayed)
        return scores.gather(1, chosen), chosen


@torch.no_grad()
def in_best_groups(scores: Tensor, groups: int, chosen: int) -> Tensor:
    """Returns a bool mask [tokens, experts] of the experts in a token's `chosen` best groups of consecutive experts. A
    group ranks by the sum of its two best scores (DeepSeek-V3, arXiv 2412.19437, Section 2.1.2, and its published
    code).

    Megatron sums over the number of experts that each group would give if all gave equally many: two for DeepSeek-V3,
    other numbers elsewhere.
    """
    by_group = scores.unflatten(1, (groups, -1))
    best = by_group.topk(2, dim=-1).values.sum(-1).topk(chosen, dim=-1).indices
    kept = torch.zeros(by_group.shape[:2], dtype=torch.bool, device=scores.device).scatter(1, best, True)
    return kept.unsqueeze(-1).expand_as(by_group).flatten(1)


def move_biases(chunks: Sequence[DistributedDataParallel]) -> None:
    """Moves the bias of every router towards an even load of its experts, by moe_router_bias_update_rate of
    megatron-core up or down. The load comes from the forward passes with gradients since the last call; all tokens
    count, prompts included. Collective, unless the rate is 0.
    """
    rate, routers = chunks[0].config.moe_router_bias_update_rate, list(_biased(chunks))
    if rate and routers:
        loads, biases = (torch.stack(each) for each in zip(*routers, strict=True))
        for (_, bias), moved in zip(routers, get_updated_expert_bias(loads, biases, rate), strict=True):
            bias.copy_(moved)
    forget_load(chunks)


def balances(config: TransformerConfig) -> bool:
    """Returns whether every token that is trained moves the routers, towards an even load of their experts."""
    by_bias = config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate
    return bool(config.num_moe_experts and (config.moe_aux_loss_coeff or by_bias))


def forget_load(chunks: Sequence[DistributedDataParallel]) -> None:
    """Has the loads of experts count from here."""
    for load, _ in _biased(chunks):
        load.zero_()


def _biased(chunks: Sequence[DistributedDataParallel]) -> Iterator[tuple[Tensor, Tensor]]:
    """The load that each router with a bias has counted, and the bias."""
    if not chunks[0].config.num_moe_experts:
        return  # looking through all modules takes milliseconds, in every step
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, TopKRouter) and module.enable_expert_bias:
            yield module.get_buffer("local_tokens_per_expert"), module.get_buffer("expert_bias")


def replay_routes(chunk: GPTModel) -> None:
    """Makes the chunk's layers with experts use the routes of the micro-batch (`Packed.routes`) in each forward pass.

    This includes the pass that recomputes activations, which is given the same micro-batch whatever the schedule.
    """
    for layer in chunk.decoder.layers:
        assert isinstance(layer, TransformerLayer)
        if isinstance(layer.mlp, MoELayer):
            router = layer.mlp.router
            assert isinstance(router, TopKRouter) and isinstance(router.router_replay, RouteOverride)
            number, replay = layer.layer_number - 1, router.router_replay
            layer.register_forward_pre_hook(
                partial(_set, number=number, replay=replay, sharded=chunk.config.sequence_parallel), with_kwargs=True
            )


def _set(
    _layer: Any, _inputs: Any, options: dict[str, Any], *, number: int, replay: RouteOverride, sharded: bool
) -> None:
    packed = options.get("packed_seq_params")
    replay.routes = None if packed is None or packed.routes is None else packed.routes[number]
    if sharded and replay.routes is not None:
        group = tensor_parallel_group()
        replay.routes = replay.routes.chunk(group.size())[group.rank()]
