"""What supervised training learns from its items, and how well: samples (SFT), or pairs of answers (DPO, reward
models).

Every loss is a sum over a micro-batch. The gradient is divided once, by the number of trained tokens of all
micro-batches and replicas, so that it does not depend on how sequences are packed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal_megatron.config import Config, DPOConfig, SFTConfig
from areal_megatron.data.examples import Sample
from areal_megatron.data.pairs import Pair
from areal_megatron.ppo.penalty import k3
from areal_megatron.trainer.batch import MicroBatch
from areal_megatron.trainer.copies import to_device
from areal_megatron.trainer.logprobs import Vocabulary, likeliest
from areal_megatron.trainer.model import PolicyModel, policy_of
from areal_megatron.trainer.objective import trained_logprobs
from areal_megatron.trainer.pipeline import Chunks
from areal_megatron.trainer.token_sums import TokenSums, number_of

Item = Sample | Pair


@dataclass
class Sequences:
    """A micro-batch of whole items: the sequences of one follow each other. N tokens are trained."""

    items: Sequence[Item]
    microbatch: MicroBatch
    members: Tensor
    """int64 [N]: the sequence that each trained token belongs to, counted from 0."""
    count: int
    """The number of sequences."""
    reference: Tensor | None = None
    """float32 [N]: log-probabilities under the frozen model; None on other stages than the last, and without one."""

    def totals(self, values: Tensor) -> Tensor:
        """Returns the sum of the values [N] of each sequence's trained tokens, float64 [sequences]."""
        return values.new_zeros(self.count, dtype=torch.float64).index_add(0, self.members, values.double())


class Lesson(ABC):
    """A kind of supervised training."""

    sums: tuple[str, ...] = ()
    """What `loss` adds up beside `tokens` and `loss`."""

    @abstractmethod
    def sequences(self, item: Item) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the sequences of an item, int32 [n] each, with the places of their trained tokens, from 1 on."""

    @abstractmethod
    def loss(self, output: Tensor, own: Sequences, sums: TokenSums, *, held_out: bool) -> Tensor:
        """Returns the sum of the losses of a micro-batch's tokens or pairs, and adds to `sums`.

        output: the output of the model's last stage. `held_out`: nothing is trained, and all is measured.
        """

    def scale(self, items: Sequence[Item], trained: int) -> float:
        """Returns what the losses of a batch are multiplied by, since the gradient of their sum is divided by
        `trained`, its number of trained tokens: here they are means over pairs."""
        return trained / len(items)

    @abstractmethod
    def figures(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns the metrics, from the totals of `sums`, `tokens` and `loss`."""


class FineTuning(Lesson):
    """SFT: the mean negative log-probability of the trained tokens, or the mean over rows of the mean of each."""

    sums = ("likeliest", "measured", "weight")

    def __init__(self, policy: PolicyModel, vocabulary: Vocabulary, settings: SFTConfig):
        self._policy, self._vocabulary, self._by_row = policy, vocabulary, settings.mean == "row"

    def sequences(self, item: Sample) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(item.tokens, item.trained)]

    def scale(self, items: Sequence[Sample], trained: int) -> float:
        return trained / sum(len(item.trained) / item.row_tokens for item in items) if self._by_row else 1.0

    def loss(self, output: Tensor, own: Sequences, sums: TokenSums, *, held_out: bool) -> Tensor:
        microbatch = own.microbatch
        logprobs, _ = trained_logprobs(self._policy, self._vocabulary, output, microbatch)
        loss, weight = -logprobs.sum(), number_of(logprobs)
        if self._by_row:
            rows = cast(Sequence[Sample], own.items)
            shares = np.array([1 / item.row_tokens for item in rows], np.float32)
            weights = to_device(shares, logprobs.device)[own.members]
            loss, weight = -(weights * logprobs).sum(), weights.double().sum()
        found = {"tokens": number_of(logprobs), "loss": loss, "weight": weight}
        if held_out:  # costs the product with the output layer once more
            weight = self._policy.output_weight
            right = likeliest(output, weight, microbatch.rows, microbatch.labels, self._vocabulary).float()
            found |= {"measured": found["tokens"], "likeliest": microbatch.of_all_ranks(right).sum()}
        sums.add(found, {})
        return loss

    def figures(self, totals: dict[str, float]) -> dict[str, float]:
        found = {"loss": totals["loss"] / (totals["weight"] or 1)}
        return found | ({"accuracy": totals["likeliest"] / totals["measured"]} if totals["measured"] else {})


