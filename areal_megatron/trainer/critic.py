"""The critic: a value model of the policy's size, which learns the values of states from the returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from areal_megatron.checkpoint import hf
from areal_megatron.config import Config
from areal_megatron.data.trajectory import BatchPart, Trajectory
from areal_megatron.models.architecture import read_config
from areal_megatron.observe.timeline import Timeline
from areal_megatron.ppo.advantage import normalised, over_tokens
from areal_megatron.ppo.algorithm import ALGORITHMS
from areal_megatron.ppo.critic import at_the_end, explained_variance, gae, value_loss
from areal_megatron.reshard.trainer_layout import MegatronSizes, is_head, layout, without_head
from areal_megatron.trainer import pipeline
from areal_megatron.trainer.batch import MicroBatch, PPOMicroBatch
from areal_megatron.trainer.copies import to_device
from areal_megatron.trainer.learner import Learner, Steps
from areal_megatron.trainer.model import ValueModel, build_model, tensors
from areal_megatron.trainer.optimizer import ModelOptimizer
from areal_megatron.trainer.parallel import Parallel
from areal_megatron.trainer.token_sums import TokenSums, number_of

MEANS = ("value_loss", "value_clip_share", "value_mean", "return_mean")
"""Reported as means over trained tokens."""


class Critic:
    """A value model on the policy's ranks, in the policy's layout; `ppo.critic` has its settings.

    Begins with the weights of model.path and a head of zeros.
    """

    def __init__(self, config: Config, sizes: MegatronSizes, parallel: Parallel, timeline: Timeline):
        settings = config.ppo.critic
        self._gamma, self._lambda = settings.gamma, settings.gae_lambda
        self._clip = settings.clip or math.inf
        self.warmup = settings.warmup
        """The number of updates, the first ones, that train the critic alone."""
        weigh = ALGORITHMS[config.ppo.algorithm].critic
        assert weigh is not None  # the config has a critic only where the baseline is not the group
        self._weigh = weigh
        self._parallel, self._timeline = parallel, timeline
        chunks = build_model(config, sizes, parallel.device, ValueModel)
        loaded = {name: values for name, values in tensors(chunks).items() if not is_head(name)}
        held = layout(read_config(config.model.path), sizes, parallel.rank)
        hf.load(loaded, without_head(held), config.model.path)
        optimizer = replace(config.optimizer, lr=settings.lr)
        self.learner = Learner(chunks, ModelOptimizer(optimizer, chunks, config.updates * config.ppo.minibatches))

    def assess(self, part: BatchPart, minibatches: list[list[PPOMicroBatch]], in_episode: Tensor) -> dict[str, float]:
        """Sets values, returns and advantages (normalised over the batch) of the micro-batches, on the last stage.

        in_episode: [n], the trained tokens of the whole episode of each trajectory. Returns the metrics that describe
        them. Collective.
        """
        microbatches = list(chain(*minibatches))
        work = [(sampled.microbatch, partial(_values, microbatch=sampled.microbatch)) for sampled in microbatches]
        with self._timeline.device_span("values", tokens=pipeline.token_count(work)):
            values = pipeline.forward(self.learner.chunks, work)
        known = microbatches if self._parallel.is_last_stage else []
        raw, weights = ([torch.zeros(0, dtype=torch.float64, device=self._parallel.device)] for _ in range(2))
        for sampled, own, members in zip(known, values, chain(*part.members), strict=False):
            rewards, answer_of = _rewards([part.trajectories[i] for i in members])
            per_token = at_the_end(to_device(rewards, own.device), to_device(answer_of, own.device))
            advantages = gae(per_token, own, sampled.sequences, self._gamma, self._lambda)
            sampled.values, sampled.returns = own, (advantages + own).float()
            lengths = to_device(in_episode[members].numpy(), own.device)
            raw.append(advantages)
            weights.append(self._weigh(lengths[sampled.sequences]))
        # The host waits once a batch: replicas add up their moments there.
        advantages = normalised(torch.cat(raw).cpu(), torch.cat(weights).cpu(), self._parallel.sum_of_last_stages)
        again = to_device(advantages.float().numpy(), self._parallel.device)
        for sampled, own in zip(known, again.split([len(sampled.behaviour) for sampled in known]), strict=True):
            sampled.advantages = own
        return self._described(known, advantages)

    def train(
        self, minibatches: list[list[PPOMicroBatch]], teaching: list[bool], before: Callable[[], None]
    ) -> tuple[bool, dict[str, float]]:
        """Takes an optimizer step for each mini-batch from which there is anything to learn; `before` is called right
        before the first.

        Returns whether the batch is done with (`Steps.finish`), and the metrics.
        """
        sums, steps = TokenSums(), Steps(before)
        for minibatch in (each for each, teaches in zip(minibatches, teaching, strict=True) if teaches):
            work = [(sampled.microbatch, partial(self._loss, sampled=sampled, sums=sums)) for sampled in minibatch]
            with self._timeline.device_span("train critic", tokens=pipeline.token_count(work)):
                norm = self.learner.gradient(work)
            self.learner.step(norm, steps)
        self.learner.optimizer.settle()
        done = steps.finish()
        totals = sums.totals(self._parallel, ("tokens", *MEANS))
        metrics = {name: totals[name] / max(totals["tokens"], 1) for name in MEANS}
        metrics |= {"value_lr": self.learner.optimizer.lr, "value_skipped_steps": steps.skipped}
        if (scale := self.learner.optimizer.loss_scale) is not None:
            metrics["value_loss_scale"] = scale
        if steps.norms:
            metrics["value_grad_norm"] = sum(steps.norms) / len(steps.norms)
        return done, metrics

    def _loss(self, values: Tensor, sampled: PPOMicroBatch, sums: TokenSums) -> Tensor:
        current, before, returns = _values(values, sampled.microbatch), sampled.values, sampled.returns
        assert before is not None and returns is not None  # `assess` has set them
        loss = value_loss(current, before, returns, self._clip).sum().float()
        sums.add(
            {
                "tokens": number_of(current),
                "value_loss": loss,
                "value_clip_share": ((current - before).abs() > self._clip).sum(),
                "value_mean": current.sum(),
                "return_mean": returns.sum(),
            },
            {},
        )
        return loss

    def _described(self, known: list[PPOMicroBatch], advantages: Tensor) -> dict[str, float]:
        sum_over_replicas, once = self._parallel.sum_of_last_stages, torch.ones_like(advantages)
        metrics = over_tokens(advantages, once, sum_over_replicas, self._parallel.max_over_ranks)
        values, returns = torch.zeros(2, 0, dtype=torch.float64)
        if known:  # for these metrics the host waits once a batch, too
            both = torch.stack([torch.cat([getattr(each, name) for each in known]) for name in ("values", "returns")])
            values, returns = both.cpu().double()
        explained = explained_variance(values, returns, sum_over_replicas)
        return metrics if explained is None else metrics | {"explained_variance": explained}


def _rewards(trajectories: Sequence[Trajectory]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the reward of each answer, float64 [n], and the number of each trained token's answer, int64 [N].

    From an answer to the end of its trajectory the rewards add up to its return.
    """
    rewards: list[float] = []
    for t in trajectories:
        returns = [value for _, value in t.answers]
        rewards += (value - after for value, after in zip(returns, [*returns[1:], 0.0], strict=True))
    lengths = [tokens for t in trajectories for tokens, _ in t.answers]
    return np.array(rewards, np.float64), np.repeat(np.arange(len(rewards)), lengths)


def _values(values: Tensor, microbatch: MicroBatch) -> Tensor:
    """The values [N] of the states before the trained tokens, from those after each token of this rank's row [T]."""
    return microbatch.of_all_ranks(values.index_select(0, microbatch.rows))
