"""Advantages without a critic (with one: critic.py): what a trajectory's reward is above what was to be expected.

With γ = λ = 1 and the reward on the last token, every token of a trajectory has the same advantage. A batch may be
spread over replicas, also in the middle of a group: `reduce` sums a float64 tensor over all of them. What has no
trained token counts nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-5
"""Added to deviations, so that equal rewards have advantages of 0."""
Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Rewards:
    """Of the n trajectories of a replica."""

    values: Tensor
    """float64 [n]"""
    trained: Tensor
    """int64 [n]: trained tokens"""
    group: Tensor
    """int64 [n]: whose answers to one prompt belong together"""
    groups: int
    """In the whole batch."""


def batch_tokens(rewards: Rewards, reduce: Reduce) -> Tensor:
    """(r − mean) / (deviation + ε) over the batch, a trajectory counting once for each trained token (AReaL, Section
    5)."""
    return normalised(rewards.values, rewards.trained.double(), reduce)


def batch_sequences(rewards: Rewards, reduce: Reduce) -> Tensor:
    """The same, each trajectory counting once."""
    return normalised(rewards.values, _counted(rewards), reduce)


def group(rewards: Rewards, reduce: Reduce) -> Tensor:
    """(r − mean) / (deviation + ε) of the group's answers (GRPO, arXiv 2402.03300, Section 4.1.2)."""
    mean, deviation = _of_groups(rewards, reduce)[1:]
    return (rewards.values - mean[rewards.group]) / (deviation[rewards.group] + EPSILON)


def group_mean(rewards: Rewards, reduce: Reduce) -> Tensor:
    """r − mean of the group's answers (Dr. GRPO, arXiv 2503.20783, Section 3.2)."""
    return rewards.values - _of_groups(rewards, reduce)[1][rewards.group]


def leave_one_out(rewards: Rewards, reduce: Reduce) -> Tensor:
    """r − mean of the group's other answers (RLOO, arXiv 2402.14740, Equation 8); 0 without others."""
    count, mean, _ = (values[rewards.group] for values in _of_groups(rewards, reduce))
    return (rewards.values - mean) * count / (count - 1).clamp(min=1)


def group_then_batch(rewards: Rewards, reduce: Reduce) -> Tensor:
    """r − mean of the group, normalised over the batch's tokens (REINFORCE++ with baseline, arXiv 2501.03262)."""
    return normalised(group_mean(rewards, reduce), rewards.trained.double(), reduce)


def over_tokens(advantages: Tensor, trained: Tensor, reduce: Reduce, largest: Reduce) -> dict[str, float]:
    """Mean, deviation, least and largest advantage of the trained tokens of all replicas; {} if there are none.

    advantages float64 [n] and trained int64 [n]: of the trajectories of a replica; `largest` reduces as `reduce` does,
    to the element-wise maximum.
    """
    count, mean, deviation = described(reduce(moments(advantages, trained.double()).sum(1)))
    own = advantages[trained > 0]
    bounds = torch.stack([own, -own], 1).amax(0) if len(own) else torch.full((2,), -torch.inf, dtype=torch.float64)
    high, low = largest(bounds)
    if not count:
        return {}
    return {
        "advantage_mean": mean.item(),
        "advantage_std": deviation.item(),
        "advantage_min": -low.item(),
        "advantage_max": high.item(),
    }


def _counted(rewards: Rewards) -> Tensor:
    return (rewards.trained > 0).double()


def normalised(values: Tensor, weights: Tensor, reduce: Reduce) -> Tensor:
    """(value − mean) / (deviation + ε) over all replicas, each value counting with its weight: float64 [n]."""
    _, mean, deviation = described(reduce(moments(values, weights).sum(1)))
    return (values - mean) / (deviation + EPSILON)


def _of_groups(rewards: Rewards, reduce: Reduce) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and deviation of each group: float64 [groups] each."""
    parts = moments(rewards.values, _counted(rewards))
    sums = torch.zeros(3, rewards.groups, dtype=torch.float64).index_add(1, rewards.group, parts)
    return described(reduce(sums))


def described(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and deviation from sums of moments [3, …]."""
    count, total, squares = sums.unbind()
    mean = total / count.clamp(min=1)
    return count, mean, (squares / count.clamp(min=1) - mean.square()).clamp(min=0).sqrt()


def moments(values: Tensor, weights: Tensor) -> Tensor:
    """float64 [3, n]: weight, weighted value and weighted square."""
    return torch.stack([weights, weights * values, weights * values.square()])
