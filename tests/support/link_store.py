"""The trainers' store, as trainer rank 0 opens it."""

import socket
from datetime import timedelta

import torch.distributed as dist

from areal_megatron.reshard.carriers.base import connect


def open_store() -> dist.TCPStore:
    """On loopback alone. Over a socket of torch's own, which is IPv6, it would look up every peer in DNS.

    Its port may be that of a store that has ended, so this process forgets its connections to stores.
    """
    connect.cache_clear()
    listener = socket.create_server(("127.0.0.1", 0))
    return dist.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        None,
        True,
        timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
