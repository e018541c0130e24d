"""Advantages without a critic: how far a trajectory's reward is above a baseline. For those with one, see critic.py.

With γ = λ = 1 and the reward on the last token, every token of a trajectory has the same advantage. A batch, and even a
group, may be spread over replicas: `reduce` sums a float64 tensor over all of them. Trajectories without trained tokens
are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-5
"""Added to standard deviations, so that equal rewards have advantages of 0."""
Reduce = Callable[[Tensor], Tensor]
"""Reduces a float64 CPU tensor over all replicas, element by element; every replica calls it."""


@dataclass(frozen=True)
class Rewards:
    """The rewards of a replica's n trajectories, and what advantages need beside them."""

    values: Tensor
    """float64 [n]: the reward of each trajectory."""
    trained: Tensor
    """int64 [n]: the number of its trained tokens."""
    group: Tensor
    """int64 [n]: the number of its group, from 0."""
    groups: int
    """The number of groups in the whole batch."""


def batch_tokens(rewards: Rewards, reduce: Reduce) -> Tensor:
    """(r − mean) / (deviation + ε) over the batch, each trained token counting once (AReaL, Section 5)."""
    return normalised(rewards.values, rewards.trained.double(), reduce)


def batch_sequences(rewards: Rewards, reduce: Reduce) -> Tensor:
    """(r − mean) / (deviation + ε) over the batch, each trajectory counting once."""
    return normalised(rewards.values, _counted(rewards), reduce)


def group(rewards: Rewards, reduce: Reduce) -> Tensor:
    """(r − mean) / (deviation + ε) of the group's answers (GRPO, arXiv 2402.03300, Section 4.1.2)."""
    mean, deviation = _of_groups(rewards, reduce)[1:]
    return (rewards.values - mean[rewards.group]) / (deviation[rewards.group] + EPSILON)


def group_normalised_then_batch(rewards: Rewards, reduce: Reduce) -> Tensor:
    """(r − mean) / (deviation + ε) of the group, then the same over the batch's tokens (AReaL's boba_grpo)."""
    return normalised(group(rewards, reduce), rewards.trained.double(), reduce)


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
    """Returns metrics over the trained tokens of all replicas: mean, deviation, minimum and maximum of the advantage.

    advantages: float64 [n], those of a replica's trajectories; trained: int64 [n], their trained tokens. `largest`
    reduces to the maximum where `reduce` sums. Returns {} if there are no trained tokens.
    """
    count, mean, deviation = statistics(reduce(moments(advantages, trained.double()).sum(1)))
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
    """(value − mean) / (deviation + ε), float64 [n], with the weighted mean and deviation over all replicas."""
    _, mean, deviation = statistics(reduce(moments(values, weights).sum(1)))
    return (values - mean) / (deviation + EPSILON)


def _of_groups(rewards: Rewards, reduce: Reduce) -> tuple[Tensor, Tensor, Tensor]:
    """Returns count, mean and deviation of each group: float64 [groups] each."""
    parts = moments(rewards.values, _counted(rewards))
    sums = torch.zeros(3, rewards.groups, dtype=torch.float64).index_add(1, rewards.group, parts)
    return statistics(reduce(sums))


def statistics(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns count, mean and deviation, [...] each, from sums of moments [3, ...]."""
    count, total, squares = sums.unbind()
    mean = total / count.clamp(min=1)
    return count, mean, (squares / count.clamp(min=1) - mean.square()).clamp(min=0).sqrt()


def moments(values: Tensor, weights: Tensor) -> Tensor:
    """Returns weight, weighted value and weighted square of each value: float64 [3, n]."""
    return torch.stack([weights, weights * values, weights * values.square()])
