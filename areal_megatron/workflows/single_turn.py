"""One prompt, n independent answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from areal_megatron.config import RolloutConfig
from areal_megatron.data.prompts import Prompt
from areal_megatron.engine.client import Completion, EngineClient, EngineError

log = logging.getLogger(__name__)
_ATTEMPTS = 3
_RETRY_S = 1.0
INTERRUPTED = "abort"
"""Why an answer ended that goes on later."""


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled, and on which engine."""

    client: EngineClient
    rollout: RolloutConfig
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


async def sample(
    sampling: Sampling, prompt: Prompt, n: int, request_id: str, seed: int, interrupted: Sequence[Completion] = ()
) -> list[Completion]:
    """n answers, from whatever versions the engine holds meanwhile; those that are `interrupted` go on.

    Completed, unless requests are being aborted. A failed request is repeated from its beginning; raises EngineError
    when it has failed _ATTEMPTS times.
    """
    if not interrupted:
        return await ask(sampling, _question(sampling, prompt, request_id, seed), n)
    going_on = (
        _resume(sampling, prompt, answer, f"{request_id}-{k}", seed + k) for k, answer in enumerate(interrupted)
    )
    return await asyncio.gather(*going_on)


async def ask(sampling: Sampling, question: Question, n: int = 1) -> list[Completion]:
    """n answers to the same tokens, seeded with seed + k; see `sample`."""
    for attempt in range(1, _ATTEMPTS):
        try:
            return await _ask_once(sampling, question, n, attempt)
        except EngineError as e:
            log.warning("attempt %d of %d: %s", attempt, _ATTEMPTS, e)
            await asyncio.sleep(_RETRY_S)
    return await _ask_once(sampling, question, n, _ATTEMPTS)


def _question(
    sampling: Sampling, prompt: Prompt, request_id: str, seed: int, interrupted: Sequence[int] = (), routed: int = 0
) -> Question:
    forced = prompt.response_tokens
    left = max(1, (forced or sampling.rollout.max_new_tokens) - len(interrupted))
    return Question([*prompt.tokens, *interrupted], left, not forced, request_id, seed, routed)


async def _resume(
    sampling: Sampling, prompt: Prompt, interrupted: Completion, request_id: str, seed: int
) -> Completion:
    if interrupted.finish_reason != INTERRUPTED:
        return interrupted
    tokens = interrupted.tokens.tolist()
    routed = len(prompt.tokens) + len(tokens) - 1 if len(interrupted.routes) else 0
    (more,) = await ask(sampling, _question(sampling, prompt, request_id, seed, tokens, routed))
    joined = {
        name: np.concatenate((getattr(interrupted, name), getattr(more, name)))
        for name in ("tokens", "logprobs", "versions", "routes")
    }
    return Completion(**joined, finish_reason=more.finish_reason)


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
        routes_from=question.routed if sampling.rollout.replay_routes else None,
    )
    ends = ("stop", "length", *([INTERRUPTED] if sampling.may_interrupt() else []))
    for completion in completions:
        if completion.finish_reason not in ends or not np.isfinite(completion.logprobs).all():
            raise EngineError(f"{client.name} broke off {request_id}: finish reason {completion.finish_reason}")
    return completions
