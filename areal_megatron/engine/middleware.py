"""POST /commit, which an engine adds to vLLM's server, and its answers while it has no weights.

A commit makes an engine's staged weights live under one short pause. With vLLM's own routes it would take three
requests, and /pause sleeps for 20 ms even if the engine is paused already (vLLM 0.32, async_llm.py). Nothing is
generated in all that time.

An engine that begins without weights (rollout.first_weights) holds random ones until its first commit. Nobody is to
take what they sample for an answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from areal_megatron.engine.environment import EMPTY
from areal_megatron.engine.plugin import TAKE_PREFILLED_AGAIN

log = logging.getLogger("vllm.areal")
PATH = "/commit"
_BEFORE_WEIGHTS = {
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/collective_rpc",
    "/pause",
    "/resume",
    "/inference/v1/abort_requests",
}
"""What an engine without weights can be told to do; all other POST routes of vLLM may sample."""
_NO_WEIGHTS = {
    "error": "this engine has no weights before its first version arrives from the trainers; ask again later"
}


class CommitRoute:
    """ASGI middleware that answers POST /commit, and with 503 what an engine without weights cannot do; it leaves
    everything else to vLLM."""

    def __init__(self, app):
        self._app = app
        self._empty = EMPTY in os.environ

    async def __call__(self, scope, receive, send):
        posted = scope["path"] if scope["type"] == "http" and scope["method"] == "POST" else None
        if posted == PATH:
            response = await _commit(Request(scope, receive))
            self._empty &= response.status_code != 200
            await response(scope, receive, send)
        elif self._empty and posted is not None and posted not in _BEFORE_WEIGHTS:
            await JSONResponse(_NO_WEIGHTS, status_code=503)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def _commit(request: Request) -> Response:
    """Commits what is staged. Body: {"version": str, "clear_cache": bool}; answer: {"seconds": length of the pause,
    "prefilled_again": tokens computed again since the last commit, for answers under way at earlier ones}.

    Answers with status 500 if no complete update is staged; then the engine stays paused.
    """
    body, engine = await request.json(), request.app.state.engine_client
    try:
        core = engine.engine_core
        _, prefilled_again = await asyncio.gather(  # as fast as the first alone
            core.pause_scheduler_async(mode="keep", clear_cache=body["clear_cache"]),
            core.call_utility_async(TAKE_PREFILLED_AGAIN),
        )
        paused = time.monotonic()
        await engine.finish_weight_update(body["version"])
        await engine.resume_generation()
    except Exception as e:
        log.exception("the commit of version %s failed", body["version"])
        return JSONResponse({"error": str(e)}, status_code=500)
    return JSONResponse({"seconds": time.monotonic() - paused, "prefilled_again": prefilled_again})
