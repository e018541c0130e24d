"""Who may use an engine: the holders of the run's secret. Strangers get a 401 and little time.

vLLM's own --api-key leaves the routes of pause, weight transfer and collective_rpc open. TokenGuard is the outermost
middleware and makes no exception. It reads the secret from the file that AREAL_SECRET_FILE names; a caller sends it as
`Authorization: Bearer SECRET`, as any OpenAI client does with its API key. GuardedConnection closes the connections
over which nobody does that.
"""

from __future__ import annotations

import functools
import hmac
import logging
import os
import ssl
from functools import cache
from pathlib import Path
from typing import Any

from prometheus_client import Counter
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from areal_megatron.engine.environment import SECRET_FILE
from areal_megatron.process.errors import Rarely, printable, worth_a_line
from areal_megatron.run.credentials import Credentials
from areal_megatron.run.network import CREDENTIALS_FILE, Strangers, backlog
from areal_megatron.run.secured import Secured

log = logging.getLogger("vllm.areal")
REFUSED = Counter("areal:refused_requests", "Requests without the run's secret")
_HEADER_BYTES = 1 << 16
_ANSWER = b'{"error":"this route asks for the secret of the run"}'
_ANSWER_HEADERS = [
    (b"content-type", b"application/json"),
    (b"content-length", str(len(_ANSWER)).encode()),
    (b"www-authenticate", b"Bearer"),
    (b"connection", b"close"),
]


@cache
def _expected() -> bytes:
    secret = Path(os.environ[SECRET_FILE]).read_text(encoding="utf-8").strip()
    if not secret:
        raise ValueError(f"{os.environ[SECRET_FILE]}: the run's secret is empty")
    return f"Bearer {secret}".encode()


def is_authentic(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether a request's headers, whose names are in lower case, carry the run's secret, exactly once."""
    given = [value for name, value in headers if name == b"authorization"]
    return len(given) == 1 and hmac.compare_digest(given[0], _expected())


class TokenGuard:
    """ASGI middleware that answers every request without the secret with 401, and has its connection closed."""

    def __init__(self, app):
        self._app = app
        self._refused = 0
        _expected()  # a server without a secret is not to start

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan" or is_authentic(scope["headers"]):
            await self._app(scope, receive, send)
            return
        REFUSED.inc()
        self._refused += 1
        if worth_a_line(self._refused):
            client, path = (scope.get("client") or ["unknown"])[0], printable(scope["path"])
            log.warning("refused request %d, %s from %s: it lacks the run's secret", self._refused, path, client)
        await send({"type": "http.response.start", "status": 401, "headers": _ANSWER_HEADERS})
        await send({"type": "http.response.body", "body": _ANSWER})


class GuardedConnection(HttpToolsProtocol):
    """uvicorn's HTTP connection, closed unless a request with the secret soon comes over it (network.Strangers)."""

    _strangers = Strangers()

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._known, self._received = False, 0
        self._strangers.add(self, transport)

    def connection_lost(self, exc) -> None:
        self._strangers.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._known and self.cycle is None:  # its first headers are not complete
            self._received += len(data)
            if self._received > _HEADER_BYTES:
                self.transport.abort()

    def on_headers_complete(self) -> None:
        if not self._known and is_authentic(self.headers):
            self._known = True
            self._strangers.discard(self)
        super().on_headers_complete()


class SecuredConnection(Secured):
    """A GuardedConnection inside TLS."""

    def __init__(self, tls: ssl.SSLContext, **of_uvicorn: Any):
        super().__init__(tls, _Within(self, **of_uvicorn), GuardedConnection._strangers)


class _Within(GuardedConnection):
    def __init__(self, around: SecuredConnection, **of_uvicorn: Any):
        super().__init__(**of_uvicorn)
        self._around = around

    def connection_made(self, transport) -> None:
        self._around.is_known()
        super().connection_made(transport)


_complaints = Rarely(logging.WARNING)


def uvicorn_options() -> dict[str, Any]:
    """Returns the options for uvicorn with which it serves guarded connections and no WebSockets, and rarely warns of
    malformed requests; with the credentials of an engine at another site it speaks TLS."""
    logging.getLogger("uvicorn.error").addFilter(_complaints)
    connection: Any = GuardedConnection
    if CREDENTIALS_FILE in os.environ:
        tls = Credentials(Path(os.environ[CREDENTIALS_FILE])).listening()
        connection = functools.partial(SecuredConnection, tls)
        connection.__name__ = SecuredConnection.__name__  # uvicorn's log says which it is
    return {"http": connection, "ws": "none", "backlog": backlog()}
