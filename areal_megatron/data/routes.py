"""Routes of trajectories: the experts that an engine chose for their tokens. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from areal_megatron.config import ConfigError
from areal_megatron.data.trajectory import Trajectory

UNKNOWN = -1
"""The number of no expert: the router chooses."""


@dataclass(frozen=True)
class Routing:
    """The dimensions of a model's routes."""

    layers: int
    experts: int
    chosen: int
    """The number of experts that a layer sends a token to (k)."""
    dense: int = 0
    """The number of layers without experts, which come first. What routes say of them is of no account."""

    def joined(self, trajectories: Sequence[Trajectory]) -> np.ndarray | None:
        """Returns the routes of all tokens, int16 [tokens, layers, k], or None if no token has any.

        They are UNKNOWN at tokens without routes. Raises ConfigError for routes of another model.
        """
        if not any(len(t.routes) for t in trajectories):
            return None
        joined = np.full((sum(t.length for t in trajectories), self.layers, self.chosen), UNKNOWN, np.int16)
        start = 0
        for t in trajectories:
            if problem := self.problem(t):
                raise ConfigError(f"trajectory {t.uid}: {problem}")
            own = t.routes.reshape(-1, self.layers, self.chosen)
            joined[start : start + len(own)] = own
            start += t.length
        return joined

    def problem(self, trajectory: Trajectory) -> str:
        """Returns why the routes of a trajectory are none of this model; "" if they may be."""
        routes, length = trajectory.routes, trajectory.length
        rows, rest = divmod(len(routes), self.layers * self.chosen)
        least, most = routes.min(initial=0), routes.max(initial=0)
        if not rest and rows <= length and least >= 0 and most < self.experts:
            columns = np.moveaxis(routes.reshape(rows, self.layers, self.chosen)[:, self.dense :], 2, 0).copy()
            twice = any((one == other).any() for one, other in combinations(columns, 2))
            return "a layer sends a token to the same expert twice" if twice else ""
        return (
            f"{len(routes)} expert numbers up to {most} for {length} tokens are of another model: this one has "
            f"{self.layers} layers that choose {self.chosen} of {self.experts}"
        )
