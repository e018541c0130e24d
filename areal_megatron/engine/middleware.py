"""POST /commit, which an engine adds to vLLM's server.

It makes an engine's staged weights live under one short pause. By vLLM's own routes that would take three
requests, of which /pause sleeps for 20 ms even if the engine is paused already (vLLM 0.32, async_llm.py), and nothing
is generated in all that time.
"""

from __future__ import annotations

import logging
import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

log = logging.getLogger("vllm.areal")
PATH = "/commit"


class CommitRoute:
    """ASGI middleware that answers POST /commit and leaves everything else to vLLM."""

    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["path"] == PATH and scope["method"] == "POST":
            request = Request(scope, receive)
            await (await _commit(request))(scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def _commit(request: Request) -> Response:
    """Commits what is staged. Body: {"version": str, "clear_cache": bool}; answer: {"seconds": length of the pause}.

    Answers with status 500 if no complete update is staged; then the engine stays paused.
    """
    body, engine = await request.json(), request.app.state.engine_client
    try:
        await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=body["clear_cache"])
        paused = time.monotonic()
        await engine.finish_weight_update(body["version"])
        await engine.resume_generation()
    except Exception as e:
        log.exception("the commit of version %s failed", body["version"])
        return JSONResponse({"error": str(e)}, status_code=500)
    return JSONResponse({"seconds": time.monotonic() - paused})
