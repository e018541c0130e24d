"""Policy losses with the behaviour and the proximal policy decoupled (AReaL, Equation 5).

All tensors are [N], an element for each trained token of a micro-batch, its sequences one after another; `sequences` says
to which each belongs. Only `current` gets a gradient. Naive PPO is the same with the behaviour policy as the proximal one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """Log-probabilities under three policies, and what goes with them."""

    current: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    sequences: Tensor
    """int64: number of the token's sequence in its micro-batch"""


@dataclass(frozen=True)
class Bounds:
    low: float
    high: float
    """A ratio u is clipped to 1 − low and 1 + high."""
    cap: float
    """Of the weight π_prox/π_behav."""


def clipped(tokens: Tokens, bounds: Bounds) -> Tensor:
    """−min(cap, π_prox/π_behav) · min(u·A, clip(u)·A) of each token, u = π_θ/π_prox (arXiv 2505.24298, Equation 5)."""
    ratio = (tokens.current - tokens.proximal).exp()
    return -_weight(tokens.proximal - tokens.behaviour, bounds) * _pessimistic(ratio, tokens.advantages, bounds)


def clipped_sequences(tokens: Tokens, bounds: Bounds) -> Tensor:
    """As `clipped` with the geometric mean of a sequence's ratios in place of each (GSPO, arXiv 2507.18071, Equation 7)."""
    ratio = _sequence_mean(tokens.current - tokens.proximal, tokens.sequences).exp()
    weight = _weight(_sequence_mean(tokens.proximal - tokens.behaviour, tokens.sequences), bounds)
    return -weight * _pessimistic(ratio, tokens.advantages, bounds)


def weighted(tokens: Tokens, bounds: Bounds) -> Tensor:
    """−min(cap, π_prox/π_behav) · clip(u) · A · log π_θ, the ratio without gradient: every token has one (CISPO, arXiv
    2506.13585, Equation 4)."""
    ratio = (tokens.current.detach() - tokens.proximal).exp().clamp(1 - bounds.low, 1 + bounds.high)
    return -_weight(tokens.proximal - tokens.behaviour, bounds) * ratio * tokens.advantages * tokens.current


def sums(tokens: Tokens, entropy: Tensor, bounds: Bounds) -> dict[str, Tensor]:
    """Sums over the tokens of what is reported as a mean; those of parts of a batch add up."""
    ratio = (tokens.current - tokens.proximal).exp()
    up = tokens.advantages > 0
    outside = torch.where(up, ratio > 1 + bounds.high, ratio < 1 - bounds.low) & (tokens.advantages != 0)
    weight = (tokens.proximal - tokens.behaviour).exp()
    return {
        "clip_share": outside.sum(),
        "capped_share": (weight > bounds.cap).sum(),
        "ratio_mean": ratio.sum(),
        "weight": weight.sum(),
        "weight_squared": weight.square().sum(),
        "kl": _k3(tokens.current - tokens.behaviour),
        "kl_proximal": _k3(tokens.proximal - tokens.behaviour),
        "kl_step": _k3(tokens.current - tokens.proximal),
        "entropy": entropy.sum(),
    }


def effective_share(weight: float, weight_squared: float, tokens: float) -> float:
    """Effective sample size of the weights π_prox/π_behav over their number: 1 / (1 + χ²)."""
    return weight**2 / (tokens * weight_squared) if weight_squared else 1.0


def _k3(drift: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(a ‖ b), never negative, from samples of a: drift is log b − log a."""
    return (drift.exp() - 1 - drift).sum()


def _weight(drift: Tensor, bounds: Bounds) -> Tensor:
    return drift.exp().clamp(max=bounds.cap)


def _pessimistic(ratio: Tensor, advantages: Tensor, bounds: Bounds) -> Tensor:
    return torch.minimum(ratio * advantages, ratio.clamp(1 - bounds.low, 1 + bounds.high) * advantages)


def _sequence_mean(values: Tensor, sequences: Tensor) -> Tensor:
    """The mean of the sequence that each belongs to."""
    count = int(sequences.max()) + 1 if len(sequences) else 0
    total = values.new_zeros(count).index_add(0, sequences, values)
    lengths = values.new_zeros(count).index_add(0, sequences, torch.ones_like(values))
    return (total / lengths.clamp(min=1))[sequences]
