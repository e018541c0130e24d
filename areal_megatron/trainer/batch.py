"""Micro-batches: whole sequences packed into one row of tensors, and what is trained in it."""

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
    """Whole sequences of T tokens in total, N of which are trained; N may be 0."""

    tokens: Tensor
    """int64 [1, T]"""
    packed: Packed
    rows: Tensor
    """int64 [N]: the token before each trained token, whose hidden state predicts it."""
    labels: Tensor
    """int64 [N]: the trained tokens."""

    @property
    def untrained(self) -> Tensor:
        """bool [1, T]: the tokens whose hidden state predicts no trained token."""
        untrained = torch.ones_like(self.tokens, dtype=torch.bool)
        untrained[0, self.rows] = False
        return untrained


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
    kept: Tensor
    """bool [N]: False where a correction of the whole mini-batch masks the token."""
    proximal: Tensor | None = None
    """Log-probabilities before this batch's first step; None if they equal the current ones or are interpolated."""
    reference: Tensor | None = None
    """Log-probabilities under the reference model; None without one."""
    values: Tensor | None = None
    """The critic's values of the states before the tokens, before this batch's first step; None without a critic."""
    returns: Tensor | None = None
    """The returns that the critic learns to predict; None without a critic."""


def pack(
    sequences: Sequence[np.ndarray], trained: Sequence[np.ndarray], multiple: int, device: torch.device
) -> MicroBatch:
    """Packs sequences (int32 [n]) in their order; `trained`: the places, from 1 to n − 1, of each one's trained tokens.

    A last, untrained sequence fills T up to a multiple of `multiple`, so that sequence parallelism can cut the row
    evenly. Without any sequence the row consists of this filler.
    """
    lengths = [len(sequence) for sequence in sequences]
    total = max(sum(lengths), 1)
    filler = -(-total // multiple) * multiple - sum(lengths)
    starts = np.cumsum([0, *lengths])
    row = _joined([*sequences, np.zeros(filler, np.int64)], np.int64)
    targets = _joined([start + places for start, places in zip(starts, trained, strict=False)], np.int64)
    return MicroBatch(
        tokens=torch.from_numpy(row[None]).to(device),
        packed=Packed(lengths=(*lengths, filler) if filler else tuple(lengths), device=device),
        rows=torch.from_numpy(targets - 1).to(device),
        labels=torch.from_numpy(row[targets]).to(device),
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
    """Packs trajectories into one micro-batch, with the advantage and the weight of each one's tokens.

    `version` is the one that is trained. `proximal` stays None, `kept` is True everywhere. Routes are replayed if
    `routing` is given. Raises ConfigError for routes of another model.
    """
    trained = _joined([t.loss_mask for t in trajectories], np.bool_)
    microbatch = pack(
        [np.concatenate((t.prompt, t.response)) for t in trajectories],
        [len(t.prompt) + np.flatnonzero(t.loss_mask) for t in trajectories],
        multiple,
        device,
    )
    if routing:
        microbatch.packed.routes = routing.pack(trajectories, microbatch.tokens.numel())
    lengths = np.array([len(t.response) for t in trajectories], dtype=np.int64)
    sequences = np.repeat(np.arange(len(trajectories)), lengths)[trained]
    staleness = version - _joined([t.versions for t in trajectories], np.int32)[trained]
    fresh = staleness == 0
    if kv_policy == "keep":  # tokens after an update attend to keys and values of older versions
        fresh &= np.array([t.admission_version == version for t in trajectories], dtype=np.bool_)[sequences]
    columns = {
        "behaviour": _joined([t.logprobs for t in trajectories], np.float32)[trained],
        "advantages": np.array(advantages, dtype=np.float32)[sequences],
        "weights": np.array(weights, dtype=np.float32)[sequences],
        "sequences": sequences,
        "staleness": staleness.astype(np.float32),
        "by_this_version": fresh,
        "kept": np.ones_like(fresh),
    }
    return PPOMicroBatch(microbatch, **{name: torch.from_numpy(values).to(device) for name, values in columns.items()})


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype, casting="unsafe")
