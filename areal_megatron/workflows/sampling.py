"""What all workflows share: requests to an engine, retries of failed ones, and seeds."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from areal_megatron.config import RolloutConfig
from areal_megatron.data.trajectory import checksum
from areal_megatron.engine.client import Completion, EngineClient, EngineError, RequestRefused

log = logging.getLogger(__name__)
_ATTEMPTS = 3
_RETRY_S = 1.0
_SEED_BITS = 62  # vLLM adds the number of the answer, and keeps the sum in 64 signed bits
INTERRUPTED = "abort"
"""The finish reason of an answer that was interrupted; a later request may resume it."""


@dataclass(frozen=True)
class Decoding:
    """How a token is drawn from the model's distribution."""

    temperature: float
    """0: the most likely token."""
    top_p: float = 1.0
    """From the fewest likely tokens that have this probability together; 1: from all."""
    top_k: int = 0
    """From the n likeliest tokens; 0: from all."""


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled, and on which engine."""

    client: EngineClient
    rollout: RolloutConfig
    stop_tokens: list[int]
    cache_salt: str | None
    may_interrupt: Callable[[], bool] = lambda: False
    """Returns whether requests are being aborted. If not, an aborted request has failed."""
    decoding: Decoding | None = None
    """None: as for training, from the whole distribution at rollout.temperature."""
    sampled: Callable[[int], None] = lambda tokens: None
    """Called with the number of sampled tokens as soon as the engine has nothing more to do for these trajectories, if
    that is before they are scored."""
    adapter: str = ""
    """The name of one of several adapters that the engine serves."""


@dataclass(frozen=True)
class GenerationRequest:
    """One request to an engine."""

    tokens: list[int]
    """The prompt and everything after it that the answer is to follow."""
    max_tokens: int
    stop_tokens: list[int]
    """Tokens that end an answer; empty if its length is forced."""
    request_id: str
    seed: int
    routes_from: int = 0
    """The number of leading tokens whose routes are known already."""


async def generate(sampling: Sampling, request: GenerationRequest, n: int = 1) -> list[Completion]:
    """Returns n answers to one request, the k-th sampled with seed + k.

    They are complete, unless requests are being aborted. A failed request is repeated from its beginning; raises
    EngineError when it has failed _ATTEMPTS times, and RequestRefused at once.
    """
    for attempt in range(1, _ATTEMPTS):
        try:
            return await _generate_once(sampling, request, n, attempt)
        except RequestRefused:
            raise
        except EngineError as e:
            log.warning("attempt %d of %d: %s", attempt, _ATTEMPTS, e)
            await asyncio.sleep(_RETRY_S)
    return await _generate_once(sampling, request, n, _ATTEMPTS)


async def _generate_once(sampling: Sampling, request: GenerationRequest, n: int, attempt: int) -> list[Completion]:
    client, request_id = sampling.client, f"{request.request_id}-{attempt}"
    decoding = sampling.decoding or Decoding(sampling.rollout.temperature)
    completions = await client.generate(
        request.tokens,
        n=n,
        max_tokens=request.max_tokens,
        temperature=decoding.temperature,
        top_p=decoding.top_p,
        top_k=decoding.top_k,
        stop_tokens=request.stop_tokens,
        request_id=request_id,
        cache_salt=sampling.cache_salt,
        seed=request.seed,
        routes_from=request.routes_from if sampling.rollout.replay_routes else None,
        adapter=sampling.adapter,
    )
    ends = ("stop", "length", *([INTERRUPTED] if sampling.may_interrupt() else []))
    for completion in completions:
        if completion.finish_reason not in ends or not np.isfinite(completion.logprobs).all():
            raise EngineError(f"{client.name} did not complete {request_id}: finish reason {completion.finish_reason}")
    asked = checksum(request.tokens)
    return [replace(completion, asked=asked) for completion in completions]


def sampling_seed(seed: int, purpose: Literal["train", "eval"], *key: int) -> int:
    """Returns the seed of the first answer to a prompt, in [0, 2⁶²); the k-th answer, from 0, has this seed + k.

    `seed` is the run's. `key` is an epoch and a prompt's id, and for evaluation the id alone. A prompt that is sampled
    again under the same weights gets the same answers: the seed is the same in every process, on every machine and
    under every version of Python.
    """
    digest = hashlib.sha256(" ".join(map(str, (purpose, seed, *key))).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)


def cache_salt(rollout: RolloutConfig, version: int) -> str | None:
    """Returns the salt of an engine's prefix cache under this version.

    If the KV cache is kept over updates, only requests of one version share prefix blocks. `recompute` drops the
    blocks at each update, so that no salt is needed.
    """
    return f"v{version}" if rollout.kv_policy == "keep" else None
