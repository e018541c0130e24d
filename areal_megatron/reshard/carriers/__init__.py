"""What carries the messages of links: base.py has the interface, the other files a carrier each."""

from __future__ import annotations

from collections.abc import Callable

from areal_megatron.reshard.carriers.base import Carrier, LinkEnd
from areal_megatron.reshard.carriers.host import Host, HostTls
from areal_megatron.reshard.carriers.nccl import Nccl
from areal_megatron.reshard.carriers.tcp import Tcp
from areal_megatron.reshard.carriers.tls import Tls


def _of_device(end: LinkEnd) -> Carrier:
    return Tcp(end) if end.device.type == "cpu" else Nccl(end)


CARRIERS: dict[str, Callable[[LinkEnd], Carrier]] = {"device": _of_device, "host": Host}
"""reshard.link → the carrier within a site."""


def carrier_of(end: LinkEnd) -> Carrier:
    """Returns the carrier of one end of a link; the other end's is compared with it by `Carrier.library`."""
    if end.site is None:
        return CARRIERS[end.link](end)
    return Tls(end) if end.device.type == "cpu" and end.link == "device" else HostTls(end)
