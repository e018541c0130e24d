"""One PPO update of the policy, and of the critic if there is one (paper, Sections 4 and 5)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress
from operator import not_

import numpy as np
import torch
from torch import Tensor

from areal_megatron.config import Config
from areal_megatron.data.trajectory import BatchPart, LossPart
from areal_megatron.observe.timeline import Timeline
from areal_megatron.ppo import diagnostics
from areal_megatron.ppo.advantage import Rewards, over_tokens
from areal_megatron.ppo.algorithm import ALGORITHMS, FINE_TUNING, token_weights
from areal_megatron.ppo.correction import within_second_moment
from areal_megatron.ppo.loss import effective_share
from areal_megatron.ppo.penalty import COVARIANT, most_covariant
from areal_megatron.trainer import pipeline
from areal_megatron.trainer.batch import PPOMicroBatch, RowPart, pack, pack_trajectories
from areal_megatron.trainer.critic import Critic
from areal_megatron.trainer.learner import Learner, Steps, step_metrics
from areal_megatron.trainer.logprobs import Vocabulary
from areal_megatron.trainer.model import policy_of
from areal_megatron.trainer.objective import Objective
from areal_megatron.trainer.parallel import Parallel
from areal_megatron.trainer.rate_limit import RateLimit
from areal_megatron.trainer.reference import Reference
from areal_megatron.trainer.residual import Residual
from areal_megatron.trainer.routing import balances, routing_of
from areal_megatron.trainer.token_sums import TokenSums
from areal_megatron.trainer.update_size import UpdateSize

COUNTS = ("tokens", "left_out", "compared", "difference", "weight", "weight_squared")
MAXIMA = ("ratio_max", "logprob_diff_max", *diagnostics.MAXIMA)
MEANS = (
    "loss",
    "clip_share",
    "dual_clip_share",
    "capped_share",
    "masked_share",
    "ratio_mean",
    "kl",
    "kl_proximal",
    "kl_step",
    "entropy",
)
"""Reported as means over the trained tokens that were computed."""


@dataclass(frozen=True)
class BatchResult:
    """The outcome of a PPO update, the same on all ranks."""

    version: int
    """The version that was trained (i)."""
    applied: bool
    """False if every step that was tried was skipped because its gradient was not finite: the weights are unchanged.
    While the critic warms up, the critic's steps count. A batch from which there is nothing to learn is applied, with
    the same weights as before."""
    metrics: dict[str, float]
    """Means over trained tokens, the mean gradient norm and the last learning rate of the steps taken, and counts.
    Answers that are left out, since they have no gradient, count in `loss`, `trained_tokens` and `zero_advantage_share`
    alone.
    `logprob_diff_max`, `logprob_diff_p99` and `logprob_diff_mean` compare trainer and engine, and are present only if
    the batch has tokens that were sampled by the trained version."""
    probe: np.ndarray
    """float32 [part.probe_tokens]: the log-probabilities of the probe's compared tokens under the version that was
    trained, at temperature 1."""


@dataclass(frozen=True)
class Weighed:
    """What the weights of a replica's n trajectories in a loss depend on; float64 [n] each."""

    trained: Tensor
    """Their trained tokens."""
    in_episode: Tensor
    """The trained tokens of the whole episode of each, whose other samples may be another replica's."""

    @classmethod
    def of(cls, part: BatchPart, parallel: Parallel) -> Weighed:
        """Counts the tokens. Collective."""
        trained = torch.tensor([t.loss_mask.sum() for t in part.trajectories], dtype=torch.float64)
        episodes = torch.tensor(part.episode_of)
        sums = torch.zeros(part.episodes, dtype=torch.float64).index_add(0, episodes, trained)
        return cls(trained, parallel.sum_over_replicas(sums)[episodes])


