"""What is added to the policy loss; `ppo.penalty` names it, with a coefficient each.

It is added for every trained token, also for one that a correction masks, and averaged as the policy loss is. Another
penalty is a function, a line in PENALTIES and its name in config.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def entropy_bonus(current: Tensor, entropy: Tensor) -> Tensor:
    """−H(π_θ) of the distribution that a token was sampled from: less entropy costs (arXiv 1602.01783, Section 4)."""
    return -entropy


PENALTIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"entropy": entropy_bonus}
"""(log π_θ, entropy of its distribution) → penalty, [N] each."""


def penalty(current: Tensor, entropy: Tensor, coefficients: Mapping[str, float]) -> Tensor:
    """[N]: the sum of what is named, each times its coefficient."""
    total = torch.zeros_like(current)
    for name, penalise in PENALTIES.items():
        if name in coefficients:
            total = total + coefficients[name] * penalise(current, entropy)
    return total