class Preference(Lesson):
    """DPO (Rafailov et al., arXiv 2305.18290, Equation 7), with label smoothing as conservative DPO has it."""

    sums = ("pairs", "ranked", "margin", "reward_chosen", "reward_rejected", "kl", "tokens_chosen", "logprob_chosen")

    def __init__(self, policy: PolicyModel, vocabulary: Vocabulary, settings: DPOConfig):
        self._policy, self._vocabulary = policy, vocabulary
        self._beta, self._smoothing = settings.beta, settings.label_smoothing

    def sequences(self, item: Pair) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(tokens, np.arange(item.prompt_length, len(tokens))) for tokens in (item.chosen, item.rejected)]

    def loss(self, output: Tensor, own: Sequences, sums: TokenSums, *, held_out: bool) -> Tensor:
        now, _ = trained_logprobs(self._policy, self._vocabulary, output, own.microbatch)
        assert own.reference is not None  # a run with DPO has a frozen model
        rewards = self._beta * own.totals(now - own.reference)
        chosen, rejected = rewards[0::2], rewards[1::2]
        margins = chosen - rejected
        losses = -(1 - self._smoothing) * F.logsigmoid(margins) - self._smoothing * F.logsigmoid(-margins)
        loss, better = losses.sum(), own.members % 2 == 0
        sums.add(
            {
                **_ranking(loss, margins, now),
                "reward_chosen": chosen.sum(),
                "reward_rejected": rejected.sum(),
                "kl": k3(own.reference - now.detach()).sum(),
                "tokens_chosen": better.sum(),
                "logprob_chosen": (now.detach() * better).sum(),
            },
            {},
        )
        return loss

    def figures(self, totals: dict[str, float]) -> dict[str, float]:
        pairs = max(totals["pairs"], 1)
        return {
            **_ranked(totals),
            "reward_chosen": totals["reward_chosen"] / pairs,
            "reward_rejected": totals["reward_rejected"] / pairs,
            "kl": totals["kl"] / max(totals["tokens"], 1),
            "logprob_chosen": totals["logprob_chosen"] / max(totals["tokens_chosen"], 1),
        }


class Scoring(Lesson):
    """Reward models: the chosen answer's score is to be higher, by the model of Bradley and Terry.

    A score is the model's output at the last token of prompt and answer.
    """

    sums = ("pairs", "ranked", "margin", "score", "score_squared")

    def sequences(self, item: Pair) -> list[tuple[np.ndarray, np.ndarray]]:
        # Outputs are taken before trained places: here, that is one after the last token, where the row has it again.
        return [(np.append(tokens, tokens[-1:]), np.array([len(tokens)])) for tokens in (item.chosen, item.rejected)]

    def loss(self, output: Tensor, own: Sequences, sums: TokenSums, *, held_out: bool) -> Tensor:
        scores = own.microbatch.of_all_ranks(output.index_select(0, own.microbatch.rows))
        margins = scores[0::2] - scores[1::2]
        loss, found = -F.logsigmoid(margins).sum(), scores.detach().double()
        moments = {"score": found.sum(), "score_squared": found.square().sum()}
        sums.add({**_ranking(loss, margins, scores), **moments}, {})
        return loss

    def figures(self, totals: dict[str, float]) -> dict[str, float]:
        count = max(totals["tokens"], 1)
        mean = totals["score"] / count
        deviation = max(totals["score_squared"] / count - mean**2, 0.0) ** 0.5
        return {**_ranked(totals), "score_mean": mean, "score_std": deviation}


def lesson_of(config: Config, chunks: Chunks, vocabulary: Vocabulary) -> Lesson:
    """Returns what the run's mode learns; SFT in modes that are not supervised. `vocabulary` has temperature 1."""
    match config.mode:
        case "dpo":
            return Preference(policy_of(chunks), vocabulary, config.dpo)
        case "reward_model":
            return Scoring()
    return FineTuning(policy_of(chunks), vocabulary, config.sft)


def _ranking(loss: Tensor, margins: Tensor, trained: Tensor) -> dict[str, Tensor]:
    margins = margins.detach()
    return {
        "tokens": number_of(trained),
        "loss": loss,
        "pairs": number_of(margins),
        "ranked": (margins > 0).sum(),
        "margin": margins.sum(),
    }


def _ranked(totals: dict[str, float]) -> dict[str, float]:
    pairs = max(totals["pairs"], 1)
    return {"loss": totals["loss"] / pairs, "accuracy": totals["ranked"] / pairs, "margin": totals["margin"] / pairs}
