"""The controller's socket for the messages of protocol.py: a ZeroMQ ROUTER that answers every authentic one once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec
import zmq
import zmq.asyncio

from areal_megatron.protocol import (
    PROTOCOL,
    EncodedBatch,
    Envelope,
    Hello,
    Refused,
    Reply,
    Request,
    Welcome,
    authentic,
    decode_envelope,
    encode_answer,
)

log = logging.getLogger(__name__)


class Refusal(Exception):
    """Raised by `handle` for a message that it cannot take; answered with Refused."""


class Service:
    """Receives, authenticates, and hands each message to `handle`; a slow one does not hold the others up.

    `endpoint` is where it listens, on a free port of `host`.
    """

    def __init__(self, host: str, token: str, handle: Callable[[Request], Awaitable[Reply | EncodedBatch]]):
        self._token, self._handle = token, handle
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)  # the answer to the last message still goes out
        if ":" in host:
            self._socket.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        self.endpoint = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"
        self.refused = 0
        """The number of messages that lacked the run's secret or were none of this protocol."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as answers:
            while True:
                frames = await self._socket.recv_multipart()
                if (envelope := self._read(frames)) is not None:
                    answers.create_task(self._answer(frames[0], envelope))

    def close(self) -> None:
        self._socket.close()

    def _read(self, frames: list[bytes]) -> Envelope | None:
        try:
            _address, frame = frames
            return decode_envelope(frame)
        except (ValueError, msgspec.MsgspecError) as e:
            self.refused += 1
            log.warning("dropped a message of %d bytes: %s", sum(map(len, frames)), e)
            return None

    async def _answer(self, address: bytes, envelope: Envelope) -> None:
        if not authentic(envelope, self._token):
            self.refused += 1
            log.warning("refused %s of %r: it lacks the run's secret", type(envelope.body).__name__, envelope.sender)
            reply = Refused("the message lacks the run's secret")
        elif isinstance(envelope.body, Hello):
            reply = greet(envelope.body)
        else:
            try:
                reply = await self._handle(envelope.body)
            except Refusal as e:
                reply = Refused(str(e))
        if isinstance(reply, Refused):
            log.warning("refused %s of %s: %s", type(envelope.body).__name__, envelope.sender, reply.reason)
        await self._socket.send_multipart([address, encode_answer(envelope.number, reply)])


def greet(hello: Hello) -> Reply:
    if hello.protocol != PROTOCOL:
        return Refused(
            f"trainer rank {hello.rank} speaks protocol {hello.protocol}, the controller {PROTOCOL}; "
            "install the same areal_megatron in both pools"
        )
    return Welcome()
