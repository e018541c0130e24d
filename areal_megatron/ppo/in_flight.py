"""How the learning rate is scaled to the answers in flight, sampled by older policies and trained by this one.

A token that is s versions old was sampled s updates ago. In between the policy has moved by about the sum of the rates
of their steps, its path, and the KL divergence from the policy that sampled the token grows with the square of that:
divergence ≈ c · path². Each batch shows both, so that c is known at once, whatever the rate was and however many steps
ago it changed. The largest rate an update may have follows: one at which tokens as old as those in flight reach
the target and no more. Nothing is changed by it where the policy moves slowly, or where nothing is stale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from areal_megatron.config.algorithms import LEAST_FACTOR
from areal_megatron.ppo.penalty import k3

DECAY = 0.8
"""What an update counts less for with each later one: a batch alone tells c only roughly."""
RISE = 1.5
"""A factor is at most this times the one of as many updates ago as tokens are old: before, it has not been seen."""
_LARGEST = 2.0
"""Logarithms of ratios count as this at most: the mean is over a batch's tokens, and a single one may be far off."""


def sums(current: Tensor, behaviour: Tensor, entropy: Tensor, staleness: Tensor, fresh: Tensor, eta: int) -> Tensor:
    """Returns what `Seen` is made of, float64 [η + 2, 2], from the N trained tokens of a micro-batch, [N] each.

    Row 0: the number of tokens that the trained version sampled, and their divergence from the engine's
    log-probabilities; row s: the same of the tokens that are s versions old, from row η on of all older ones; last row:
    the number of all tokens, and their entropy. Sums of micro-batches add up. Nothing waits for the device.
    """
    drift = (current.double() - behaviour).clamp(-_LARGEST, _LARGEST)
    stale = staleness.clamp(max=eta)
    members = torch.stack([fresh, *(stale == age for age in range(1, eta + 1)), torch.ones_like(fresh)])
    of_row = torch.cat([k3(drift).expand(eta + 1, -1), entropy.double()[None]])
    return torch.stack([members.sum(1).double(), of_row.masked_fill(~members, 0).sum(1)], 1)


@dataclass(frozen=True)
class Seen:
    """What a mini-batch tells before the first step of its update, over all replicas."""

    fresh: tuple[float, float]
    """The number of tokens that the trained version sampled, and the sum of their divergences."""
    stale: tuple[tuple[float, float], ...]
    """The same of tokens that are 1, 2, … η versions old."""
    tokens: float
    entropy: float
    """The sum over all of its tokens."""

    @classmethod
    def of(cls, table: Tensor) -> Seen:
        """From the sums over all micro-batches, see `sums`."""
        fresh, *stale, whole = (tuple(row) for row in table.tolist())
        return cls(fresh, tuple(stale), *whole)


@dataclass(frozen=True)
class InFlight:
    """What is known of the policy's movement, after any number of updates. Starts with one that knows nothing.

    Example:
        known, divergence = known.after(seen)
        factor = known.factor(0.05, scheduled=4 * 1e-5, eta=8)  # of four steps with a rate of 1e-5
        known = known.moved(4 * 1e-5 * factor, factor, eta=8)
    """

    paths: tuple[float, ...] = ()
    """The sum of the rates of each of the last η updates, the last one first."""
    fresh: tuple[float, float] = (0.0, 0.0)
    """Tokens and divergence of fresh tokens: what engine and trainer differ by without any step in between."""
    divergence: float = 0.0
    """A decaying sum over the updates of the divergence per token that steps have made …"""
    path: float = 0.0
    """… of the mean of path² over tokens …"""
    age: float = 0.0
    """… of the mean of staleness² …"""
    entropy: float = 0.0
    """… of the entropy per token …"""
    count: float = 0.0
    """… and of 1."""
    last: float = 1.0
    """The factor of the last update."""

    def after(self, seen: Seen) -> tuple[InFlight, float]:
        """Returns what is known with another mini-batch, and the mean divergence of its tokens by steps."""
        if not seen.tokens or not math.isfinite(seen.entropy + seen.fresh[1] + sum(d for _, d in seen.stale)):
            return self, 0.0
        fresh = self.fresh
        if seen.fresh[0]:
            fresh = tuple(DECAY * before + now for before, now in zip(self.fresh, seen.fresh, strict=True))
        noise = fresh[1] / fresh[0] if fresh[0] else 0.0
        known = seen.stale[: len(self.paths)]  # older ones, of another run's policy, tell nothing of this one's path
        divergence = sum(d - noise * n for n, d in known) / seen.tokens
        path = sum(n * sum(self.paths[: s + 1]) ** 2 for s, (n, _) in enumerate(known)) / seen.tokens
        age = sum(n * (s + 1) ** 2 for s, (n, _) in enumerate(seen.stale)) / seen.tokens
        found = replace(
            self,
            fresh=fresh,
            divergence=DECAY * self.divergence + divergence,
            path=DECAY * self.path + path,
            age=DECAY * self.age + age,
            entropy=DECAY * self.entropy + seen.entropy / seen.tokens,
            count=DECAY * self.count + 1,
        )
        return found, divergence

    def factor(self, target: float, scheduled: float, eta: int) -> float:
        """Returns the factor, from LEAST_FACTOR to 1, by which an update's rates are to be scaled.

        target: the divergence per token as a share of the entropy; scheduled: the sum of the rates of its steps. While
        fewer than η updates have been made, tokens are taken to become as old as η allows. It falls at once, and rises
        so slowly that what it does is seen in time.
        """
        if not scheduled:
            return self.last
        age, fitting = eta**2 if len(self.paths) < eta else self.age / max(self.count, 1), 1.0
        if self.divergence > 0 and self.path > 0 and age > 0:
            largest = math.sqrt(target * self.entropy / self.count * self.path / self.divergence / age)
            fitting = max(LEAST_FACTOR, largest / scheduled)
        return min(1.0, RISE ** (1 / max(math.sqrt(age), 1.0)) * self.last, fitting)

    def moved(self, path: float, factor: float, eta: int) -> InFlight:
        """Returns what is known after an update whose steps had rates of this sum, with this factor."""
        return replace(self, paths=(path, *self.paths)[:eta], last=factor)


def restored(state: Mapping[str, Any]) -> InFlight:
    """Returns what a checkpoint has kept, see dataclasses.asdict."""
    own: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in state.items()}
    return InFlight(**own)
