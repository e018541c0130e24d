"""Advantages with a critic, and the critic's own loss.

All tensors are [N], an element for each trained token of a micro-batch, its sequences one after another; `sequences`
says to which each belongs. A token's state is what stands before it, its value what the critic expects the trained
tokens from it on to earn. Tokens that are not trained, such as a tool's, are a part of the step to the next trained
one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_megatron.ppo.advantage import Reduce, described, moments


def at_the_end(rewards: Tensor, sequences: Tensor) -> Tensor:
    """float64 [N]: the reward of each sequence (`rewards` float64 [n]) at its last trained token, 0 at the others."""
    last = torch.ones_like(sequences, dtype=torch.bool)
    last[:-1] = sequences[1:] != sequences[:-1]
    return rewards[sequences] * last


def gae(rewards: Tensor, values: Tensor, sequences: Tensor, gamma: float, lambda_: float) -> Tensor:
    """Σ_l (γλ)^l · δ_{t+l} over the rest of the sequence, with δ_t = r_t + γ · V_{t+1} − V_t, V = 0 after the last
    token: float64 [N] (generalised advantage estimation, arXiv 1506.02438, Equation 16).

    The sum doubles its span in each round, so there are log2 N of them, each over the whole tensor at once; nothing is
    ever divided by a power of γλ.
    """
    values = values.double()
    found = rewards - values
    found[:-1] += gamma * _where_same(values, sequences, 1)
    span, decay = 1, gamma * lambda_
    while span < len(found):
        found = torch.cat((found[:-span] + decay * _where_same(found, sequences, span), found[-span:]))
        span, decay = 2 * span, decay * decay
    return found


def value_loss(current: Tensor, before: Tensor, returns: Tensor, clip: float) -> Tensor:
    """½ · max((V − R)², (V_before + clip(V − V_before, −ε, ε) − R)²) of each token: a value gains nothing from moving
    by more than ε in one update (Schulman's PPO in openai/baselines, ppo2). ε may be infinite."""
    near = before + (current - before).clamp(-clip, clip)
    return torch.maximum((current - returns).square(), (near - returns).square()) / 2


def explained_variance(values: Tensor, returns: Tensor, reduce: Reduce) -> float | None:
    """1 − Var(R − V) / Var(R) over the tokens of all replicas: 1 is perfect, 0 no better than a constant, negative is
    worse; None where all returns are the same. `reduce` sums a float64 tensor over the replicas."""
    one = torch.ones_like(returns)
    parts = torch.stack([moments(returns - values, one).sum(1), moments(returns, one).sum(1)], 1)
    error, whole = described(reduce(parts))[2].square().tolist()
    return 1 - error / whole if whole else None


def _where_same(values: Tensor, sequences: Tensor, span: int) -> Tensor:
    """[N − span]: the value `span` tokens ahead, 0 where that is of another sequence."""
    return torch.where(sequences[span:] == sequences[:-span], values[span:], 0)
