"""An HTTP server of a run, to which strangers can connect: they get little time and room, and few lines in its log."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from areal_megatron.process.errors import Rarely, printable, worth_a_line
from areal_megatron.run.network import KEEP_ALIVE_S, Strangers, backlog
from areal_megatron.run.secured import Secured

log = logging.getLogger(__name__)
_complaints = Rarely(logging.ERROR)
"""Each malformed request is an error with a traceback to aiohttp, and each refused descriptor is one to asyncio."""


class HttpServer:
    """Has `answer` answer every request, from `start` to `close`.

    A request whose connection ends is cancelled. `answer` calls `welcome` for requests that show the server's secret.
    Connections over which none of these has come are closed as network.Strangers says.

    Example:
        server = HttpServer(answer)
        await server.start(socket.create_server(("127.0.0.1", 0)))
        print(server.port)
        await server.close()
    """

    def __init__(
        self, answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], tls: ssl.SSLContext | None = None
    ):
        """`tls`: Credentials.listening(), to speak with holders of the same credentials alone."""
        self._answer, self._tls = answer, tls
        self._runner: web.ServerRunner | None = None
        self._server: _Server | None = None
        self.refusals = 0
        """Calls of `refused`."""

    async def start(self, listening: socket.socket) -> None:
        """Serves over a bound socket, and closes it at the end."""
        for logger in (log, logging.getLogger("asyncio")):
            logger.addFilter(_complaints)
        settings = {"handler_cancellation": True, "keepalive_timeout": KEEP_ALIVE_S}
        server = _Server(self._answer, self._tls, access_log=None, logger=log, **settings)
        runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await runner.setup()
        await web.SockSite(runner, listening, backlog=backlog()).start()
        self._runner, self._server, self.port = runner, server, listening.getsockname()[1]

    def welcome(self, request: web.BaseRequest) -> None:
        """The connection of this request is no stranger's."""
        if self._server is not None:
            self._server.strangers.discard(request.protocol)

    def refused(self, what: str, response: web.StreamResponse) -> web.StreamResponse:
        """Returns the response. Some of many refusals are logged, with what was refused."""
        self.refusals += 1
        if worth_a_line(self.refusals):
            log.warning("refused request %d: %s", self.refusals, printable(what))
        return response

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()


class _Server(web.Server):
    """aiohttp's server, which closes the connections of strangers."""

    def __init__(self, answer: Callable, tls: ssl.SSLContext | None, **settings: Any):
        super().__init__(answer, **settings)
        self.strangers, self._tls = Strangers(), tls
        self.handshakes: dict[web.RequestHandler, Secured] = {}

    def __call__(self) -> Any:  # aiohttp's own handler, or what has it inside TLS
        handler = super().__call__()
        return handler if self._tls is None else _Secured(self._tls, handler, self)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        if around := self.handshakes.pop(handler, None):
            around.is_known()
        super().connection_made(handler, transport)
        self.strangers.add(handler, transport)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        self.strangers.discard(handler)
        super().connection_lost(handler, exc)


class _Secured(Secured):
    """A handler's connection, until whose handshake `server` knows nothing of the handler."""

    def __init__(self, tls: ssl.SSLContext, handler: web.RequestHandler, server: _Server):
        super().__init__(tls, handler, server.strangers)
        self._server, self._handler = server, handler
        server.handshakes[handler] = self

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.handshakes.pop(self._handler, None)
        super().connection_lost(exc)
