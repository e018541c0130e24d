"""Several adapters that are trained in turns: one is in the model and its optimizer, the others wait on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from areal_megatron.trainer.learner import Learner


class _Waiting(NamedTuple):
    """All that training an adapter goes on from, in the order of `_states`."""

    states: list[Tensor]
    gradients: list[Tensor]
    """None at all: there was no gradient to step by."""
    counters: dict[str, Any]


class Turns:
    """Whose turn it is. This rank's parts of the others are copies in the host's memory: factors, main values, moments,
    counts of steps, and the gradient if there is one."""

    def __init__(self, learner: Learner, begin: Callable[[], None]):
        """`begin` gives the factors the values that a new adapter has. The first turn is the adapter's of number 0."""
        self._learner, self._begin = learner, begin
        self._present = 0
        self._waiting: dict[int, _Waiting] = {}

    @torch.no_grad()
    def turn_to(self, adapter: int, new: bool, has_gradient: bool) -> None:
        """Brings an adapter into the model as it was left; a new one if it was never there, or with `new`. Parameters
        must be allowed to change. `has_gradient`: whether the present one has a gradient that counts."""
        optimizer = self._learner.optimizer
        if adapter == self._present and not new:
            return
        if adapter != self._present:
            gradients = [_on_host(each) for each in optimizer.gradients()] if has_gradient else []
            states = [_on_host(each) for each in self._states()]
            self._waiting[self._present] = _Waiting(states, gradients, optimizer.counters())
        self._present = adapter
        waiting = self._waiting.pop(adapter, None)
        if new or waiting is None:
            self._begin()
            optimizer.begin()
            return
        pairs = zip(
            (*self._states(), *optimizer.gradients()[: len(waiting.gradients)]),
            (*waiting.states, *waiting.gradients),
            strict=True,
        )
        for live, kept in pairs:
            live.copy_(kept)
        optimizer.set_counters(waiting.counters)

    def _states(self) -> list[Tensor]:
        return [*self._learner.factors().values(), *self._learner.optimizer.states()]


def _on_host(live: Tensor) -> Tensor:
    return live.detach().to("cpu", copy=True)
