"""How long optimizer steps may be for how stale answers are, as the updates of a run have shown it.

The policy's KL divergence from the samples grows with the square of staleness · rate (areal_megatron/ppo/in_flight.py):
with twice as stale answers optimizer.staleness_kl allows half the rate. Pure; imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_megatron.config import Config, ConfigError
from areal_megatron.config.algorithms import LEAST_FACTOR


def age(staleness: Mapping[int, int]) -> float:
    """Returns the root mean square of the versions between admission and training; `staleness`: versions → answers."""
    return math.sqrt(sum(n * versions**2 for versions, n in staleness.items()) / sum(staleness.values()))


@dataclass(frozen=True)
class StepLimit:
    """What staleness costs a run's steps; nothing, unless a run has shown it."""

    reach: float = math.inf
    """The root mean square of the staleness up to which rates need not be scaled down."""

    def share(self, staleness: Mapping[int, int]) -> float:
        """Returns what part of the scheduled rate is left, from LEAST_FACTOR to 1; `staleness` as in `age`."""
        stale = age(staleness)
        return 1.0 if stale <= self.reach else max(self.reach / stale, LEAST_FACTOR)

    @classmethod
    def of(cls, updates: Sequence[Mapping[str, Any]], trained: Config, planned: Config) -> StepLimit:
        """From the update lines of metrics.jsonl of a run with the config `trained`, for the rate of `planned`.

        Raises ConfigError where they do not say what staleness costs.
        """
        target = planned.optimizer.staleness_kl
        if not target:
            raise ConfigError("--steps-of: optimizer.staleness_kl is 0, so that staleness shortens no step")
        needed = ("kl_staleness", "entropy", "staleness_histogram")
        stale = [line for line in updates if line.get("staleness_mean")]
        told = [line for line in stale if all(line.get(key) is not None for key in needed)]
        staleness: dict[int, int] = {}
        for line in told:
            for versions, count in line["staleness_histogram"].items():
                staleness[int(versions)] = staleness.get(int(versions), 0) + count
        if not told:
            raise ConfigError("--steps-of: that run has trained no stale answers, which would say what they cost")
        divergence, entropy = (sum(line[key] for line in told) / len(told) for key in ("kl_staleness", "entropy"))
        if divergence <= 0:
            return cls(math.inf)
        factor = sum(line.get("lr_factor") or 1.0 for line in told) / len(told)
        rate, own = (config.optimizer.lr * config.ppo.minibatches for config in (planned, trained))
        return cls(age(staleness) * factor * own / rate * math.sqrt(target * entropy / divergence))
