"""The controller's socket for the messages of protocol.py: a ZeroMQ ROUTER that answers every one once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import zmq
import zmq.asyncio

from areal_megatron.controller.front import Front
from areal_megatron.process.errors import first_line
from areal_megatron.protocol import (
    PROTOCOL,
    Answer,
    Envelope,
    Hello,
    Refused,
    Reply,
    Request,
    Welcome,
    decode_envelope,
    encode_answer,
)
from areal_megatron.run.folder import RunError, SecretKeys
from areal_megatron.run.zeromq import MESSAGE_BYTES

log = logging.getLogger(__name__)

_LOOK_S = 0.5


class Refusal(Exception):
    """Raised by `handle` for a message that it cannot take; answered with Refused."""


class Service:
    """Receives, authenticates, and hands each message to `handle`; a slow one does not hold the others up.

    `endpoint` is where it listens: a free port of `host`, in a process of its own (front.py). Raises RunError if that
    process does not start, and in `run` if it ends.
    """

    def __init__(
        self,
        host: str,
        keys: SecretKeys,
        handle: Callable[[Request], Awaitable[Answer]],
        longest: int = MESSAGE_BYTES,
    ):
        """`longest`: bytes of a message at most; the connection of a longer one is closed."""
        self._handle = handle
        self._inner = zmq.Context.instance().socket(zmq.ROUTER)
        self._inner.set_hwm(0)  # as in front.py
        self._front = Front(self._inner, host, keys, longest)
        self._socket = zmq.asyncio.Socket.from_socket(self._inner)
        self.endpoint = self._front.endpoint
        self.dropped = 0
        """The number of messages, all of holders of the trainers' key, that were none of this protocol."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_front())
            while True:
                frames = await self._socket.recv_multipart()
                if (envelope := self._read(frames)) is not None:
                    tasks.create_task(self._answer(frames[:2], envelope))

    def close(self) -> None:
        self._front.close()
        self._socket.close(linger=0)
        self._inner.close(linger=0)  # else it closes, when it is collected, the socket that has its address then

    async def _watch_front(self) -> None:
        while (code := self._front.exit_code) is None:
            await asyncio.sleep(_LOOK_S)
        raise RunError(f"the process in front of the controller ended with code {code}; see above")

    def _read(self, frames: list[bytes]) -> Envelope | None:
        try:
            _front, _trainer, frame = frames
            return decode_envelope(frame)
        except Exception as e:  # RecursionError too: a message never ends the controller
            self.dropped += 1
            if self.dropped <= 10 or self.dropped % 1000 == 0:
                log.warning("dropped message %d, of %d bytes: %s", self.dropped, sum(map(len, frames)), first_line(e))
            return None

    async def _answer(self, sender: list[bytes], envelope: Envelope) -> None:
        if isinstance(envelope.body, Hello):
            reply = greet(envelope.body)
        else:
            try:
                reply = await self._handle(envelope.body)
            except Refusal as e:
                reply = Refused(str(e))
        if isinstance(reply, Refused):
            log.warning("refused %s of %s: %s", type(envelope.body).__name__, envelope.sender, reply.reason)
        await self._socket.send_multipart([*sender, encode_answer(envelope.number, reply)])


def greet(hello: Hello) -> Reply:
    if hello.protocol != PROTOCOL:
        return Refused(
            f"trainer rank {hello.rank} speaks protocol {hello.protocol}, the controller {PROTOCOL}; "
            "install the same areal_megatron in both pools"
        )
    return Welcome()
