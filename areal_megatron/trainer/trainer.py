"""A trainer rank: the model, its optimizer, and one PPO update or supervised step (paper, Sections 4 and 5)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from areal_megatron.checkpoint import hf
from areal_megatron.config import Config
from areal_megatron.data.trajectory import BatchPart
from areal_megatron.files import drop_torn_line
from areal_megatron.model_check import check_model
from areal_megatron.models.architecture import read_config
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.models.logits import chunk_tokens
from areal_megatron.observe.timeline import Timeline
from areal_megatron.packing.partition import partition
from areal_megatron.ppo.advantage import Rewards, over_tokens
from areal_megatron.ppo.algorithm import ALGORITHMS, token_weights
from areal_megatron.ppo.correction import SECOND_MOMENT, within_second_moment
from areal_megatron.ppo.loss import effective_share
from areal_megatron.reshard.trainer_layout import layout
from areal_megatron.run import Run
from areal_megatron.trainer import parallel as process_groups
from areal_megatron.trainer import pipeline
from areal_megatron.trainer.batch import PPOMicroBatch, pack, pack_trajectories
from areal_megatron.trainer.critic import Critic
from areal_megatron.trainer.learner import Learner, Steps
from areal_megatron.trainer.logprobs import Vocabulary
from areal_megatron.trainer.model import build_model, named_parameters, parallel_sizes, tensors
from areal_megatron.trainer.objective import Objective
from areal_megatron.trainer.optimizer import ModelOptimizer
from areal_megatron.trainer.reference import Reference
from areal_megatron.trainer.routing import Routing
from areal_megatron.trainer.token_sums import TokenSums

COUNTS = ("tokens", "compared", "difference", "weight", "weight_squared")
MAXIMA = ("ratio_max", "logprob_diff_max")
MEANS = ("loss", "clip_share", "capped_share", "masked_share", "ratio_mean", "kl", "kl_proximal", "kl_step", "entropy")
"""Reported as means over trained tokens."""


@dataclass(frozen=True)
class BatchResult:
    """Outcome of a PPO update, the same on all ranks."""

    version: int
    """The version that was trained (i)."""
    applied: bool
    """False: every step was skipped because its gradient was not finite; the weights are as before. Where the critic
    warms up, it is the critic's steps that count."""
    metrics: dict[str, float]
    """Means over trained tokens, mean gradient norm and last learning rate of the steps taken, counts.
    `logprob_diff_max`, `logprob_diff_p99` and `logprob_diff_mean`, trainer against engine, only if the batch has tokens
    that were sampled by the trained version."""


