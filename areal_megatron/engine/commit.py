"""Adds POST /commit to an engine: its staged weights become live under one short pause.

The same by vLLM's routes is three requests, of which /pause sleeps for 20 ms when the engine stands still already
(vLLM 0.32, async_llm.py); all of that is time in which nothing is generated.
"""

from __future__ import annotations

import logging
import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

log = logging.getLogger("vllm.areal")
PATH = "/commit"


class CommitRoute:
    """ASGI middleware, inside the guard: answers POST /commit, and leaves everything else to vLLM."""

    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["path"] == PATH and scope["method"] == "POST":
            request = Request(scope, receive)
            await (await _commit(request))(scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def _commit(request: Request) -> Response:
    """Body: {"version": str, "clear_cache": bool}. Answer: {"seconds": how long the engine stood still}.

    Status 500 if there is nothing whole to commit; then the engine stays paused.
    """
    body, engine = await request.json(), request.app.state.engine_client
    try:
        await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=body["clear_cache"])
        standing = time.monotonic()
        await engine.finish_weight_update(body["version"])
        await engine.resume_generation()
    except Exception as e:
        log.exception("the commit of version %s failed", body["version"])
        return JSONResponse({"error": str(e)}, status_code=500)
    return JSONResponse({"seconds": time.monotonic() - standing})
