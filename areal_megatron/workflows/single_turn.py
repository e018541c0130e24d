"""One prompt, n independent answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from areal_megatron.data.prompts import Prompt
from areal_megatron.engine.client import Completion
from areal_megatron.workflows.sampling import INTERRUPTED, Question, Sampling, ask


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
