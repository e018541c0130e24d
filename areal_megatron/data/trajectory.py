"""Trained samples, the parts of a batch that data-parallel replicas train on, and their encoding.

Needs numpy and msgspec only, no torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from areal_megatron.process.files import write_atomically


class Trajectory(msgspec.Struct, kw_only=True):
    """One trained sample of an episode, with P prompt tokens and R response tokens; a single turn has one, an answer.

    The others of an episode begin with other prompts: where a chat template rewrites what was said before, for one.
    """

    uid: int
    """Admission number of the episode, unique in the run."""
    sample: int = 0
    """Number of this sample in its episode, in the order in which they begin."""
    of_samples: int = 1
    """How many samples its episode has."""
    turns: int = 1
    """How many of its answers are in no earlier sample."""
    epoch: int
    prompt_id: int
    """Row of the data set, from 0; (epoch, prompt_id) identifies the group."""
    admission_version: int
    prompt: np.ndarray
    """int32 [P]"""
    response: np.ndarray
    """int32 [R], including the end token if the answer has one"""
    logprobs: np.ndarray
    """float32 [R], log-probability of each token in the distribution that it was sampled from"""
    versions: np.ndarray
    """int32 [R], policy version that sampled each token"""
    loss_mask: np.ndarray
    """uint8 [R], 1 where the token is trained"""
    asked: int | None = None
    """`checksum` of the tokens that the engine was sent for its first token; None if no engine was asked."""
    reward: float
    """The episode's."""
    returns: list[tuple[int, float]] = []
    """(trained tokens, return) of each of its answers, where answers have rewards of their own; empty: each has the
    return `reward`."""
    truncated: bool
    """Whether the episode's last answer was cut at rollout.max_new_tokens."""
    correct: bool = False
    """Whether the answer is right: its score is 1 or more, whatever its length or its turns take off the reward."""
    failed: bool = False
    """Whether its reward is unknown; `reward` says nothing then, and no token is trained."""
    terms: dict[str, float] = {}
    """What the group function has added to the reward, by name."""
    reference: np.ndarray = msgspec.field(default_factory=lambda: np.zeros(0, np.float32))
    """float32 [R], log-probability of each token by served.teacher. Empty where that is not asked, or where no token is
    trained."""
    likely_tokens: np.ndarray = msgspec.field(default_factory=lambda: np.zeros(0, np.int32))
    """int32 [trained tokens, k], flat: the tokens that served.teacher finds likeliest in the place of each, in order;
    -1 for one that the policy does not have. Empty without ppo.penalty.kl_form=forward or reverse."""
    likely_logprobs: np.ndarray = msgspec.field(default_factory=lambda: np.zeros(0, np.float32))
    """float32 [trained tokens, k], flat: their log-probabilities by served.teacher."""
    routes: np.ndarray = msgspec.field(default_factory=lambda: np.zeros(0, np.uint8))
    """uint8 or uint16 [tokens, layers, k], flat: the experts that the engine's routers chose for every token but the
    last, which the engine never computed with. Empty without rollout.replay_routes."""

    @property
    def name(self) -> str:
        """`12` for the one sample of episode 12; `12.0` for the first of several, `12.1` for the second."""
        return f"{self.uid}.{self.sample}" if self.of_samples > 1 else str(self.uid)

    @property
    def cut(self) -> bool:
        """Whether it ends with an answer that was cut: of several samples of an episode the last one may."""
        return self.truncated and self.sample == self.of_samples - 1

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)

    @property
    def answers(self) -> list[tuple[int, float]]:
        """(trained tokens, return) of its answers; of all together, if all have the same return."""
        return self.returns or [(int(self.loss_mask.sum()), self.reward)]


def trained_by_version(versions: np.ndarray, loss_mask: np.ndarray) -> dict[int, int]:
    """Returns how many trained tokens of a sample are of each of its versions, in ascending order."""
    return {v: int(loss_mask[versions == v].sum()) for v in np.unique(versions).tolist()}


def checksum(tokens: Sequence[int] | np.ndarray) -> int:
    """Returns the CRC-32 of tokens as int32, little-endian."""
    return zlib.crc32(np.asarray(tokens, "<i4").tobytes())


class Excerpt(msgspec.Struct, kw_only=True):
    """A part of a trajectory whose tokens trainers and an engine score under the same version of the weights."""

    tokens: np.ndarray
    """int32 [n]"""
    compared: np.ndarray
    """uint8 [n], 1 where the token's log-probability is compared; never the first."""
    at: int
    """The place of its first compared token among the compared tokens of all excerpts of the batch."""


class BatchPart(msgspec.Struct, kw_only=True):
    """What one data-parallel replica trains on in one PPO update.

    `minibatches[m][k]` lists the bundles of micro-batch k of mini-batch m: a bundle holds the indices in `trajectories`
    of answers whose prompt is computed once, or a single index. All replicas have the same number of mini-batches and
    of micro-batches; a micro-batch may be empty.
    """

    version: int
    """The policy version that this batch trains, i; training it makes version i+1."""
    trajectories: list[Trajectory]
    minibatches: list[list[list[list[int]]]]
    groups: int
    """The number of groups in the whole batch."""
    group_of: list[int]
    """The group of each trajectory, numbered from 0 in the whole batch; its other answers may be in other parts."""
    episodes: int
    """The number of episodes in the whole batch."""
    episode_of: list[int]
    """The episode of each trajectory, numbered likewise."""
    probe: list[Excerpt] = []
    """What this replica scores under the version before it is trained."""
    probe_tokens: int = 0
    """The compared tokens of all parts' probes."""

    @property
    def members(self) -> list[list[list[int]]]:
        """The indices in `trajectories` by [mini-batch][micro-batch], in the order of their bundles."""
        return [[[*chain(*bundles)] for bundles in minibatch] for minibatch in self.minibatches]


class LossPart(msgspec.Struct, kw_only=True):
    """What one data-parallel replica computes a loss with that a program asks for: `part` has one mini-batch."""

    part: BatchPart
    loss: str
    """A name of ppo/algorithm.py."""
    advantages: list[np.ndarray]
    """float32 [trained tokens] of each trajectory"""
    weights: list[np.ndarray]
    """float32 [trained tokens] of each trajectory, which the losses of its tokens are multiplied by before they are
    summed; if [], the loss has its own, a mean over the samples"""
    at: list[int]
    """The place of each trajectory's first trained token among all samples' tokens."""
    tokens: int
    """The trained tokens of all samples, of other replicas' too."""


_DTYPES = {"<i4", "<f4", "|u1", "<u2"}


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.str in _DTYPES:
        return [value.dtype.str, value.tobytes()]
    raise TypeError(f"cannot send {type(value).__name__}")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise NotImplementedError(f"cannot receive {kind.__name__}")
    dtype, data = value
    if dtype not in _DTYPES:
        raise msgspec.ValidationError(f"array of dtype {dtype!r}")
    return np.frombuffer(data, dtype)


def encoder() -> msgspec.msgpack.Encoder:
    """Returns an encoder for structs with one-dimensional int32, float32, uint8 and uint16 arrays.

    Arrays are encoded as raw little-endian bytes.
    """
    return msgspec.msgpack.Encoder(enc_hook=_encode_array)


def decoder(kind: Any) -> msgspec.msgpack.Decoder:
    """Returns a decoder for messages of type `kind`, which raises msgspec.ValidationError for others.

    Nothing is ever unpickled.
    """
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)


def store(value: Any, path: Path) -> None:
    """Encodes a value into a file, which appears complete and synced to disk or not at all. Makes its folder, if need
    be, but not the one around that. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, encoder().encode(value), sync=True)
