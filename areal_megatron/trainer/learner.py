"""This rank's part of a model that is trained, and its optimizer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from areal_megatron.reshard.boxes import Layout
from areal_megatron.trainer import pipeline
from areal_megatron.trainer.model import factors, tensors
from areal_megatron.trainer.optimizer import ModelOptimizer
from areal_megatron.trainer.routing import forget_load, move_biases


@dataclass
class Steps:
    """The optimizer steps of one batch."""

    before: Callable[[], None] = lambda: None
    """Called once, right before the first step is taken."""
    norms: list[float] = field(default_factory=list)
    """The gradient norms, before clipping, of the steps taken."""
    rates: list[float] = field(default_factory=list)
    """Their learning rates."""
    skipped: int = 0
    """Steps not taken because the gradient was not finite: not a number, or beyond the range of float16."""
    idle: int = 0
    """Steps not taken because there was nothing to learn, where Adam's momentum and the decay would still have moved
    the weights."""

    def before_first(self) -> None:
        if not self.norms:
            self.before()

    def finish(self) -> bool:
        """Returns whether the batch is done with, which it is not if all steps that were tried were skipped.

        `before` has been called if it is, also without any step.
        """
        if not self.norms and not self.skipped:
            self.before()
        return bool(self.norms) or not self.skipped


@dataclass(frozen=True)
class Learner:
    """The policy or the critic, with its optimizer."""

    chunks: pipeline.Chunks
    optimizer: ModelOptimizer
    adapters: Layout | None = None
    """What this rank holds of the factors of adapters, where these are trained and nothing else is."""

    def parameters(self) -> dict[str, Tensor]:
        """Returns this rank's parameters as `reshard.trainer_layout.layout` names them."""
        return tensors(self.chunks)

    def factors(self) -> dict[str, Tensor]:
        """Returns this rank's factors of adapters as `adapters` names them."""
        return factors(self.chunks)

    def gradient(self, work: Sequence[pipeline.Work], left_out: int = 0) -> float:
        """Computes the gradient of a mini-batch and returns its norm, the same on all ranks. `left_out`: its trained
        tokens without one."""
        self.accumulate(work, left_out=left_out)
        return self.optimizer.gradient_norm()

    def accumulate(self, work: Sequence[pipeline.Work], more: bool = False, left_out: int = 0) -> None:
        """Computes a gradient, in place of the one that is there; with `more`, it is added to that one."""
        # What is there has been summed over replicas, and must not be once more.
        before = [gradient.clone() for gradient in self.optimizer.gradients()] if more else []
        self.optimizer.zero_grad()
        if not more:
            forget_load(self.chunks)
        pipeline.forward_backward(self.chunks, work, left_out)
        if before:
            torch._foreach_add_(self.optimizer.gradients(), before)

    def step(self, norm: float, steps: Steps, rate: float | None = None) -> None:
        """Takes an optimizer step and records it in `steps`; skips it if `norm`, the gradient's, is not finite. `rate`:
        in place of the schedule's."""
        if math.isfinite(norm):
            steps.before_first()
            self.optimizer.step(norm, rate)
            move_biases(self.chunks)
            steps.norms.append(norm)
            steps.rates.append(self.optimizer.lr)
        else:
            steps.skipped += 1


def step_metrics(optimizer: ModelOptimizer, steps: Steps, tokens: float, start: float) -> dict[str, float]:
    """Returns the metrics of a batch that say how its steps went: the mean gradient norm and the last learning rate of
    those taken, counts, and the speed. `start`: when it began, by time.monotonic()."""
    seconds = time.monotonic() - start
    return {
        **({"grad_norm": sum(steps.norms) / len(steps.norms)} if steps.norms else {}),
        "lr": optimizer.lr,
        **({} if (scale := optimizer.loss_scale) is None else {"loss_scale": scale}),
        "skipped_steps": steps.skipped,
        "idle_steps": steps.idle,
        "trained_tokens": tokens,
        "step_s": seconds,
        "tokens_per_s": tokens / seconds,
    }
