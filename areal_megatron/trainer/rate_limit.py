"""Scales the learning rate of each update to what is in flight (ppo/in_flight.py), alike on all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_megatron.config import Config
from areal_megatron.ppo.in_flight import Seen
from areal_megatron.trainer.learner import Steps
from areal_megatron.trainer.optimizer import ModelOptimizer
from areal_megatron.trainer.parallel import Parallel


class RateLimit:
    """Decides on a factor once an update, when the first gradient is there: it needs no pass over the data.

    Example:
        limit.begin()
        ...  # a forward pass, which adds to limit.seen
        limit.before_step(planned=4)
        ...  # the steps
        metrics = limit.end(steps)
    """

    def __init__(self, config: Config, optimizer: ModelOptimizer, parallel: Parallel):
        self._target, self._eta = config.optimizer.staleness_kl, config.rollout.max_staleness
        self._optimizer, self._parallel = optimizer, parallel
        self._divergence = 0.0
        self.seen: list[Tensor] | None = None
        """Gets the sums of each micro-batch of the last stage, until the factor is decided; None from then on, and
        where nothing can be stale."""

    def begin(self) -> None:
        """Begins an update."""
        self.seen = [] if self._eta else None
        self._divergence, self._optimizer.factor = 0.0, 1.0

    def before_step(self, planned: int) -> None:
        """Sets the factor of this update's steps, of which `planned` may follow, before the first one. Collective."""
        if self.seen is None:
            return
        table = torch.zeros(self._eta + 2, 2, dtype=torch.float64)
        if self.seen:
            table = torch.stack(self.seen).sum(0).cpu()
        self.seen = None
        optimizer, found = self._optimizer, Seen.of(self._parallel.sum_of_last_stages(table))
        optimizer.in_flight, self._divergence = optimizer.in_flight.after(found)
        if self._target:
            scheduled = planned * optimizer.scheduled_lr
            optimizer.factor = optimizer.in_flight.factor(self._target, scheduled, self._eta)

    def end(self, steps: Steps) -> dict[str, float]:
        """Takes note of the steps taken, and returns the metrics. Collective."""
        if not self._eta:
            return {}
        self.before_step(planned=0)  # where no step was tried
        optimizer = self._optimizer
        optimizer.in_flight = optimizer.in_flight.moved(sum(steps.rates), optimizer.factor, self._eta)
        factor = {"lr_factor": self._optimizer.factor} if self._target else {}
        return {"kl_staleness": self._divergence, **factor}
