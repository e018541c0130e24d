"""The single-turn workflow: one prompt, n independent answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from areal_megatron.data.prompts import Prompt
from areal_megatron.engine.client import Completion
from areal_megatron.workflows.sampling import INTERRUPTED, GenerationRequest, Sampling, generate


async def sample(
    sampling: Sampling, prompt: Prompt, n: int, request_id: str, seed: int, interrupted: Sequence[Completion] = ()
) -> list[Completion]:
    """Returns n answers, sampled from whatever versions the engine holds in the meantime.

    `interrupted`: the n answers as they were when they were interrupted. They are resumed, each with a request of its
    own; those that were complete are returned as they are. Retries and errors are those of `generate`.
    """
    if not interrupted:
        return await generate(sampling, _request(sampling, prompt, request_id, seed), n)
    resumed = (_resume(sampling, prompt, answer, f"{request_id}-{k}", seed + k) for k, answer in enumerate(interrupted))
    return await asyncio.gather(*resumed)


def _request(
    sampling: Sampling, prompt: Prompt, request_id: str, seed: int, answered: Sequence[int] = (), routes_from: int = 0
) -> GenerationRequest:
    forced = prompt.response_tokens
    return GenerationRequest(
        tokens=[*prompt.tokens, *answered],
        max_tokens=max(1, (forced or sampling.rollout.max_new_tokens) - len(answered)),
        stop_tokens=[] if forced else sampling.stop_tokens,
        request_id=request_id,
        seed=seed,
        routes_from=routes_from,
    )


async def _resume(
    sampling: Sampling, prompt: Prompt, interrupted: Completion, request_id: str, seed: int
) -> Completion:
    if interrupted.finish_reason != INTERRUPTED:
        return interrupted
    tokens = interrupted.tokens.tolist()
    routes_from = len(prompt.tokens) + len(tokens) - 1 if len(interrupted.routes) else 0
    (more,) = await generate(sampling, _request(sampling, prompt, request_id, seed, tokens, routes_from))
    joined = {
        name: np.concatenate((getattr(interrupted, name), getattr(more, name)))
        for name in ("tokens", "logprobs", "versions", "routes")
    }
    return Completion(**joined, finish_reason=more.finish_reason, asked=interrupted.asked)
