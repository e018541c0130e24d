"""What an engine adds to vLLM's server: the guard that asks for the run's secret, and POST /commit.

vLLM's own --api-key leaves the routes of pause, weight transfer and collective_rpc open. TokenGuard is the outermost
middleware and makes no exception. It reads the secret from the file that AREAL_SECRET_FILE names; a caller sends it as
`Authorization: Bearer SECRET`, as any OpenAI client does with its API key.

POST /commit makes an engine's staged weights live under one short pause. By vLLM's own routes that would take three
requests, of which /pause sleeps for 20 ms even if the engine is paused already (vLLM 0.32, async_llm.py), and nothing
is generated in all that time.
"""

from __future__ import annotations

import hmac
import logging
import os
import time
from pathlib import Path

from prometheus_client import Counter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from areal_megatron.engine.environment import SECRET_FILE

log = logging.getLogger("vllm.areal")
REFUSED = Counter("areal:refused_requests", "Requests without the run's secret")
PATH = "/commit"


class TokenGuard:
    """ASGI middleware that answers every request without the secret: HTTP with 401, a WebSocket with close 1008."""

    def __init__(self, app):
        self._app = app
        secret = Path(os.environ[SECRET_FILE]).read_text().strip()
        if not secret:
            raise ValueError(f"{os.environ[SECRET_FILE]}: the run's secret is empty")
        self._expected = f"Bearer {secret}".encode()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan" or self._authentic(scope):
            await self._app(scope, receive, send)
            return
        REFUSED.inc()
        client = scope.get("client") or ["unknown"]
        log.warning("refused %s from %s: it does not carry the run's secret", scope["path"], client[0])
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"error":"this route asks for the secret of the run"}'})

    def _authentic(self, scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


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
