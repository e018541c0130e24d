"""Micro-batches: whole sequences packed into one row, this context-parallel rank's part of it, and what is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from areal_megatron.data.routes import UNKNOWN, Routing
from areal_megatron.data.trajectory import Trajectory
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.packing.row import TokenRow, View, divide
from areal_megatron.trainer.attention import Packed
from areal_megatron.trainer.copies import to_device
from areal_megatron.trainer.parallel import context_parallel_group

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class RowPart:
    """Which part of each row this rank gets."""

    device: torch.device
    multiple: int = 1
    """The divisor of the length of each rank's row, so that sequence parallelism cuts it evenly."""
    ranks: int = 1
    """The context-parallel ranks."""
    rank: int = 0
    flops: SequenceFlops | None = None
    """What tokens and attention cost, by which rows are divided."""

    @classmethod
    def of(cls, config: TransformerConfig, device: torch.device, flops: SequenceFlops | None = None) -> RowPart:
        """Returns the part of this rank. Megatron's process groups must exist."""
        return cls(
            device,
            config.tensor_model_parallel_size if config.sequence_parallel else 1,
            config.context_parallel_size,
            parallel_state.get_context_parallel_rank(),
            flops,
        )


@dataclass
class MicroBatch:
    """Whole sequences, N tokens of which are trained; T tokens are on this context-parallel rank, n of them followed by
    trained ones. N may be 0."""

    tokens: Tensor
    """int64 [1, T]"""
    packed: Packed
    rows: Tensor
    """int64 [n]: the token before each trained token, whose hidden state predicts it."""
    labels: Tensor
    """int64 [n]: the trained tokens."""
    own: Tensor | None = None
    """int64 [n]: the numbers of these among the N trained tokens; None if this rank has all."""
    trained: int = 0
    """N"""

    @property
    def untrained(self) -> Tensor:
        """bool [1, T]: the tokens whose hidden state predicts no trained token."""
        untrained = torch.ones_like(self.tokens, dtype=torch.bool)
        untrained[0, self.rows] = False
        return untrained

    def of_all_ranks(self, values: Tensor) -> Tensor:
        """Returns [N, …] from this rank's values [n, …], the same on all context-parallel ranks. Collective.

        Each rank may go on to compute the whole loss, as if it were alone: only its own values have a gradient.
        """
        if self.own is None:
            return values
        return _OfAllRanks.apply(values, self.own, self.trained, context_parallel_group())


class _OfAllRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, own, count, group):
        ctx.own = own
        joined = values.new_zeros((count, *values.shape[1:]))
        joined[own] = values
        dist.all_reduce(joined, group=group)
        return joined

    @staticmethod
    def backward(ctx, gradient):
        return gradient.index_select(0, ctx.own), None, None, None


@dataclass
class PPOMicroBatch:
    """A micro-batch of PPO. Tensors are float32 [N] unless another type is given."""

    microbatch: MicroBatch
    behaviour: Tensor
    """The log-probabilities that the tokens were sampled with."""
    advantages: Tensor
    by_this_version: Tensor
    """bool [N]: whether the version that is trained sampled the token and computed all of its context."""
    staleness: Tensor
    """The version that is trained minus the version that sampled the token."""
    sequences: Tensor
    """int64 [N]: the number, from 0, of the token's sequence."""
    weights: Tensor
    """The weight of the token's loss in the mean over tokens."""
    right: Tensor
    """bool [N]: whether the token's answer is right."""
    kept: Tensor
    """bool [N]: False where a correction of the whole mini-batch masks the token."""
    covariant: Tensor | None = None
    """bool [N]: whether KL-Cov penalises the token; None without it."""
    proximal: Tensor | None = None
    """Log-probabilities before this batch's first step; None if they equal the current ones or are interpolated."""
    reference: Tensor | None = None
    """Log-probabilities under the reference model, or by a teacher; None without one."""
    likely_tokens: Tensor | None = None
    """int64 [N, k]: the tokens that a teacher finds likeliest in the place of each; None where they are not asked."""
    likely_logprobs: Tensor | None = None
    """float32 [N, k]: their log-probabilities by the teacher."""
    values: Tensor | None = None
    """The critic's values of the states before the tokens, before this batch's first step; None without a critic."""
    returns: Tensor | None = None
    """The returns that the critic learns to predict; None without a critic."""
    current: Tensor | None = None
    """Log-probabilities under the present weights, once the loss has been computed."""


def pack(
    sequences: Sequence[np.ndarray],
    trained: Sequence[np.ndarray],
    part: RowPart,
    bundles: Sequence[tuple[int, int]] = (),
    routes: np.ndarray | None = None,
) -> MicroBatch:
    """Packs sequences (int32 [n]) in their order; `trained`: the places, from 1 to n − 1, of each one's trained tokens.

    `bundles` divides the sequences, in order: (number of sequences, number of tokens that all of these begin with and
    that the row holds once); by default each sequence stands alone. `routes`, int16 [tokens, layers, k], are all
    sequences' routes one after another. Untrained tokens fill the row up to a length that ranks can share.
    """
    lengths = [len(sequence) for sequence in sequences]
    tokens, starts = _joined(sequences, np.int64), np.cumsum([0, *lengths]).tolist()
    source, segments, prefixes, targets = [_NONE], [], [], [_NONE]
    at = number = 0
    for count, common in bundles or [(1, 0)] * len(sequences):
        prefix = -1
        if common:
            prefix = len(segments)
            segments.append(common)
            prefixes.append(-1)
            source.append(np.arange(starts[number], starts[number] + common))
            at += common
        for sequence in range(number, number + count):
            segments.append(lengths[sequence] - common)
            prefixes.append(prefix)
            source.append(np.arange(starts[sequence] + common, starts[sequence + 1]))
            targets.append(trained[sequence] - common + at)
            at += segments[-1]
        number += count
    row = TokenRow.of(segments, prefixes)
    view = View(row, divide(row, part.ranks, part.multiple, part.flops), part.rank)
    return _microbatch(tokens, np.concatenate(source), np.concatenate(targets), view, part, routes)


