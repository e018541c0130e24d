"""What every workflow samples with: requests of one engine, which are repeated when they fail, and their seeds."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from areal_megatron.config import Rollout
from areal_megatron.engine.client import Completion, EngineClient, EngineError

log = logging.getLogger(__name__)
_ATTEMPTS = 3
_RETRY_S = 1.0
_BITS = 62  # vLLM adds the number of the answer, and keeps the sum in 64 signed bits
INTERRUPTED = "abort"
"""Why an answer ended that goes on later."""


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled, and on which engine."""

    client: EngineClient
    rollout: Rollout
    stop_tokens: list[int]
    cache_salt: str | None
    may_interrupt: Callable[[], bool] = lambda: False
    """Whether requests are being aborted; else an aborted one has failed."""


@dataclass(frozen=True)
class Question:
    tokens: list[int]
    max_tokens: int
    stops: bool
    """Whether the model may end its answer."""
    request_id: str
    seed: int
    routed: int = 0
    """Tokens from the first on whose routes are known."""


async def ask(sampling: Sampling, question: Question, n: int = 1) -> list[Completion]:
    """n answers to the same tokens, seeded with seed + k; see `sample`."""
    for attempt in range(1, _ATTEMPTS):
        try:
            return await _ask_once(sampling, question, n, attempt)
        except EngineError as e:
            log.warning("attempt %d of %d: %s", attempt, _ATTEMPTS, e)
            await asyncio.sleep(_RETRY_S)
    return await _ask_once(sampling, question, n, _ATTEMPTS)


async def _ask_once(sampling: Sampling, question: Question, n: int, attempt: int) -> list[Completion]:
    client, request_id = sampling.client, f"{question.request_id}-{attempt}"
    completions = await client.generate(
        question.tokens,
        n=n,
        max_tokens=question.max_tokens,
        temperature=sampling.rollout.temperature,
        stop_tokens=sampling.stop_tokens if question.stops else [],
        request_id=request_id,
        cache_salt=sampling.cache_salt,
        seed=question.seed,
        routes_from=question.routed if "replay" in sampling.rollout.experts else None,
    )
    ends = ("stop", "length", *([INTERRUPTED] if sampling.may_interrupt() else []))
    for completion in completions:
        if completion.finish_reason not in ends or not np.isfinite(completion.logprobs).all():
            raise EngineError(f"{client.name} broke off {request_id}: finish reason {completion.finish_reason}")
    return completions


def sampling_seed(seed: int, purpose: Literal["train", "eval"], *place: int) -> int:
    """Of the first answer to a prompt, in [0, 2⁶²); the k-th answer, from 0, has this + k.

    `seed` is the run's, `place` an epoch and a prompt's id, or for evaluation its id alone. The same in every process,
    on every machine and under every version of Python.
    """
    digest = hashlib.sha256(" ".join(map(str, (purpose, seed, *place))).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _BITS)


def cache_salt(rollout: Rollout, version: int) -> str | None:
    """With KV kept over updates, only requests of one version share prefix blocks; `recompute` drops the blocks."""
    return f"v{version}" if rollout.kv_policy == "keep" else None
