"""Sequences as tensors: one packed row for each micro-batch, and what is trained in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areal_megatron.data.trajectory import Trajectory
from areal_megatron.trainer.attention import Packed
from areal_megatron.trainer.routing import Routing


@dataclass
class MicroBatch:
    """N trained tokens in whole sequences of T tokens together; N may be 0."""

    tokens: Tensor
    """int64 [1, T]"""
    packed: Packed
    rows: Tensor
    """int64 [N]: the token before each trained token, whose hidden state predicts it"""
    labels: Tensor
    """int64 [N]: the trained tokens"""

    @property
    def untrained(self) -> Tensor:
        """bool [1, T]: tokens whose hidden state predicts no trained token"""
        untrained = torch.ones_like(self.tokens, dtype=torch.bool)
        untrained[0, self.rows] = False
        return untrained


@dataclass
class PPOMicroBatch:
    """A micro-batch of PPO. float32 [N] where nothing else is said."""

    microbatch: MicroBatch
    behaviour: Tensor
    """Log-probabilities with which the tokens were sampled."""
    advantages: Tensor
    by_this_version: Tensor
    """bool [N]: sampled by the version that is trained, all of its context computed by it too."""
    staleness: Tensor
    """Versions between the one that sampled a token and the one that is trained."""
    sequences: Tensor
    """int64 [N]: the sequence of each, from 0"""
    weights: Tensor
    """What a token's loss counts in the mean over tokens."""
    kept: Tensor
    """bool [N]: False where a correction of the whole mini-batch masks the token."""
    proximal: Tensor | None
    """Log-probabilities before this batch's first step; None where the current ones are the same, and where they are
    interpolated."""
    reference: Tensor | None = None
    """Log-probabilities under the reference model; None where there is none."""
    values: Tensor | None = None
    """Of the states before the tokens, by the critic before this batch's first step; None where there is none."""
    returns: Tensor | None = None
    """What the critic learns them to be."""


def pack(
    sequences: Sequence[np.ndarray], trained: Sequence[np.ndarray], multiple: int, device: torch.device
) -> MicroBatch:
    """Sequences (int32 [n]) in their order, with the places (from 1 to n − 1) of the tokens trained in each.

    T is a multiple of `multiple`: tokens of a last, untrained sequence fill it up, so that sequence
    parallelism can cut the row evenly and no sequence at all is a row as well.
    """
    lengths = [len(sequence) for sequence in sequences]
    total = max(sum(lengths), 1)
    filler = -(-total // multiple) * multiple - sum(lengths)
    starts = np.cumsum([0, *lengths])
    row = np.concatenate([*sequences, np.zeros(filler, dtype=np.int32)]).astype(np.int64)
    places = [start + places for start, places in zip(starts, trained, strict=False)]
    targets = np.concatenate([np.zeros(0, dtype=np.int64), *places])
    move = lambda array: torch.from_numpy(array).to(device)  # noqa: E731
    return MicroBatch(
        tokens=move(row)[None],
        packed=Packed(lengths=(*lengths, filler) if filler else tuple(lengths), device=device),
        rows=move(targets - 1),
        labels=move(row[targets]),
    )


def pack_trajectories(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float],
    weights: Sequence[float],
    version: int,
    kv_policy: str,
    multiple: int,
    device: torch.device,
    routing: Routing | None = None,
) -> PPOMicroBatch:
    """Trajectories, with advantage and weight of each one's tokens, as one micro-batch; `proximal` stays None, all is
    kept.

    Routes are replayed if `routing` says what the model's are like.
    """
    masks = [t.loss_mask.astype(bool) for t in trajectories]
    own = [_by_version(t, version, kv_policy) for t in trajectories]

    def trained(values: Sequence[np.ndarray], dtype: type) -> Tensor:
        kept = [value[mask] for value, mask in zip(values, masks, strict=True)]
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *kept]).astype(dtype)).to(device)

    def alike(values: Sequence[float]) -> list[np.ndarray]:
        return [np.full(len(t.response), value) for t, value in zip(trajectories, values, strict=True)]

    microbatch = pack(
        [np.concatenate((t.prompt, t.response)) for t in trajectories],
        [len(t.prompt) + np.flatnonzero(mask) for t, mask in zip(trajectories, masks, strict=True)],
        multiple,
        device,
    )
    if routing:
        microbatch.packed.routes = routing.pack(trajectories, microbatch.tokens.numel())
    return PPOMicroBatch(
        microbatch=microbatch,
        behaviour=trained([t.logprobs for t in trajectories], np.float32),
        advantages=trained(alike(advantages), np.float32),
        sequences=trained(alike(range(len(trajectories))), np.int64),
        weights=trained(alike(weights), np.float32),
        kept=trained(alike([True] * len(trajectories)), np.bool_),
        by_this_version=trained(own, np.bool_),
        staleness=trained([version - t.versions for t in trajectories], np.float32),
        proximal=None,
    )


def _by_version(trajectory: Trajectory, version: int, kv_policy: str) -> np.ndarray:
    """bool [R]. With `keep`, tokens after an update attend to keys and values of older versions."""
    sampled = trajectory.versions == version
    if kv_policy == "keep" and trajectory.admission_version != version:
        return np.zeros_like(sampled)
    return sampled
