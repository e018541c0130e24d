"""Advantages with a critic, and the critic's own loss.

All tensors are [N], one element for each trained token of a micro-batch, in order; `sequences` gives the number of
each token's sequence. The state of a token is the text before it; its value is the return that the critic expects from
there on. Tokens that are not trained, such as a tool's, belong to the step to the next trained one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_megatron.ppo.advantage import Reduce, spread_of


def at_the_end(rewards: Tensor, sequences: Tensor) -> Tensor:
    """Returns the rewards per token, float64 [N]: the sequence's reward at its last trained token, 0 at the others.

    rewards: float64 [n], one for each sequence.
    """
    last = torch.ones_like(sequences, dtype=torch.bool)
    last[:-1] = sequences[1:] != sequences[:-1]
    return rewards[sequences] * last


def gae(rewards: Tensor, values: Tensor, sequences: Tensor, gamma: float, lambda_: float) -> Tensor:
    """Returns the generalised advantage estimates, float64 [N] (arXiv 1506.02438, Equation 16).

    They are Σ_l (γλ)^l · δ_{t+l} over the rest of the sequence, with δ_t = r_t + γ · V_{t+1} − V_t and V = 0 after the
    last token. The sum doubles its span in each of log2 N rounds over the whole tensor; nothing is ever divided by a
    power of γλ.
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
    """Returns ½ · max((V − R)², (V_before + clip(V − V_before, −ε, ε) − R)²) of each token, float64, with `clip` for ε.

    A value gains nothing from moving by more than ε in one update (Schulman's PPO in openai/baselines, ppo2). ε may be
    infinite.
    """
    current = current.double()  # squares of large errors are no float32
    near = before + (current - before).clamp(-clip, clip)
    return torch.maximum((current - returns).square(), (near - returns).square()) / 2


def explained_variance(values: Tensor, returns: Tensor, reduce: Reduce) -> float | None:
    """Returns 1 − Var(R − V) / Var(R) over the tokens of all replicas, or None if all returns are the same.

    1 is perfect, 0 no better than a constant, and negative worse. `reduce` sums a float64 tensor over the replicas.
    """
    both = torch.cat([returns - values, returns])
    which = torch.arange(2).repeat_interleave(len(returns))
    error, whole = spread_of(both, torch.ones_like(both), reduce, which, 2).deviation.square().tolist()
    return 1 - error / whole if whole else None


def _where_same(values: Tensor, sequences: Tensor, span: int) -> Tensor:
    """Returns the values `span` tokens ahead, 0 where that token is of another sequence: [N − span]."""
    return torch.where(sequences[span:] == sequences[:-span], values[span:], 0)
