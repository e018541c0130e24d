"""Losses and metrics of a micro-batch, from its final hidden states.

Everything is a sum over trained tokens. The gradient is divided once, by the number of trained tokens of all
micro-batches and replicas, so that it does not depend on how sequences are packed.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from areal_megatron.config import PPOConfig
from areal_megatron.ppo import diagnostics, in_flight
from areal_megatron.ppo.algorithm import ALGORITHMS
from areal_megatron.ppo.loss import Bounds, Tokens, log_linear, metric_sums
from areal_megatron.ppo.penalty import PenaltyTokens, k3, penalised, penalty
from areal_megatron.trainer.batch import MicroBatch, PPOMicroBatch
from areal_megatron.trainer.logprobs import Vocabulary, token_logprobs
from areal_megatron.trainer.model import PolicyModel
from areal_megatron.trainer.token_sums import LEFT_OUT, TokenSums, number_of


class Objective:
    """The losses, computed on the last pipeline stage.

    `vocabulary` has the temperature that answers are sampled with.
    """

    def __init__(self, policy: PolicyModel, vocabulary: Vocabulary, settings: PPOConfig, eta: int):
        self._policy, self._objective, self._steps = policy, settings.objective, settings.minibatches
        self._algorithm = ALGORITHMS[settings.algorithm]
        self._penalty = settings.penalty.coefficients
        self._ratio_cap = settings.correction.truncate or math.inf
        self._weighted = settings.penalty.kl_weighted
        self._bounds = Bounds(
            settings.clip_low,
            settings.clip_high,
            settings.correction.bounds,
            self._algorithm.whole,
            settings.dual_clip or math.inf,
            (settings.sapo_positive, settings.sapo_negative),
        )
        self._eta = eta
        self._sampled, self._written = vocabulary, replace(vocabulary, temperature=1.0)

    def logprobs(self, hidden: Tensor, microbatch: MicroBatch, *, written: bool = False) -> Tensor:
        """Returns the log-probability of each trained token, float32 [N], by the distribution that answers are sampled
        from; by the distribution at temperature 1 if they are `written`."""
        return trained_logprobs(self._policy, self._written if written else self._sampled, hidden, microbatch)[0]

    def ppo(
        self, hidden: Tensor, sampled: PPOMicroBatch, taken: int, sums: TokenSums, seen: list[Tensor] | None = None
    ) -> Tensor:
        """Returns the sum of the tokens' losses, and adds the metrics of the micro-batch to `sums`.

        `taken`: the optimizer steps since the batch began; at 0 the current policy is the trained version. `seen` gets
        the sums of in_flight.py, which are of that version.
        """
        asked, others = (self._policy, self._sampled, hidden, sampled.microbatch), sampled.likely_tokens
        found, entropy = trained_logprobs(*asked, entropy=True, others=others)
        assert entropy is not None  # it was asked for
        current, likely = found, None
        if others is not None:
            assert sampled.likely_logprobs is not None  # it comes with the tokens
            # a token that the policy does not have counts as one of the others
            current, likely = found[:, 0], found[:, 1:].where(others >= 0, sampled.likely_logprobs)
        now, behaviour = current.detach(), sampled.behaviour
        proximal = self._proximal(sampled, now, taken)
        advantages = penalised(sampled.advantages, now, sampled.reference, self._penalty)
        sampled.current = now
        tokens = Tokens(current, proximal, behaviour, advantages, sampled.sequences, sampled.kept)
        penalties = penalty(
            PenaltyTokens(
                current,
                proximal,
                entropy,
                behaviour if self._weighted else None,
                self._ratio_cap,
                sampled.reference,
                sampled.covariant,
                likely,
                sampled.likely_logprobs,
            ),
            self._penalty,
        )
        loss = (sampled.weights * (self._algorithm.loss(tokens, self._bounds) + penalties)).sum().float()
        comparable = sampled.by_this_version & (not taken or self._objective == "decoupled")
        difference = ((proximal if taken else now) - behaviour).abs().masked_fill(~comparable, 0)
        detached = replace(tokens, current=now)
        if seen is not None:
            columns = entropy.detach(), sampled.staleness, sampled.by_this_version
            seen.append(in_flight.sums(now, behaviour, *columns, self._eta))
        diagnosed, largest, single = diagnostics.sums(
            detached, entropy.detach(), sampled.right, sampled.staleness, self._bounds
        )
        sums.add(
            {
                "tokens": number_of(now),
                "loss": loss,
                **diagnosed,
                "compared": comparable.sum(),
                "difference": difference.sum(),
                **metric_sums(detached, entropy.detach(), self._bounds),
                **({} if sampled.reference is None else {"kl_reference": k3(sampled.reference - now).sum()}),
            },
            {
                "ratio_max": _largest((now.double() - proximal).exp()),
                "logprob_diff_max": _largest(difference),
                **largest,
            },
            {"difference": difference.masked_fill(~comparable, LEFT_OUT), **single},
        )
        return loss

    def likelihood(self, hidden: Tensor, sampled: PPOMicroBatch, sums: TokenSums) -> Tensor:
        """Returns the sum of the tokens' negative log-probabilities at temperature 1, as fine-tuning has it."""
        current = self.logprobs(hidden, sampled.microbatch, written=True)
        sampled.current, loss = current.detach(), -(sampled.weights * current).sum()
        sums.add({"tokens": number_of(current), "loss": loss}, {})
        return loss

    def _proximal(self, sampled: PPOMicroBatch, now: Tensor, taken: int) -> Tensor:
        if self._objective == "loglinear":
            return log_linear(now, sampled.behaviour, sampled.staleness, taken / self._steps)
        return now if sampled.proximal is None else sampled.proximal


def trained_logprobs(
    policy: PolicyModel,
    vocabulary: Vocabulary,
    hidden: Tensor,
    microbatch: MicroBatch,
    *,
    entropy: bool = False,
    others: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the log-probability of each trained token of all context-parallel ranks, and if asked for the `entropy`
    of its distribution: float32 [N] each, from the final hidden states of the policy, or of a frozen model.

    With `others`, int64 [N, k], the log-probabilities are [N, 1 + k], of these tokens in the place of each, too.
    """
    rows, labels = microbatch.rows, microbatch.labels
    if others is not None:
        own_others = others if microbatch.own is None else others[microbatch.own]
        labels = torch.cat([labels[:, None], own_others], 1)
    logprobs, entropies = token_logprobs(hidden, policy.output_weight, rows, labels, vocabulary, entropy=entropy)
    whole = microbatch.of_all_ranks
    return whole(logprobs), None if entropies is None else whole(entropies)


def _largest(values: Tensor) -> Tensor:
    """The largest of values that are not negative; 0 if there are none."""
    return values.amax() if len(values) else values.new_zeros(())
