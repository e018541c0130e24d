"""The unit of experience and what one data-parallel replica trains on. numpy and msgspec only: no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from areal_megatron.files import write_atomically


class Trajectory(msgspec.Struct, kw_only=True):
    """One sampled answer. P prompt tokens, R response tokens."""

    uid: int
    """Admission number of this trajectory in the run, unique."""
    epoch: int
    prompt_id: int
    """Line of the dataset, from 0; (epoch, prompt_id) names the group."""
    admission_version: int
    prompt: np.ndarray
    """int32 [P]"""
    response: np.ndarray
    """int32 [R], the end token included where the answer has one"""
    logprobs: np.ndarray
    """float32 [R], of the distribution each token was sampled from"""
    versions: np.ndarray
    """int32 [R], policy version that sampled each token"""
    loss_mask: np.ndarray
    """uint8 [R], 1 where the token is trained"""
    reward: float
    truncated: bool
    """Cut at rollout.max_new_tokens."""
    routes: np.ndarray = msgspec.field(default_factory=lambda: np.zeros(0, np.uint8))
    """uint8 or uint16 [tokens, layers, k], flat: the experts that the engine's routers chose, with
    rollout.experts=[replay]. Of all tokens but the last, which the engine never computed with; else of none."""

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)


class BatchPart(msgspec.Struct, kw_only=True):
    """What one data-parallel replica trains on in one PPO update.

    `minibatches[m][k]` lists the trajectories (indices) of micro-batch k of mini-batch m. All replicas
    have the same number of mini-batches and of micro-batches; a micro-batch may be empty.
    """

    version: int
    """Policy version that this batch trains (i); afterwards the policy is i+1."""
    trajectories: list[Trajectory]
    minibatches: list[list[list[int]]]
    groups: int
    """In the whole batch."""
    group_of: list[int]
    """Number, from 0, of each trajectory's group in the batch; its other answers may be in other parts."""


_DTYPES = {"<i4", "<f4", "|u1", "<u2"}


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.str in _DTYPES:
        return [value.dtype.str, value.tobytes()]
    raise NotImplementedError(f"cannot send {type(value).__name__}")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise NotImplementedError(f"cannot receive {kind.__name__}")
    dtype, data = value
    if dtype not in _DTYPES:
        raise msgspec.ValidationError(f"array of dtype {dtype!r}")
    return np.frombuffer(data, dtype)


def encoder() -> msgspec.msgpack.Encoder:
    """Encodes structs that hold one-dimensional int32, float32, uint8 and uint16 arrays, as raw little-endian bytes."""
    return msgspec.msgpack.Encoder(enc_hook=_encode_array)


def decoder(kind: Any) -> msgspec.msgpack.Decoder:
    """Decodes and checks the type; raises msgspec.ValidationError. Nothing is ever unpickled."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)


def store(value: Any, path: Path) -> None:
    """Encodes a value into a file, which appears whole and synced or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, encoder().encode(value), sync=True)