class PPO:
    """Trains the policy on batches of trajectories; all ranks of the pool call the same methods."""

    def __init__(
        self,
        config: Config,
        policy: Learner,
        critic: Critic | None,
        reference: Reference | None,
        vocabulary: Vocabulary,
        parallel: Parallel,
        part: RowPart,
        residual: Residual,
        timeline: Timeline,
    ):
        self._config, self._policy, self._critic, self._reference = config, policy, critic, reference
        self._parallel, self._part, self._residual, self._timeline = parallel, part, residual, timeline
        self._objective = Objective(policy_of(policy.chunks), vocabulary, config.ppo, config.rollout.max_staleness)
        self._algorithm = ALGORITHMS[config.ppo.algorithm]
        self._routing = routing_of(policy.chunks[0].config)
        self._balances_experts = balances(policy.chunks[0].config)
        self._limit = RateLimit(config, policy.optimizer, parallel)

    def update(self, part: BatchPart, before_step: Callable[[], None] = lambda: None) -> BatchResult:
        """Makes one PPO update on this replica's part of the batch: proximal log-probabilities, then mini-batches.

        `before_step` is called right before parameters change for the first time.
        """
        start = time.monotonic()
        self._residual.begin()
        probe, moved = self._probe(part), UpdateSize(self._policy.optimizer)
        sums, steps = TokenSums(), Steps(before_step)
        minibatches, teaching, metrics = self._assess(part)
        minibatches, left_out = map(list, zip(*map(_parted, minibatches, teaching), strict=True))
        self._set_proximal(minibatches)
        self._set_reference(minibatches)
        warming_up = self._critic and part.version < self._critic.warmup
        planned = sum(map(any, teaching))
        self._limit.begin()
        for minibatch, teaches, absent in zip(minibatches, teaching, left_out, strict=True):
            loss = partial(self._objective.ppo, taken=len(steps.norms), sums=sums, seen=self._limit.seen)
            work = [(sampled.microbatch, partial(loss, sampled=sampled)) for sampled in minibatch]
            if any(teaches) and not warming_up:
                tokens = sum(len(sampled.behaviour) for sampled in absent)
                sums.add({"left_out": torch.full((), tokens, device=self._parallel.device)}, {})
                self._step(work, sum(len(sampled.microbatch.rows) for sampled in absent), steps, planned)
            else:
                pipeline.forward(self._policy.chunks, work)  # for the metrics only
                steps.idle += not warming_up
        self._policy.optimizer.settle()
        metrics |= self._limit.end(steps)
        applied = not warming_up and steps.finish()
        if self._critic:
            before = (lambda: None) if applied else before_step
            learned, critic_metrics = self._critic.train(minibatches, [*map(any, teaching)], before)
            applied, metrics = learned if warming_up else applied, metrics | critic_metrics
        metrics |= self._ppo_metrics(sums, steps, start) | {"update_size": moved.relative(self._parallel)}
        return BatchResult(part.version, applied, metrics, probe)

    def logprobs(self, part: BatchPart) -> Tensor:
        """Returns the log-probability of every trained token of the part under the present weights, float32 [N].

        They are in the order of the micro-batches; [0] on other stages than the last. Nothing is trained.
        """
        minibatches, _ = self._microbatches(part, Weighed.of(part, self._parallel), [0.0] * len(part.trajectories))
        found = self._logprobs("logprobs", list(chain(*minibatches)))
        return torch.cat([torch.zeros(0, device=self._parallel.device), *found])

    def gradient(self, asked: LossPart, learns: bool = True, more: bool = False) -> tuple[dict[str, float], np.ndarray]:
        """Computes the gradient of the loss of given samples for a later step, added with `more` to the one that is
        there; without `learns`, the loss alone.

        Returns means over trained tokens, of which `loss` is what is minimised, and float32 [asked.tokens]: the
        log-probability of each trained token under the present weights. The same on all ranks.
        """
        part, sums, tuned = asked.part, TokenSums(), asked.loss == FINE_TUNING
        [minibatch], _ = self._microbatches(part, Weighed.of(part, self._parallel), asked.advantages, asked)
        self._residual.begin()
        if not tuned:
            self._set_proximal([minibatch])
            self._set_reference([minibatch])
        loss = partial(self._objective.likelihood if tuned else partial(self._objective.ppo, taken=0), sums=sums)
        work = [(sampled.microbatch, partial(loss, sampled=sampled)) for sampled in minibatch]
        with self._timeline.device_span("train" if learns else "logprobs", tokens=pipeline.token_count(work)):
            if learns:
                self._policy.accumulate(work, more)
            else:
                pipeline.forward(self._policy.chunks, work)
        if tuned:
            totals = sums.totals(self._parallel, ("tokens", "loss"))
            metrics = {"loss": totals["loss"] / max(totals["tokens"], 1)}
        else:
            metrics, totals = self._token_metrics(sums)
        return metrics | {"trained_tokens": totals["tokens"]}, self._in_place(asked, minibatch)

    def step(self, rate: float | None, before_step: Callable[[], None]) -> tuple[bool, dict[str, float]]:
        """Takes an optimizer step by the gradient that is there; returns whether it was finite, so that the weights
        have changed, and metrics. `rate`: in place of the schedule's. `before_step` is called right before parameters
        change."""
        start, steps = time.monotonic(), Steps(before_step)
        self._policy.step(self._policy.optimizer.gradient_norm(), steps, rate)
        self._policy.optimizer.settle()
        found = step_metrics(self._policy.optimizer, steps, 0, start)
        return bool(steps.norms), {name: found[name] for name in found if "tokens" not in name}

    def _in_place(self, asked: LossPart, minibatch: Sequence[PPOMicroBatch]) -> np.ndarray:
        """Returns the log-probabilities of all replicas' trained tokens, in the order of the samples."""
        found = torch.zeros(asked.tokens, dtype=torch.float64)
        if self._parallel.is_last_stage:
            for bundles, sampled in zip(asked.part.minibatches[0], minibatch, strict=True):
                members = [*chain(*bundles)]
                counts = [len(asked.advantages[i]) for i in members]
                assert sampled.current is not None  # as the loss has been computed
                for i, own in zip(members, sampled.current.cpu().double().split(counts), strict=True):
                    found[asked.at[i] : asked.at[i] + len(own)] = own
        return self._parallel.sum_of_last_stages(found).float().numpy()

    def _step(self, work: Sequence[pipeline.Work], left_out: int, steps: Steps, planned: int) -> None:
        with self._timeline.device_span("train", tokens=pipeline.token_count(work)):
            gradient_norm = self._policy.gradient(work, left_out)
        self._limit.before_step(planned)
        self._policy.step(gradient_norm, steps)

    def _ppo_metrics(self, sums: TokenSums, steps: Steps, start: float) -> dict[str, float]:
        metrics, totals = self._token_metrics(sums)
        return metrics | step_metrics(self._policy.optimizer, steps, totals["tokens"] + totals["left_out"], start)

    def _token_metrics(self, sums: TokenSums) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the metrics of trained tokens, and the totals over them."""
        means = (*MEANS, "kl_reference") if self._config.ppo.penalty.kl else MEANS
        names = (*COUNTS, *means, *diagnostics.SUMS, *diagnostics.GROUP_SUMS)
        watched = self._residual.add_to(sums)
        totals = sums.totals(self._parallel, names, (*MAXIMA, *watched))
        share = effective_share(totals["weight"], totals["weight_squared"], totals["tokens"])
        metrics = {"ratio_max": totals["ratio_max"], "effective_share": share, **diagnostics.metrics(totals)}
        if totals["tokens"]:
            metrics["weight_p99"] = sums.quantile(self._parallel, "weight", 0.99, totals["tokens"])
        if totals["compared"]:
            metrics["logprob_diff_p99"] = sums.quantile(self._parallel, "difference", 0.99, totals["compared"])
            metrics["logprob_diff_max"] = totals["logprob_diff_max"]
            metrics["logprob_diff_mean"] = totals["difference"] / totals["compared"]
        metrics |= {name: totals[name] for name in watched}
        per_token = {name: totals[name] / max(totals["tokens"], 1) for name in means}
        per_token["loss"] = totals["loss"] / max(totals["tokens"] + totals["left_out"], 1)
        return metrics | per_token, totals

    def _assess(self, part: BatchPart) -> tuple[list[list[PPOMicroBatch]], list[list[bool]], dict[str, float]]:
        """Returns the micro-batches of each mini-batch, with advantages, whether there is anything to learn from each
        micro-batch, and metrics that describe the advantages.

        A critic's advantages are known on the last stage only.
        """
        weighed = Weighed.of(part, self._parallel)
        if self._critic:
            minibatches, teaching = self._microbatches(part, weighed, [0.0] * len(part.trajectories))
            return minibatches, teaching, self._critic.assess(part, minibatches, weighed.in_episode)
        advantages, described = self._advantages(part)
        return *self._microbatches(part, weighed, advantages), described

    def _microbatches(
        self,
        part: BatchPart,
        weighed: Weighed,
        advantages: Sequence[float | np.ndarray],
        asked: LossPart | None = None,
    ) -> tuple[list[list[PPOMicroBatch]], list[list[bool]]]:
        """Returns the micro-batches of each mini-batch, and whether there is anything to learn from each of them. The
        weights that are `asked` for take the place of the algorithm's."""
        minibatches, teaching = [], []
        for minibatch, members in zip(part.minibatches, part.members, strict=True):
            weights, teaches = self._weights(members, weighed, advantages)
            if asked and asked.weights:  # the gradient is divided by the number of trained tokens
                weights = {i: asked.tokens * asked.weights[i] for i in chain(*members)}
            elif asked and asked.loss == FINE_TUNING:
                weights = dict.fromkeys(chain(*members), 1.0)
            minibatches.append([self._pack(part, bundles, advantages, weights) for bundles in minibatch])
            teaching.append(teaches)
        return minibatches, teaching

    def _pack(
        self,
        part: BatchPart,
        bundles: list[list[int]],
        advantages: Sequence[float | np.ndarray],
        weights: Mapping[int, float | np.ndarray],
    ) -> PPOMicroBatch:
        members = [*chain(*bundles)]
        return pack_trajectories(
            [part.trajectories[i] for i in members],
            [advantages[i] for i in members],
            [weights[i] for i in members],
            version=part.version,
            kv_policy=self._config.rollout.kv_policy,
            part=self._part,
            routing=self._routing,
            bundles=[len(bundle) for bundle in bundles],
            taught=self._config.ppo.penalty.asks_teacher,
            top_k=self._config.ppo.penalty.top_k,
        )

    def _advantages(self, part: BatchPart) -> tuple[list[np.ndarray], dict[str, float]]:
        """Returns the advantage of every trained token of each trajectory, and metrics that describe them."""
        answers = [t.answers for t in part.trajectories]
        lengths, returns = zip(*chain(*answers), strict=True)
        counts, trained = torch.tensor([len(own) for own in answers]), torch.tensor(lengths)
        parallel, advantages = self._parallel, torch.zeros(len(trained), dtype=torch.float64)
        if self._config.ppo.rewards:
            group, episode = (torch.tensor(of).repeat_interleave(counts) for of in (part.group_of, part.episode_of))
            values = torch.tensor(returns, dtype=torch.float64)
            rewards = Rewards(values, trained, group, part.groups, episode, part.episodes)
            advantages = self._algorithm.advantages(rewards, parallel.sum_over_replicas)
        described = over_tokens(advantages, trained, parallel.sum_over_replicas, parallel.max_over_ranks)
        of_tokens = advantages.repeat_interleave(trained)
        tokens = torch.stack([own.sum() for own in trained.split(counts.tolist())])
        return [own.numpy() for own in of_tokens.split(tokens.tolist())], described

    def _weights(
        self, microbatches: list[list[int]], weighed: Weighed, advantages: Sequence[float | np.ndarray]
    ) -> tuple[dict[int, float], list[bool]]:
        """Returns the weight in the loss of each token of a mini-batch's trajectories, which are this replica's, and
        whether the losses of each micro-batch, of all replicas, have a gradient.

        None has without trained tokens in the mini-batch. Where one has, all have if `ppo.all_count`, or if experts are
        balanced, since routers learn from all tokens.
        """
        members = [*chain(*microbatches)]
        own, whole = weighed.trained[members], weighed.in_episode[members]
        uneven = torch.tensor([any(np.any(advantages[i]) for i in microbatch) for microbatch in microbatches])
        counts = torch.cat([torch.stack([own.sum(), (own / whole.clamp(min=1)).sum()]), uneven.double()])
        tokens, episodes, *unequal = self._parallel.sum_over_replicas(counts).tolist()
        longest = self._config.rollout.max_new_tokens
        weights = token_weights(self._algorithm.mean, whole, tokens, episodes, longest)
        ppo = self._config.ppo
        every = ppo.all_have_gradients or (any(unequal) and (ppo.all_count or self._balances_experts))
        teaches = [tokens > 0 and bool(every or count) for count in unequal]
        return dict(zip(members, weights.tolist(), strict=True)), teaches

    def _set_proximal(self, minibatches: list[list[PPOMicroBatch]]) -> None:
        """Sets the proximal log-probabilities that the objective needs, and what is chosen by them in each mini-batch.

        With the decoupled objective the first mini-batch needs none, since the current policy is the proximal one until
        the first step; M2PO and KL-Cov have to know them before the loss, and need all.
        """
        settings = self._config.ppo
        threshold, covariant = settings.correction.m2po, COVARIANT in settings.penalty.coefficients
        if settings.objective == "naive":
            for sampled in chain(*minibatches):
                sampled.proximal = sampled.behaviour
        elif settings.objective == "decoupled":
            asked = [e for minibatch in minibatches[0 if threshold or covariant else 1 :] for e in minibatch]
            for sampled, logprobs in zip(asked, self._logprobs("proximal", asked), strict=False):
                sampled.proximal = logprobs
        for minibatch in minibatches:
            if threshold:
                self._mask(minibatch, threshold)
            if covariant:
                self._mark(minibatch, settings.penalty.kl_cov_share)

    def _probe(self, part: BatchPart) -> np.ndarray:
        """Returns BatchResult.probe, the same on all ranks. Each replica scores its own excerpts."""
        if not part.probe_tokens:
            return np.zeros(0, np.float32)
        places = [np.flatnonzero(excerpt.compared) for excerpt in part.probe]
        row = pack([excerpt.tokens for excerpt in part.probe], places, self._part)
        rows = [row] + [pack([], [], self._part) for _ in range(self._config.trainer.microbatch_multiple - 1)]
        work = [(row, partial(self._objective.logprobs, microbatch=row, written=True)) for row in rows]
        with self._timeline.device_span("probe", tokens=pipeline.token_count(work)):
            found = pipeline.forward(self._policy.chunks, work)
        scored = torch.zeros(part.probe_tokens, dtype=torch.float64)
        if self._parallel.is_last_stage:
            own = found[0].cpu().double().split([len(place) for place in places])
            for excerpt, logprobs in zip(part.probe, own, strict=True):
                scored[excerpt.at : excerpt.at + len(logprobs)] = logprobs
        return self._parallel.sum_of_last_stages(scored).float().numpy()

    def _set_reference(self, minibatches: list[list[PPOMicroBatch]]) -> None:
        if not self._reference:
            return
        asked = list(chain(*minibatches))
        rows = [sampled.microbatch for sampled in asked]
        with self._timeline.device_span("reference", tokens=sum(row.tokens.numel() for row in rows)):
            found = self._reference.logprobs(rows)
        for sampled, logprobs in zip(asked, found, strict=False):
            sampled.reference = logprobs

    def _logprobs(self, span: str, microbatches: list[PPOMicroBatch]) -> list[Tensor]:
        """The log-probabilities of each micro-batch's trained tokens under the present weights.

        [] on other stages than the last.
        """
        if not microbatches:
            return []
        rows = [sampled.microbatch for sampled in microbatches]
        work = [(row, partial(self._objective.logprobs, microbatch=row)) for row in rows]
        with self._timeline.device_span(span, tokens=pipeline.token_count(work)):
            return pipeline.forward(self._policy.chunks, work)

    def _mask(self, minibatch: list[PPOMicroBatch], threshold: float) -> None:
        """Masks the tokens that M2PO leaves out of the mini-batch, over all replicas. Collective."""
        choose = partial(within_second_moment, threshold=threshold)
        for sampled, kept in self._chosen(minibatch, choose, lambda e: _proximal(e) - e.behaviour):
            sampled.kept = kept

    def _mark(self, minibatch: list[PPOMicroBatch], share: float) -> None:
        """Marks the tokens of the mini-batch that KL-Cov penalises, over all replicas. Collective."""
        choose = partial(most_covariant, share=share)
        for sampled, own in self._chosen(minibatch, choose, lambda e: e.advantages, _proximal):
            sampled.covariant = own

    def _chosen(
        self, minibatch: list[PPOMicroBatch], choose: Callable[..., Tensor], *columns: Callable[[PPOMicroBatch], Tensor]
    ) -> Iterator[tuple[PPOMicroBatch, Tensor]]:
        """The micro-batches, on the last stage, with what `choose` returns for each of their tokens.

        It is asked once, for the columns of the whole mini-batch, and reduces over all replicas. Collective.
        """
        known = minibatch if self._parallel.is_last_stage else []
        nothing = torch.zeros(0, device=self._parallel.device)
        joined = (torch.cat([nothing, *map(column, known)]) for column in columns)
        chosen = choose(*joined, reduce=self._parallel.sum_of_last_stages)
        return zip(known, chosen.split([len(sampled.behaviour) for sampled in known]), strict=True)


def _parted(minibatch: list[PPOMicroBatch], teaches: list[bool]) -> tuple[list[PPOMicroBatch], list[PPOMicroBatch]]:
    """Returns the micro-batches of a mini-batch that are computed, and those left out: the ones without a gradient,
    unless none has one, when all are computed for the metrics."""
    if not any(teaches):
        return minibatch, []
    return [*compress(minibatch, teaches)], [*compress(minibatch, map(not_, teaches))]


def _proximal(sampled: PPOMicroBatch) -> Tensor:
    assert sampled.proximal is not None  # PPO._set_proximal has set it where tokens are chosen by it
    return sampled.proximal
