"""Connections of servers inside TLS: one that has not shown the credentials is a stranger as well."""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from typing import Any

from areal_megatron.run import network


class Secured(SSLProtocol):
    """A connection that hands `within` what comes after the handshake.

    A server's own TLS would give a silent one a minute, and know no limit to the number of such connections.
    """

    def __init__(self, tls: ssl.SSLContext, within: asyncio.Protocol, strangers: network.Strangers):
        settings: dict[str, Any] = {"server_side": True, "ssl_handshake_timeout": network.STRANGER_S}
        nobody: Any = None  # waits for the end of the handshake
        super().__init__(asyncio.get_running_loop(), within, tls, nobody, **settings)
        self._strangers = strangers

    def connection_made(self, transport: Any) -> None:
        self._strangers.add(self, transport)
        super().connection_made(transport)

    def connection_lost(self, exc) -> None:
        self.is_known()
        super().connection_lost(exc)

    def is_known(self) -> None:
        """The other end has shown the credentials, or has gone."""
        self._strangers.discard(self)
