"""Messages between CPUs of one site, by TCP streams (streams.py).

gloo, which would carry them too, ends the whole process in a thread of its own when two ranks connect after one of them
has given up a message (torch 2.13: Pair::handleEvents), and a link that fails must end nothing but itself.
"""

from __future__ import annotations

import secrets

import msgspec
import torch.distributed as dist

from areal_megatron.process.errors import first_line
from areal_megatron.reshard.carriers.base import Carrier, Members
from areal_megatron.reshard.carriers.streams import Listener, Stream, Streams, dial, role
from areal_megatron.reshard.messages import Listens
from areal_megatron.run.network import address_towards, split_address

_SECRET_BYTES = 32


class Tcp(Carrier):
    """A stream for each pair of members and direction. Engine ranks listen, trainer ranks dial."""

    group: Streams | None = None
    _listener: Listener | None = None

    @property
    def library(self) -> str:
        return "TCP"

    def join(self, keys: dist.Store, members: Members, member: int) -> None:
        self._keys, self._members, self._member = keys, members, member
        self._name = f"{self.end.store} {self.end.engine}/{self.end.generation}"
        if member >= len(members.senders):
            secret, host = secrets.token_bytes(_SECRET_BYTES), address_towards(*split_address(self.end.store))
            self._listener = Listener(host, 0, secret)
            self._listener.begin(self._name)
            listens = Listens(host, self._listener.port, secret.hex())
            keys.set(_key(member), msgspec.json.encode(listens).decode())
        self.group = Streams(member, self._open, self.end.timeout_s)

    def close(self) -> None:
        if self.group:
            self.group.end()
        if self._listener:
            self._listener.close()

    def _open(self, sender: int, receiver: int, until: float) -> Stream:
        """Returns the stream from one member to another. Raises OSError."""
        if self._listener:
            return self._listener.take(self._name, role(sender, receiver), until)
        peer = receiver if sender == self._member else sender
        try:  # an engine rank listens before it says that it is ready, for which the link has waited
            told = msgspec.json.decode(self._keys.get(_key(peer)), type=Listens)
        except (RuntimeError, msgspec.MsgspecError) as e:
            raise ConnectionError(f"where member {peer} listens is not known: {first_line(e)}") from None
        who, secret = self._members.name(peer), bytes.fromhex(told.secret)
        return dial(told.host, told.port, who, secret, self._name, role(sender, receiver), until)


def _key(member: int) -> str:
    return f"listens/{member}"
