"""Penalties that are added to the policy loss; `ppo.penalty` names them, each with a coefficient.

A penalty is added for every trained token, even one that a correction masks, and averaged as the policy loss is; only
`kl_k1` is part of the advantage instead. To add a penalty, write a function, a line in PENALTIES and its name in
config.py.

Schulman's estimators of KL(π_θ ‖ π_ref) from tokens of π_θ are k1 = log π_θ − log π_ref, k2 = k1² / 2 and
k3 = π_ref/π_θ − 1 + k1. The values of k1 and k3 have the right mean. Of the gradients, that of k2 as a loss has the
right mean, and so has that of k1 subtracted from the reward. The mean gradient of k1 as a loss is 0, and that of k3 is
the gradient of KL(π_ref ‖ π_θ), which is equal only near the reference (Liu et al., arXiv 2510.01555). Tokens of an
older policy are treated as if they were of π_θ, except in k1, which is weighted as rewards are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

IN_REWARD = "kl_k1"
"""The name of the penalty that `penalised` subtracts from the advantages."""


def entropy_bonus(current: Tensor, entropy: Tensor, reference: Tensor | None) -> Tensor:
    """−H(π_θ), so that entropy lowers the loss (arXiv 1602.01783, Section 4)."""
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
"""(log π_θ, entropy of the distribution that the token was sampled from, log π_ref) → penalty, [N] each."""


def penalty(current: Tensor, entropy: Tensor, reference: Tensor | None, coefficients: Mapping[str, float]) -> Tensor:
    """Returns the sum [N] of the named penalties times their coefficients; `reference` is None without a KL penalty."""
    total = torch.zeros_like(current)
    for name, penalise in PENALTIES.items():
        if name in coefficients:
            total = total + coefficients[name] * penalise(current, entropy, reference)
    return total


def penalised(
    advantages: Tensor, current: Tensor, reference: Tensor | None, coefficients: Mapping[str, float]
) -> Tensor:
    """Returns the advantages [N] minus the coefficient of `kl_k1` times the token's k1, without gradient.

    arXiv 2203.02155 subtracts it from the reward.
    """
    if IN_REWARD not in coefficients:
        return advantages
    return advantages - coefficients[IN_REWARD] * (current.detach() - reference)
