"""Advantages without a critic: how far the return of an answer is above a baseline. For those with one, see critic.py.

Every token of an answer has the same advantage. An episode of several answers counts once in means over a group or over
episodes, however many it has: each counts for its share. A batch, a group, and even an episode may be spread over
replicas: `reduce` sums a float64 tensor over all of them. Answers without trained tokens are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_megatron.config.algorithms import ROUNDING

EPSILON = 1e-5
"""Added to standard deviations, as published: small ones do not make large advantages."""
Reduce = Callable[[Tensor], Tensor]
"""Reduces a float64 CPU tensor over all replicas, element by element; every replica calls it."""


@dataclass(frozen=True)
class Rewards:
    """The returns of a replica's n answers, and what advantages need beside them.

    The answers of one trajectory count as one where they have the same return.
    """

    values: Tensor
    """float64 [n]: the return of each answer; the reward of its episode, where the answers have none of their own."""
    trained: Tensor
    """int64 [n]: the number of its trained tokens."""
    group: Tensor
    """int64 [n]: the number of its group, from 0."""
    groups: int
    """The number of groups in the whole batch."""
    episode: Tensor
    """int64 [n]: the number of its episode, from 0."""
    episodes: int
    """The number of episodes in the whole batch."""


def batch_tokens(rewards: Rewards, reduce: Reduce) -> Tensor:
    """(r − mean) / (deviation + ε) over the batch, each trained token counting once (AReaL, Section 5)."""
    return normalised(rewards.values, rewards.trained.double(), reduce)


def batch_sequences(rewards: Rewards, reduce: Reduce) -> Tensor:
    """(r − mean) / (deviation + ε) over the batch, each episode counting once."""
    return normalised(rewards.values, _shares(rewards, reduce), reduce)


def group(rewards: Rewards, reduce: Reduce) -> Tensor:
    """(r − mean) / (deviation + ε) of the group's episodes (GRPO, arXiv 2402.03300, Section 4.1.2)."""
    spread = _of_groups(rewards, reduce)
    return spread.away / (spread.deviation[rewards.group] + EPSILON)


def group_normalised_then_batch(rewards: Rewards, reduce: Reduce) -> Tensor:
    """(r − mean) / (deviation + ε) of the group, then the same over the batch's tokens (AReaL's boba_grpo)."""
    return normalised(group(rewards, reduce), rewards.trained.double(), reduce)


def group_mean(rewards: Rewards, reduce: Reduce) -> Tensor:
    """r − mean of the group's episodes (Dr. GRPO, arXiv 2503.20783, Section 3.2)."""
    return _of_groups(rewards, reduce).away


def leave_one_out(rewards: Rewards, reduce: Reduce) -> Tensor:
    """r − mean of the group's other episodes (RLOO, arXiv 2402.14740, Equation 8); 0 without others."""
    in_group = _of_groups(rewards, reduce)
    in_episode = spread_of(rewards.values, _counted(rewards), reduce, rewards.episode, rewards.episodes)
    count = in_group.count.round()[rewards.group]
    found = in_episode.away + (in_group.away - in_episode.away) * count / (count - 1).clamp(min=1)
    return found.masked_fill(count < 2, 0)


def group_then_batch(rewards: Rewards, reduce: Reduce) -> Tensor:
    """r − mean of the group, normalised over the batch's tokens (REINFORCE++ with baseline, arXiv 2501.03262)."""
    return normalised(group_mean(rewards, reduce), rewards.trained.double(), reduce)


def over_tokens(advantages: Tensor, trained: Tensor, reduce: Reduce, largest: Reduce) -> dict[str, float]:
    """Returns metrics over the trained tokens of all replicas: mean, deviation, minimum and maximum of the advantage.

    advantages: float64 [n], of a replica's answers; trained: int64 [n], their trained tokens. `largest` reduces to
    the maximum where `reduce` sums. Returns {} if there are no trained tokens.
    """
    spread = spread_of(advantages, trained.double(), reduce)
    own = advantages[trained > 0]
    bounds = torch.stack([own, -own], 1).amax(0) if len(own) else torch.full((2,), -torch.inf, dtype=torch.float64)
    high, low = largest(bounds)
    if not spread.count:
        return {}
    return {
        "advantage_mean": spread.mean.item(),
        "advantage_std": spread.deviation.item(),
        "advantage_min": -low.item(),
        "advantage_max": high.item(),
    }


def _counted(rewards: Rewards) -> Tensor:
    return (rewards.trained > 0).double()


def _shares(rewards: Rewards, reduce: Reduce) -> Tensor:
    """Returns float64 [n]: what each answer counts, so that every episode with trained tokens counts 1."""
    counted = _counted(rewards)
    answers = reduce(torch.zeros(rewards.episodes, dtype=torch.float64).index_add(0, rewards.episode, counted))
    return counted / answers.clamp(min=1)[rewards.episode]


def normalised(values: Tensor, weights: Tensor, reduce: Reduce) -> Tensor:
    """(value − mean) / (deviation + ε), float64 [n], with the weighted mean and deviation over all replicas."""
    spread = spread_of(values, weights, reduce)
    return spread.away / (spread.deviation + EPSILON)


def _of_groups(rewards: Rewards, reduce: Reduce) -> Spread:
    return spread_of(rewards.values, _shares(rewards, reduce), reduce, rewards.group, rewards.groups)


@dataclass(frozen=True)
class Spread:
    """How values lie around the weighted mean of their group, over all replicas; float64."""

    count: Tensor
    """[groups]: the sum of the weights."""
    mean: Tensor
    """[groups]"""
    deviation: Tensor
    """[groups]: exactly 0 where the values are equal (`ROUNDING`)."""
    away: Tensor
    """[n]: value − mean; exactly 0 where the values are equal."""


def spread_of(values: Tensor, weights: Tensor, reduce: Reduce, group: Tensor | None = None, groups: int = 1) -> Spread:
    """Returns the spread of the values [n] of this replica, all of one group unless `group`, int64 [n], numbers theirs.

    Reduces twice: the deviation is computed from the distances to the mean, since a difference of sums would lose the
    deviation of close values to rounding.
    """
    values, weights = values.double(), weights.double()
    group = torch.zeros(len(values), dtype=torch.int64) if group is None else group

    def sums(*columns: Tensor) -> Tensor:
        zeros = torch.zeros(len(columns), groups, dtype=torch.float64)
        return reduce(zeros.index_add(1, group, torch.stack(columns)))

    count, total = sums(weights, weights * values)
    mean = total / count.clamp(min=1)
    away = values - mean[group]
    deviation = (sums(weights * away.square())[0] / count.clamp(min=1)).sqrt()
    equal = deviation <= ROUNDING * mean.abs().clamp(min=1)
    return Spread(count, mean, deviation.masked_fill(equal, 0), away.masked_fill(equal[group], 0))
