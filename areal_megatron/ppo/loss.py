"""The PPO objective with the behaviour and the proximal policy decoupled (paper, Equation 5).

All tensors are [N]: one element for each trained token, in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor


def policy_loss(
    current: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, clip: float, cap: float
) -> Tensor:
    """Loss of each token: −min(cap, π_prox/π_behav) · min(u·A, clamp(u, 1−clip, 1+clip)·A), u = π_θ/π_prox.

    Log-probabilities under the current, proximal and behaviour policy; only `current` gets a gradient. Naive
    PPO is the same with the behaviour policy as the proximal one.
    """
    ratio = (current - proximal).exp()
    weight = (proximal - behaviour).exp().clamp(max=cap)
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -weight * gain


def sums(
    current: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, entropy: Tensor, clip: float, cap: float
) -> dict[str, Tensor]:
    """Sums over the tokens of what is reported as a mean; those of parts of a batch add up."""
    ratio = (current - proximal).exp()
    drift = current - behaviour
    clipped = torch.where(advantages > 0, ratio > 1 + clip, ratio < 1 - clip) & (advantages != 0)
    return {
        "clip_share": clipped.sum(),
        "capped_share": ((proximal - behaviour).exp() > cap).sum(),
        "ratio_mean": ratio.sum(),
        # Schulman's k3 estimate of KL(behaviour ‖ current), which is never negative
        "kl": (drift.exp() - 1 - drift).sum(),
        "entropy": entropy.sum(),
    }
