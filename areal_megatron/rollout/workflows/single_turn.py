"""One prompt, n independent answers."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import numpy as np

from areal_megatron.config import Rollout
from areal_megatron.data.prompts import Prompt
from areal_megatron.rollout.client import Completion, EngineClient, EngineError

log = logging.getLogger(__name__)
_ATTEMPTS = 3
_RETRY_S = 1.0


async def sample(client: EngineClient, prompt: Prompt, *, n: int, rollout: Rollout, stop_tokens: list[int],
                 request_id: str, cache_salt: str | None, seed: int) -> list[Completion]:  # fmt: skip
    """n completed answers, from whatever versions the engine holds meanwhile.

    A failed request is repeated from its beginning; raises EngineError when it has failed _ATTEMPTS times.
    """
    once = partial(_sample_once, client, prompt, n, rollout, stop_tokens, cache_salt, seed)
    for attempt in range(1, _ATTEMPTS):
        try:
            return await once(f"{request_id}-{attempt}")
        except EngineError as e:
            log.warning("attempt %d of %d: %s", attempt, _ATTEMPTS, e)
            await asyncio.sleep(_RETRY_S)
    return await once(f"{request_id}-{_ATTEMPTS}")


async def _sample_once(client: EngineClient, prompt: Prompt, n: int, rollout: Rollout, stop_tokens: list[int],
                       cache_salt: str | None, seed: int, request_id: str) -> list[Completion]:  # fmt: skip
    forced = prompt.response_tokens
    completions = await client.generate(
        prompt.tokens,
        n=n,
        max_tokens=forced or rollout.max_new_tokens,
        temperature=rollout.temperature,
        stop_tokens=[] if forced else stop_tokens,
        request_id=request_id,
        cache_salt=cache_salt,
        seed=seed,
    )
    for completion in completions:
        if completion.finish_reason not in ("stop", "length") or not np.isfinite(completion.logprobs).all():
            raise EngineError(f"{client.name} broke off {request_id}: finish reason {completion.finish_reason}")
    return completions