class Trainer:
    """One rank of the trainer pool, with the weights of model.path. A context manager.

    Raises ConfigError for a model that does not fit the config, RunError if the ranks do not find each other.
    """

    def __init__(self, config: Config, run: Run, rank: int):
        check_model(config)
        self.config, self.run = config, run
        self.timeline = Timeline(run.timeline(f"trainer-{rank}"), f"trainer-{rank}")
        self.parallel = process_groups.initialise(config, run, rank)
        self.device = self.parallel.device
        self.sizes = parallel_sizes(config, self.device)
        self.hf_config = read_config(config.model.path)
        self._flops = SequenceFlops.of(self.hf_config)
        chunks, reinforced = build_model(config, self.sizes, self.device), config.mode != "sft"
        hf.load(tensors(chunks), layout(self.hf_config, self.sizes, rank), config.model.path)
        asked = reinforced and config.ppo.has_reference  # before a checkpoint brings other weights
        self._reference = Reference(parameter for _, parameter in named_parameters(chunks)) if asked else None
        asked = reinforced and config.ppo.critic
        self.critic = Critic(config, self.sizes, self.parallel, self.timeline) if asked else None
        self.policy = Learner(chunks, ModelOptimizer(config.optimizer, chunks, self._steps()))
        vocabulary = Vocabulary(
            size=self.hf_config["vocab_size"],
            temperature=config.rollout.temperature,
            chunk=chunk_tokens(self.hf_config["vocab_size"], self.sizes.tp),
            sequence_parallel=self.sizes.tp > 1,
        )
        self._objective = Objective(chunks[-1].module, vocabulary, config.ppo)
        self._algorithm = ALGORITHMS[config.ppo.algorithm]
        self._row_multiple, self._routing = pipeline.row_multiple(chunks), Routing.of(chunks[0].config)
        drop_torn_line(run.ledger(self.replica))

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_) -> None:
        process_groups.leave()
        self.timeline.close()

    @property
    def rank(self) -> int:
        return self.parallel.rank

    @property
    def replica(self) -> int:
        """Data-parallel rank."""
        return self.parallel.replica

    @property
    def is_leader(self) -> bool:
        """First rank of its replica: the one that gets batches and writes the ledger."""
        return self.parallel.is_leader

    @property
    def is_first(self) -> bool:
        return self.parallel.rank == 0

    @property
    def share(self) -> Callable[[bytes | None], bytes]:
        """The replica leader's bytes on all ranks of its replica; the others pass None."""
        return self.parallel.share

    @property
    def share_all(self) -> Callable[[bytes | None], bytes]:
        """Global rank 0's bytes on all ranks; the others pass None."""
        return self.parallel.share_all

    def parameters(self) -> dict[str, Tensor]:
        """This rank's parameters as `reshard.trainer_layout.layout` names them; they change only in optimizer steps."""
        return self.policy.parameters()

    @property
    def learners(self) -> dict[str, Learner]:
        """By name: `policy` and, where there is one, `critic`."""
        return {"policy": self.policy, **({"critic": self.critic.learner} if self.critic else {})}

    def _steps(self) -> int:
        """Of the policy in the whole run."""
        config = self.config
        if config.mode == "sft":
            return config.updates
        return (config.updates - (self.critic.warmup if self.critic else 0)) * config.ppo.minibatches

    def train_batch(self, part: BatchPart, before_step: Callable[[], None] = lambda: None) -> BatchResult:
        """One PPO update on this replica's part of the batch: proximal log-probabilities, then mini-batches.

        `before_step` is called right before parameters change for the first time.
        """
        start = time.monotonic()
        minibatches, metrics = self._assessed(part)
        self._set_proximal(minibatches)
        self._set_reference(minibatches)
        tally, steps = TokenSums(), Steps(before_step)
        warming_up = self.critic and part.version < self.critic.warmup
        for minibatch in minibatches:
            loss = partial(self._objective.ppo, taken=len(steps.norms), tally=tally)
            work = [(e.microbatch, partial(loss, sampled=e)) for e in minibatch]
            if warming_up:
                pipeline.forward(self.policy.chunks, work)  # for what is reported
            else:
                self._step(work, steps)
        self.policy.optimizer.settle()
        applied = bool(steps.norms)
        if self.critic:
            learned, of_critic = self.critic.train(minibatches, (lambda: None) if applied else before_step)
            applied, metrics = learned if warming_up else applied, metrics | of_critic
        self._record(part, applied)
        means = (*MEANS, "kl_reference") if self._reference else MEANS
        totals = tally.totals(self.parallel, (*COUNTS, *means), MAXIMA)
        share = effective_share(totals["weight"], totals["weight_squared"], totals["tokens"])
        metrics |= {"ratio_max": totals["ratio_max"], "effective_share": share}
        if totals["compared"]:
            metrics["logprob_diff_p99"] = tally.quantile(self.parallel, "difference", 0.99, totals["compared"])
            metrics["logprob_diff_max"] = totals["logprob_diff_max"]
            metrics["logprob_diff_mean"] = totals["difference"] / totals["compared"]
        return BatchResult(part.version, applied, metrics | self._metrics(totals, means, steps, start))

    def sft_step(
        self, examples: Sequence[tuple[np.ndarray, int]], before_step: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """One supervised step on a batch that all ranks pass alike: (tokens int32 [n], length of the prompt) each.

        The loss is the mean over the response tokens of the batch. `before_step` as in `train_batch`.
        """
        start = time.monotonic()
        trainer = self.config.trainer
        lengths, prompts = [len(tokens) for tokens, _ in examples], [prompt for _, prompt in examples]
        costs = self._flops(lengths, np.subtract(lengths, prompts))
        plan = partition(
            lengths, trainer.dp, 1, trainer.microbatch_tokens, seed=0, costs=costs, multiple=trainer.microbatch_multiple
        )
        tally, steps, work = TokenSums(), Steps(before_step), []
        for members in plan[self.replica][0]:
            chosen = [examples[i] for i in members]
            microbatch = pack(
                [tokens for tokens, _ in chosen],
                [np.arange(prompt, len(tokens)) for tokens, prompt in chosen],
                self._row_multiple,
                self.device,
            )
            work.append((microbatch, partial(self._objective.sft, microbatch=microbatch, tally=tally)))
        self._step(work, steps)
        self.policy.optimizer.settle()
        totals = tally.totals(self.parallel, ("tokens", "loss"))
        return self._metrics(totals, ("loss",), steps, start)

    def _step(self, work: Sequence[pipeline.Work], steps: Steps) -> None:
        with self.timeline.span("train", tokens=sum(microbatch.tokens.numel() for microbatch, _ in work)):
            gradient_norm = self.policy.gradient(work)
        self.policy.step(gradient_norm, steps)

    def _metrics(self, totals: dict[str, float], means: Sequence[str], steps: Steps, start: float) -> dict[str, float]:
        seconds = time.monotonic() - start
        return {
            **{name: totals[name] / max(totals["tokens"], 1) for name in means},
            **({"grad_norm": sum(steps.norms) / len(steps.norms)} if steps.norms else {}),
            "lr": self.policy.optimizer.lr,
            "skipped_steps": steps.skipped,
            "trained_tokens": totals["tokens"],
            "step_s": seconds,
            "tokens_per_s": totals["tokens"] / seconds,
        }

    def _assessed(self, part: BatchPart) -> tuple[list[list[PPOMicroBatch]], dict[str, float]]:
        """The micro-batches of each mini-batch, their advantages known where they are needed, and what these are
        like."""
        trained = torch.tensor([int(t.loss_mask.sum()) for t in part.trajectories])
        if self.critic:
            minibatches = self._microbatches(part, trained, [0.0] * len(trained))
            return minibatches, self.critic.assess(part, minibatches)
        advantages, parallel = self._advantages(part, trained), self.parallel
        described = over_tokens(advantages, trained, parallel.sum_over_replicas, parallel.max_over_ranks)
        return self._microbatches(part, trained, advantages.tolist()), described

    def _microbatches(self, part: BatchPart, trained: Tensor, advantages: list[float]) -> list[list[PPOMicroBatch]]:
        found = []
        for minibatch in part.minibatches:
            weights = self._weights([i for members in minibatch for i in members], trained)
            found.append([])
            for members in minibatch:
                content = ([values[i] for i in members] for values in (part.trajectories, advantages, weights))
                found[-1].append(
                    pack_trajectories(
                        *content,
                        part.version,
                        self.config.rollout.kv_policy,
                        self._row_multiple,
                        self.device,
                        self._routing,
                    )
                )
        return found

    def _advantages(self, part: BatchPart, trained: Tensor) -> Tensor:
        values = torch.tensor([t.reward for t in part.trajectories], dtype=torch.float64)
        rewards = Rewards(values, trained, torch.tensor(part.group_of), part.groups)
        return self._algorithm.advantages(rewards, self.parallel.sum_over_replicas)

    def _weights(self, members: list[int], trained: Tensor) -> dict[int, float]:
        """Of the tokens of each trajectory of a mini-batch."""
        lengths = trained[members]
        counts = torch.stack([lengths.sum(), (lengths > 0).sum()]).double()
        tokens, sequences = self.parallel.sum_over_replicas(counts).tolist()
        longest = self.config.rollout.max_new_tokens
        return dict(
            zip(members, token_weights(self._algorithm.mean, lengths, tokens, sequences, longest).tolist(), strict=True)
        )

    def _set_proximal(self, minibatches: list[list[PPOMicroBatch]]) -> None:
        """The first mini-batch needs none, but for what has to know it before the loss: until its step the current
        policy is the proximal one."""
        settings = self.config.ppo
        if settings.objective == "naive":
            for sampled in (e for minibatch in minibatches for e in minibatch):
                sampled.proximal = sampled.behaviour
        if settings.objective != "decoupled":
            return
        threshold = settings.correction.get(SECOND_MOMENT)
        asked = [e for minibatch in minibatches[0 if threshold else 1 :] for e in minibatch]
        for sampled, logprobs in zip(asked, self._logprobs("proximal", asked), strict=False):
            sampled.proximal = logprobs
        for minibatch in minibatches if threshold else ():
            self._mask(minibatch, threshold)

    def _set_reference(self, minibatches: list[list[PPOMicroBatch]]) -> None:
        if not self._reference:
            return
        every = [sampled for minibatch in minibatches for sampled in minibatch]
        with self._reference.in_place():
            for sampled, logprobs in zip(every, self._logprobs("reference", every), strict=False):
                sampled.reference = logprobs

    def _logprobs(self, span: str, microbatches: list[PPOMicroBatch]) -> list[Tensor]:
        """Of their trained tokens, under the weights as they are; [] on other stages than the last."""
        if not microbatches:
            return []
        with self.timeline.span(span, tokens=sum(e.microbatch.tokens.numel() for e in microbatches)):
            work = [(e.microbatch, partial(self._objective.logprobs, microbatch=e.microbatch)) for e in microbatches]
            return [logprobs for logprobs, _ in pipeline.forward(self.policy.chunks, work)]

    def _mask(self, minibatch: list[PPOMicroBatch], threshold: float) -> None:
        """What the second moment of the weights of a whole mini-batch does not allow. Collective."""
        known = minibatch if self.parallel.is_last_stage else []
        lags = [sampled.proximal - sampled.behaviour for sampled in known]
        kept = within_second_moment(
            torch.cat([torch.zeros(0, device=self.device), *lags]), threshold, self.parallel.sum_of_last_stages
        )
        for sampled, own in zip(known, kept.split([len(lag) for lag in lags]), strict=True):
            sampled.kept = own

    def _record(self, part: BatchPart, applied: bool) -> None:
        """Which trajectories this replica has trained, a line a batch, independent of what the controller says."""
        if not self.is_leader:
            return
        line = {
            "incarnation": self.run.incarnation,
            "version": part.version,
            "max_staleness": self.config.rollout.max_staleness,
            "applied": applied,
            "prompts": [[t.epoch, t.prompt_id] for t in part.trajectories],
            "uids": [t.uid for t in part.trajectories],
            "admission_versions": [t.admission_version for t in part.trajectories],
            "tokens": sum(int(t.loss_mask.sum()) for t in part.trajectories),
        }
        with self.run.ledger(self.replica).open("a") as ledger:
            ledger.write(json.dumps(line) + "\n")
            ledger.flush()
            os.fsync(ledger.fileno())
