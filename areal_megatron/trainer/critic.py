"""The critic: a value model of the policy's size, which says what a state is worth and learns it from the returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from areal_megatron.checkpoint import hf
from areal_megatron.config import Config
from areal_megatron.data.trajectory import BatchPart
from areal_megatron.models.architecture import read_config
from areal_megatron.observe.timeline import Timeline
from areal_megatron.ppo.advantage import normalised, over_tokens
from areal_megatron.ppo.algorithm import ALGORITHMS
from areal_megatron.ppo.critic import at_the_end, explained_variance, gae, value_loss
from areal_megatron.reshard.trainer_layout import MegatronSizes, is_head, layout, without_head
from areal_megatron.trainer import pipeline
from areal_megatron.trainer.batch import MicroBatch, PPOMicroBatch
from areal_megatron.trainer.learner import Learner, Steps
from areal_megatron.trainer.model import ValueModel, build_model, tensors
from areal_megatron.trainer.optimizer import ModelOptimizer
from areal_megatron.trainer.parallel import Parallel
from areal_megatron.trainer.token_sums import TokenSums

MEANS = ("value_loss", "value_clip_share", "value_mean", "return_mean")
"""Reported as means over trained tokens."""


class Critic:
    """It lies on the policy's ranks in the policy's layout, and begins with the weights of model.path and a head of
    zeros.

    `ppo.critic` has its settings.
    """

    def __init__(self, config: Config, sizes: MegatronSizes, parallel: Parallel, timeline: Timeline):
        settings = config.ppo.critic
        self._gamma, self._lambda = settings.gamma, settings.gae_lambda
        self._clip = settings.clip or math.inf
        self.warmup = settings.warmup
        """Updates that train the critic alone."""
        self._counted = ALGORITHMS[config.ppo.algorithm].critic
        self._parallel, self._timeline = parallel, timeline
        chunks = build_model(config, sizes, parallel.device, ValueModel)
        loaded = {name: values for name, values in tensors(chunks).items() if not is_head(name)}
        held = layout(read_config(config.model.path), sizes, parallel.rank)
        hf.load(loaded, without_head(held), config.model.path)
        optimizer = replace(config.optimizer, lr=settings.lr)
        self.learner = Learner(chunks, ModelOptimizer(optimizer, chunks, config.updates * config.ppo.minibatches))

    def assess(self, part: BatchPart, minibatches: list[list[PPOMicroBatch]]) -> dict[str, float]:
        """Sets values, returns and, normalised over the batch, advantages of the micro-batches, on the last stage.

        Gives what is reported about them. Collective.
        """
        every = [sampled for minibatch in minibatches for sampled in minibatch]
        members = [microbatch for minibatch in part.minibatches for microbatch in minibatch]
        with self._timeline.span("values", tokens=_tokens(every)):
            work = [(sampled.microbatch, partial(_values, microbatch=sampled.microbatch)) for sampled in every]
            values = pipeline.forward(self.learner.chunks, work)
        known = every if self._parallel.is_last_stage else []
        raw, weights = [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.float64)]
        for sampled, own, of in zip(known, values, members, strict=False):
            rewards = torch.tensor([part.trajectories[i].reward for i in of], dtype=torch.float64, device=own.device)
            final = at_the_end(rewards, sampled.sequences)
            found = gae(final, own, sampled.sequences, self._gamma, self._lambda)
            sampled.values, sampled.returns = own, (found + own).float()
            lengths = sampled.sequences.bincount()[sampled.sequences].double()
            raw.append(found.cpu())
            weights.append(self._counted(lengths).cpu())
        advantages = normalised(torch.cat(raw), torch.cat(weights), self._parallel.sum_of_last_stages)
        for sampled, own in zip(known, advantages.split([len(sampled.values) for sampled in known]), strict=True):
            sampled.advantages = own.float().to(self._parallel.device)
        return self._described(known, advantages)

    def train(
        self, minibatches: list[list[PPOMicroBatch]], before: Callable[[], None]
    ) -> tuple[bool, dict[str, float]]:
        """An optimizer step for each mini-batch, `before` right before the first: whether any was taken, and what is
        reported."""
        tally, steps = TokenSums(), Steps(before)
        for minibatch in minibatches:
            work = [(e.microbatch, partial(self._loss, sampled=e, tally=tally)) for e in minibatch]
            with self._timeline.span("train critic", tokens=_tokens(minibatch)):
                norm = self.learner.gradient(work)
            self.learner.step(norm, steps)
        self.learner.optimizer.settle()
        totals = tally.totals(self._parallel, ("tokens", *MEANS))
        metrics = {name: totals[name] / max(totals["tokens"], 1) for name in MEANS}
        if steps.norms:
            metrics["value_grad_norm"] = sum(steps.norms) / len(steps.norms)
        return bool(steps.norms), metrics | {
            "value_lr": self.learner.optimizer.lr,
            "value_skipped_steps": steps.skipped,
        }

    def _loss(self, values: Tensor, sampled: PPOMicroBatch, tally: TokenSums) -> Tensor:
        current = _values(values, sampled.microbatch)
        loss = value_loss(current, sampled.values, sampled.returns, self._clip).sum()
        tally.add(
            {
                "tokens": torch.tensor(len(current)),
                "value_loss": loss,
                "value_clip_share": ((current - sampled.values).abs() > self._clip).sum(),
                "value_mean": current.sum(),
                "return_mean": sampled.returns.sum(),
            },
            {},
        )
        return loss

    def _described(self, known: list[PPOMicroBatch], advantages: Tensor) -> dict[str, float]:
        nothing, parallel = torch.zeros(0), self._parallel
        values, returns = (
            torch.cat([nothing, *(own.cpu() for own in column)]).double()
            for column in ([e.values for e in known], [e.returns for e in known])
        )
        found = over_tokens(
            advantages, torch.ones_like(advantages), parallel.sum_of_last_stages, parallel.max_over_ranks
        )
        explained = explained_variance(values, returns, parallel.sum_of_last_stages)
        return found if explained is None else found | {"explained_variance": explained}


def _values(values: Tensor, microbatch: MicroBatch) -> Tensor:
    """Of the states before the trained tokens [N], from those after each token of the row."""
    return values.index_select(0, microbatch.rows)


def _tokens(microbatches: list[PPOMicroBatch]) -> int:
    return sum(sampled.microbatch.tokens.numel() for sampled in microbatches)
