"""What is added to the policy loss; `ppo.penalty` names it, with a coefficient each.

It is added for every trained token, also for one that a correction masks, and averaged as the policy loss is; `kl_k1`
alone is part of the advantage. Another penalty is a function, a line in PENALTIES and its name in config.py.

Schulman's estimators of KL(π_θ ‖ π_ref) from tokens of π_θ: k1 = log π_θ − log π_ref, k2 = k1² / 2 and k3 = π_ref/π_θ −
1 + k1. As values k1 and k3 have the right mean. As losses, that is by their gradients, it is k2: its mean gradient is
that of KL(π_θ ‖ π_ref), as is that of k1 taken off the reward. The mean gradient of k1 itself is 0, and that of k3 is
of KL(π_ref ‖ π_θ), equal near the reference only (Liu et al., arXiv 2510.01555). Tokens of an older policy are taken as
if they were of π_θ, but for k1, which is weighed as rewards are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

IN_REWARD = "kl_k1"
"""The name of the one that `penalised` takes off the advantages."""


def entropy_bonus(current: Tensor, entropy: Tensor, reference: Tensor | None) -> Tensor:
    """−H(π_θ) of the distribution that a token was sampled from: less entropy costs (arXiv 1602.01783, Section 4)."""
    return -entropy


def kl_k2(current: Tensor, entropy: Tensor, reference: Tensor) -> Tensor:
    return (current - reference).square() / 2


def kl_k3(current: Tensor, entropy: Tensor, reference: Tensor) -> Tensor:
    """The loss term of GRPO (arXiv 2402.03300, Equation 4)."""
    return k3(reference - current)


def k3(drift: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(a ‖ b) from each token of a, never negative; drift is log b − log a."""
    return drift.exp() - 1 - drift


PENALTIES: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "entropy": entropy_bonus,
    "kl_k2": kl_k2,
    "kl_k3": kl_k3,
}
"""(log π_θ, entropy of its distribution, log π_ref) → penalty, [N] each."""


def penalty(current: Tensor, entropy: Tensor, reference: Tensor | None, coefficients: Mapping[str, float]) -> Tensor:
    """[N]: the sum of what is named, each times its coefficient. Without a KL to it `reference` may be None."""
    total = torch.zeros_like(current)
    for name, penalise in PENALTIES.items():
        if name in coefficients:
            total = total + coefficients[name] * penalise(current, entropy, reference)
    return total


def penalised(
    advantages: Tensor, current: Tensor, reference: Tensor | None, coefficients: Mapping[str, float]
) -> Tensor:
    """Advantages [N] less the coefficient of `kl_k1` times k1 of the token itself, without gradient (arXiv 2203.02155
    takes it off the reward)."""
    if IN_REWARD not in coefficients:
        return advantages
    return advantages - coefficients[IN_REWARD] * (current.detach() - reference)
