"""Messages to an engine at another site over TLS streams, which carry its use of the keys too (streams.py)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import cast

import torch.distributed as dist

from areal_megatron.reshard.carriers.base import Carrier, LinkEnd, Members
from areal_megatron.reshard.carriers.streams import (
    KEYS,
    Dialer,
    Listener,
    RemoteKeys,
    Stream,
    Streams,
    role,
    serve_keys,
)


class Tls(Carrier):
    """A stream for each pair of members, and one for the keys of each engine rank. Trainer ranks dial, engine ranks
    listen."""

    def __init__(self, end: LinkEnd):
        super().__init__(end)
        self._name = f"{end.store} {end.engine}/{end.generation}"
        self._served: list[Stream] = []
        self._ends: list[Streams | RemoteKeys] = []

    @property
    def library(self) -> str:
        return "TLS"

    def keys(self) -> dist.Store:
        site = self.end.site
        if not isinstance(site, Listener):
            return super().keys()
        site.begin(self._name)
        keys = RemoteKeys(functools.partial(site.take, self._name, KEYS), self.end.timeout_s)
        self._ends.append(keys)
        return cast(dist.Store, keys)  # it has the methods of one that links call

    def serve(self, engine_ranks: int, keys: dist.Store, on_lost: Callable[[int, str], None]) -> None:
        site, deadline = self.end.site, time.monotonic() + self.end.timeout_s
        assert isinstance(site, Dialer)
        for rank in range(engine_ranks):
            stream = site.dial(rank, self._name, KEYS, deadline)
            self._served.append(stream)
            serve_keys(stream, keys, functools.partial(on_lost, rank))

    def join(self, keys: dist.Store, members: Members, member: int) -> None:
        self._members = members
        self.group = Streams(member, self._open, self.end.timeout_s)
        self._ends.append(self.group)

    def close(self) -> None:
        for each in (*self._served, *self._ends):
            each.end()

    def _open(self, sender: int, receiver: int, until: float) -> Stream:
        """Returns the stream from a trainer rank to an engine rank. Raises OSError."""
        site, name = self.end.site, role(sender, receiver)
        if isinstance(site, Listener):
            return site.take(self._name, name, until)
        assert isinstance(site, Dialer)
        return site.dial(receiver - len(self._members.senders), self._name, name, until)
