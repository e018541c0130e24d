"""Policy losses with decoupled behaviour and proximal policies (AReaL, Equation 5).

All tensors are [N], one element for each trained token of a micro-batch, in order; `sequences` gives the number of each
token's sequence. Only `current` gets a gradient. In naive PPO the behaviour policy is also the proximal one.

Ratios and weights are kept as logarithms in float64 until they are multiplied, and bounded before they are: a ratio of
e^90 is no float32, and infinity times 0, as a value or in a gradient, would have the step skipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_megatron.ppo.correction import NEGATIVE, TRUNCATED, corrected, far_negatives, sequence_mean
from areal_megatron.ppo.penalty import k3

_LARGEST = 700.0
"""The exponential of this is a float64."""


@dataclass(frozen=True)
class Tokens:
    """The trained tokens: log-probabilities under three policies, advantages, sequences, masks."""

    current: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    sequences: Tensor
    """int64: the number, from 0, of the token's sequence in its micro-batch."""
    kept: Tensor
    """bool: False where a correction of the whole mini-batch masks the token."""


@dataclass(frozen=True)
class Bounds:
    """The limits of ratios and weights."""

    low: float
    high: float
    """The ratio u = π_θ/π_prox is clipped to [1 − low, 1 + high]."""
    correction: Mapping[str, float]
    """Bounds for the weight w = π_prox/π_behav, by the names of correction.py."""
    whole: bool = False
    """Whether a sequence has one u and one w, the geometric means over its tokens (GSPO, arXiv 2507.18071,
    Equation 7)."""
    dual: float = math.inf
    """The ratio of a token with a negative advantage counts as this at most, above 1."""
    gates: tuple[float, float] = (1.0, 1.05)
    """SAPO's temperatures for advantages above 0, and for all others."""


def clipped(tokens: Tokens, bounds: Bounds) -> Tensor:
    """Returns −w · min(u·A, clip(u)·A) of each token, with corrected w (arXiv 2505.24298, Equation 5).

    Where A is negative it is −w · max(min(u·A, clip(u)·A), c·A) with `bounds.dual` for c, which alone bounds it there
    (dual clip: arXiv 1912.09729).
    """
    drift, lag = log_ratios(tokens, bounds)
    up = tokens.advantages > 0
    least = torch.full_like(drift, _log(1 - bounds.low)).masked_fill(up, -math.inf)
    most = torch.full_like(drift, _log(bounds.dual)).masked_fill(up, _log(1 + bounds.high))
    counted = torch.minimum(torch.maximum(drift, least), most)
    return -_times_exp(tokens.advantages, _log_weights(lag, tokens, bounds) + counted)


def gated(tokens: Tokens, bounds: Bounds) -> Tensor:
    """Returns −w · 4/τ · σ(τ(u − 1)) · A of each token, with corrected w (SAPO, arXiv 2511.20347).

    The gate takes the place of clipping: its slope is 1 at u = 1 and falls smoothly on both sides.
    """
    drift, lag = log_ratios(tokens, bounds)
    positive, others = bounds.gates
    temperature = torch.full_like(drift, others).masked_fill(tokens.advantages > 0, positive)
    open_at = torch.full_like(drift, _LARGEST)  # the gate is open long before
    gate = (temperature * (torch.minimum(drift, open_at).exp() - 1)).sigmoid() * 4 / temperature
    return -_times_exp(tokens.advantages, _log_weights(lag, tokens, bounds)) * gate


def weighted(tokens: Tokens, bounds: Bounds) -> Tensor:
    """Returns −w · clip(u) · A · log π_θ of each token, with corrected w (CISPO, arXiv 2506.13585, Equation 4).

    No gradient goes through u, so that every token has a gradient, clipped or not.
    """
    drift, lag = log_ratios(tokens, bounds)
    ratio = drift.detach().clamp(_log(1 - bounds.low), _log(1 + bounds.high))
    return -_times_exp(tokens.advantages, _log_weights(lag, tokens, bounds) + ratio) * tokens.current


def log_linear(current: Tensor, behaviour: Tensor, staleness: Tensor, ahead: float) -> Tensor:
    """Returns AReaL's log-linear approximation of log π_prox, from versions v.

    log π_prox ≈ log π_behav + α · (log π_θ − log π_behav) with α = (v_prox − v_behav) / (v_θ − v_behav).
    staleness [N]: v_prox − v_behav. ahead: v_θ − v_prox, the share of the update's steps that have been taken. Before
    the first step the current policy is the proximal one.
    """
    if not ahead:
        return current
    return behaviour + staleness / (staleness + ahead) * (current - behaviour)


def metric_sums(tokens: Tokens, entropy: Tensor, bounds: Bounds) -> dict[str, Tensor]:
    """Returns the sums over the tokens of the metrics that are reported as means; sums of micro-batches add up."""
    drift, lag = log_ratios(tokens, bounds)
    ratio, weight, up = drift.exp(), lag.exp(), tokens.advantages > 0
    outside = torch.where(up, ratio > 1 + bounds.high, ratio < 1 - bounds.low) & (tokens.advantages != 0)
    return {
        "clip_share": outside.sum(),
        "dual_clip_share": ((tokens.advantages < 0) & (ratio > bounds.dual)).sum(),
        "capped_share": (weight > bounds.correction.get(TRUNCATED, torch.inf)).sum(),
        "masked_share": (_log_weights(lag, tokens, bounds) == -math.inf).sum(),
        "ratio_mean": ratio.sum(),
        "weight": weight.sum(),
        "weight_squared": weight.square().sum(),
        "kl": k3(tokens.current - tokens.behaviour).sum(),
        "kl_proximal": k3(tokens.proximal - tokens.behaviour).sum(),
        "kl_step": k3(tokens.current - tokens.proximal).sum(),
        "entropy": entropy.sum(),
    }


def effective_share(weight: float, weight_squared: float, tokens: float) -> float:
    """Returns the effective sample size of the weights π_prox/π_behav over their number: 1 / (1 + χ²)."""
    return weight / tokens * (weight / weight_squared) if weight_squared else 1.0


def log_ratios(tokens: Tokens, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """Returns log u and log w, float64."""
    proximal = tokens.proximal.double()
    drift, lag = tokens.current.double() - proximal, proximal - tokens.behaviour
    if not bounds.whole:
        return drift, lag
    return sequence_mean(drift, tokens.sequences), sequence_mean(lag, tokens.sequences)


def _log_weights(lag: Tensor, tokens: Tokens, bounds: Bounds) -> Tensor:
    """Returns the logarithms of the corrected weights; −inf where a token is masked."""
    weights = corrected(lag, tokens.sequences, tokens.kept, bounds.correction)
    if NEGATIVE not in bounds.correction:
        return weights
    drift = tokens.current.detach() - tokens.behaviour
    far = far_negatives(drift, tokens.advantages, tokens.sequences, bounds.correction[NEGATIVE])
    return weights.masked_fill(far, -math.inf)


def _times_exp(factor: Tensor, exponent: Tensor) -> Tensor:
    """Returns factor · e^exponent; where the factor is 0, 0 and no gradient, however large the exponent."""
    most = torch.full_like(exponent, math.inf).masked_fill(factor == 0, 0)
    return factor * torch.minimum(exponent, most).exp()


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf
