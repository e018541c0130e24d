"""Published settings of each `ppo.algorithm`: the defaults that go with its name.

The functions that make up an algorithm are in ppo/algorithm.py. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROUNDING = 1e-6
"""Rewards of a group, or of a batch, are equal if they differ by no more than that, or than that share of their size:
so much is left open by the digits of a float32. Divided by its deviation such noise would become a signal."""


LEAST_FACTOR = 0.01
"""optimizer.staleness_kl never scales the rate by less: a divergence that stays then does not come from the steps."""


def are_equal(rewards: Sequence[float]) -> bool:
    """Returns whether rewards, at least one, are equal up to ROUNDING."""
    low, high = min(rewards), max(rewards)
    return high - low <= ROUNDING * max(1.0, abs(low), abs(high))


@dataclass(frozen=True)
class Published:
    """The settings that an algorithm is published with, where a config does not say otherwise."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    """ppo.clip_low and ppo.clip_high."""
    wrong: float = 0.0
    right: float = 1.0
    """reward.wrong and reward.right."""
    within_group: bool = True
    """Whether an advantage depends on the rewards of its group alone: it is 0 where they are equal."""

    @property
    def defaults(self) -> dict[str, float]:
        """Dotted key → default."""
        return {
            "ppo.clip_low": self.clip_low,
            "ppo.clip_high": self.clip_high,
            "reward.wrong": self.wrong,
            "reward.right": self.right,
        }


PUBLISHED = {
    "ppo": Published(wrong=-5.0, right=5.0, within_group=False),
    "ppo_sequence": Published(wrong=-5.0, right=5.0, within_group=False),
    "boba_grpo": Published(0.4, 0.4, wrong=-5.0, right=5.0, within_group=False),
    "grpo": Published(),
    "dr_grpo": Published(),
    "dapo": Published(0.2, 0.28, wrong=-1.0, right=1.0),
    "rloo": Published(),
    "reinforce++": Published(within_group=False),
    "gspo": Published(3e-4, 4e-4),
    "cispo": Published(1.0, 4.0),  # no lower bound; ScaleRL (arXiv 2510.13786) bounds the ratio at 5
    "sapo": Published(),
}
"""Name → settings (docs/algorithms.md)."""
