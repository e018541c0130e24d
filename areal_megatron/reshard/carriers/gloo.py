"""Messages between CPUs, by gloo; a pair connects at its first message."""

from __future__ import annotations

import functools
import os
from datetime import timedelta

import torch.distributed as dist

from areal_megatron.reshard.carriers.base import Carrier, Members

TRIES = 5
"""How often gloo waits for a peer that does not connect before it gives up."""


class Gloo(Carrier):
    """A process group of the link's own. Its messages end by themselves, at their timeout."""

    library = "gloo"

    def join(self, keys: dist.Store, members: Members, member: int) -> None:
        self.group = group(dist.PrefixStore("pairs", keys), member, len(members), self.end.timeout_s)


def group(store: dist.Store, member: int, members: int, timeout_s: float) -> dist.Backend:
    options = dist.ProcessGroupGloo._Options()
    # for one attempt to connect; messages have deadlines of their own
    options._timeout = timedelta(seconds=timeout_s) / TRIES
    options._threads = 2
    # Lazy: only pairs that exchange messages connect, and no rank waits for another to make the group.
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")  # torch heeds it only where it makes the devices itself
    make = functools.partial(dist.ProcessGroupGloo.create_device, lazy_init=True)
    options._devices = [make(interface=name) for name in interfaces.split(",") if name] or [
        dist.ProcessGroupGloo.create_default_device(lazy_init=True)
    ]
    return dist.ProcessGroupGloo(store, member, members, options)
