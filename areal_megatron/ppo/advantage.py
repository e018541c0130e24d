"""Advantages without a critic: the reward of a trajectory, normalised over the batch (paper, Section 5).

With γ = λ = 1 and the reward on the last token, every token of a trajectory has the same advantage. The batch
may be spread over replicas: `moments` of the parts add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-5
"""Added to the deviation, so that a batch of equal rewards has advantages of 0."""


def moments(rewards: Tensor, trained_tokens: Tensor, weighting: str) -> Tensor:
    """Weighted count, sum and sum of squares of rewards: float64 [3].

    rewards [n], trained_tokens [n]. `weighting` is "token" (a trajectory counts once for each of its trained
    tokens) or "sequence" (once, if it has any).
    """
    weights = {"token": trained_tokens, "sequence": trained_tokens > 0}[weighting].double()
    rewards = rewards.double()
    return torch.stack([weights.sum(), (weights * rewards).sum(), (weights * rewards.square()).sum()])


def normalise(rewards: Tensor, batch_moments: Tensor) -> Tensor:
    """float32 [n]: (reward − mean) / (deviation + ε) with the mean and deviation of the whole batch."""
    count, total, squares = batch_moments.unbind()
    mean = total / count.clamp(min=1)
    deviation = (squares / count.clamp(min=1) - mean.square()).clamp(min=0).sqrt()
    return ((rewards.double() - mean) / (deviation + EPSILON)).float()