def _microbatch(
    tokens: np.ndarray, source: np.ndarray, targets: np.ndarray, view: View, part: RowPart, routes: np.ndarray | None
) -> MicroBatch:
    """`source`: the place in `tokens` of each token of the row; `targets`: the places in the row of trained tokens."""
    row, filler = tokens[source], view.tokens < 0
    local = np.zeros(view.length, np.int64)
    local[~filler] = row[view.tokens[~filler]]
    packed = Packed(view=view, device=part.device)
    if routes is not None:
        own = np.full((view.length, *routes.shape[1:]), UNKNOWN, np.int16)
        own[~filler] = routes[source[view.tokens[~filler]]]
        packed.routes = torch.from_numpy(np.ascontiguousarray(own.transpose(1, 0, 2)))
    rows = view.place[targets - 1]
    own = np.flatnonzero(rows >= 0)
    return MicroBatch(
        tokens=to_device(local[None], part.device),
        packed=packed,
        rows=to_device(rows[own], part.device),
        labels=to_device(row[targets[own]], part.device),
        own=to_device(own, part.device) if part.ranks > 1 else None,
        trained=len(targets),
    )


def pack_trajectories(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float | np.ndarray],
    weights: Sequence[float | np.ndarray],
    version: int,
    kv_policy: str,
    part: RowPart,
    routing: Routing | None = None,
    bundles: Sequence[int] = (),
    taught: bool = False,
    top_k: int = 0,
) -> PPOMicroBatch:
    """Packs trajectories into one micro-batch, with the advantages and the weights of each one's trained tokens: one
    for all of them, or one for each.

    `version` is the one that is trained. `proximal` stays None, `kept` is True everywhere. Routes are replayed if
    `routing` is given. `bundles` holds the sizes of consecutive groups of trajectories with a common prompt. The row
    holds such a prompt once but for its last token, which predicts the first token of each answer. By default none
    share. `taught`: the reference is what a teacher said of the trajectories, with the `top_k` likeliest tokens of each
    place. Raises ConfigError for routes of another model.
    """
    trained = _joined([t.loss_mask for t in trajectories], np.bool_)
    microbatch = pack(
        [np.concatenate((t.prompt, t.response)) for t in trajectories],
        [len(t.prompt) + np.flatnonzero(t.loss_mask) for t in trajectories],
        part,
        _prefixes(trajectories, bundles),
        routing.joined(trajectories) if routing else None,
    )
    lengths = np.array([len(t.response) for t in trajectories], dtype=np.int64)
    sequences = np.repeat(np.arange(len(trajectories)), lengths)[trained]
    counts = np.bincount(sequences, minlength=len(trajectories))
    staleness = version - _joined([t.versions for t in trajectories], np.int32)[trained]
    fresh = staleness == 0
    if kv_policy == "keep":  # tokens after an update attend to keys and values of older versions
        fresh &= np.array([t.admission_version == version for t in trajectories], dtype=np.bool_)[sequences]
    columns = {
        "behaviour": _joined([t.logprobs for t in trajectories], np.float32)[trained],
        "advantages": _joined([np.broadcast_to(a, n) for a, n in zip(advantages, counts, strict=True)], np.float32),
        "weights": _joined([np.broadcast_to(w, n) for w, n in zip(weights, counts, strict=True)], np.float32),
        "sequences": sequences,
        "staleness": staleness.astype(np.float32),
        "by_this_version": fresh,
        "right": np.array([t.correct for t in trajectories], dtype=np.bool_)[sequences],
        "kept": np.ones_like(fresh),
    }
    if taught:
        columns["reference"] = _joined([t.reference for t in trajectories if len(t.reference)], np.float32)[
            _joined([t.loss_mask for t in trajectories if len(t.reference)], np.bool_)
        ]
    if top_k:
        columns["likely_tokens"] = _joined([t.likely_tokens for t in trajectories], np.int64).reshape(-1, top_k)
        columns["likely_logprobs"] = _joined([t.likely_logprobs for t in trajectories], np.float32).reshape(-1, top_k)
    return PPOMicroBatch(microbatch, **{name: to_device(values, part.device) for name, values in columns.items()})


def _prefixes(trajectories: Sequence[Trajectory], bundles: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the number of trajectories and of tokens that they share, for each bundle."""
    firsts = np.cumsum([0, *bundles]).tolist()
    return [
        (count, len(trajectories[first].prompt) - 1 if count > 1 else 0)
        for count, first in zip(bundles, firsts, strict=False)
    ]


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype, casting="unsafe")
