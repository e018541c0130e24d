"""How the processes of a run reach each other: machine.host, as each node understands it. Imports no torch."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection

import psutil

from areal_megatron.config import ConfigError


def address(host: str) -> str:
    """Returns the IP address that `host` means on this node: an address, a name, a network interface such as ib0, or
    `auto`, the interface with the default route.

    Raises ConfigError if it is none of these.
    """
    interfaces = psutil.net_if_addrs()
    if host == "auto":
        return _routed()
    if host in interfaces:
        found = {a.family: a.address.partition("%")[0] for a in reversed(interfaces[host])}
        if not (own := found.get(socket.AF_INET) or found.get(socket.AF_INET6)):
            raise ConfigError(
                f"machine.host: interface {host} of {socket.gethostname()} has no address; it has "
                f"{', '.join(sorted(interfaces))}"
            )
        return own
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        raise ConfigError(
            f"machine.host: {host!r} is no address and no interface of {socket.gethostname()}; it has "
            f"{', '.join(sorted(interfaces))}"
        ) from None


def check_network(host: str, machines: Collection[str]) -> None:
    """Raises ConfigError if `host` is no address of this node, or one that cannot serve on several machines.

    `machines`: an id for each machine of the run.
    """
    own = ipaddress.ip_address(address(host))
    if len(machines) > 1 and (own.is_loopback or host[:1].isdigit()):
        kind = "a loopback address" if own.is_loopback else "the address of one machine"
        raise ConfigError(
            f"machine.host: {host} is {kind} and the job has {len(machines)} nodes: name the "
            "cluster's network interface, e.g. machine.host=ib0"
        )


def _routed() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # no machine's (RFC 5737); connecting a datagram socket sends nothing
        except OSError:
            raise ConfigError(
                f"machine.host: auto, but {socket.gethostname()} has no default route; name an interface: "
                f"{', '.join(sorted(psutil.net_if_addrs()))}"
            ) from None
        return probe.getsockname()[0]


def socket_settings(host: str) -> dict[str, str]:
    """Returns the environment in which gloo, NCCL and vLLM on this node use machine.host too, instead of an interface
    of their own choice.

    Raises ConfigError like `address`.
    """
    own = address(host)
    if ipaddress.ip_address(own).is_loopback:
        return {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": own}
    settings = {"VLLM_HOST_IP": own}
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == own for a in addresses):
            settings |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return settings
