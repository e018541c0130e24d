"""Asks for the run's secret on every route of an engine.

vLLM's --api-key leaves the routes of pause, weight transfer and collective_rpc open. This middleware sits
outside everything and knows no exception. The secret comes by file, whose path is in AREAL_SECRET_FILE; a caller
sends it as `Authorization: Bearer SECRET`, which any OpenAI client does with its API key.
"""

from __future__ import annotations

import hmac
import logging
import os
from pathlib import Path

from prometheus_client import Counter

from areal_megatron.engine.environment import SECRET_FILE

REFUSED = Counter("areal:refused_requests", "Requests without the run's secret")
log = logging.getLogger("vllm.areal")


class TokenGuard:
    """ASGI middleware: 401 for every HTTP request, and close 1008 for every WebSocket, without the secret."""

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
