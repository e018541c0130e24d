"""How the processes of a run reach each other: machine.host, as each node understands it. Imports no torch."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import resource
import select
import socket
from collections.abc import Collection, Hashable, Mapping
from typing import NamedTuple

import psutil

from areal_megatron.config import ConfigError

KEEP_ALIVE_S = 60
"""Seconds after which an HTTP server of a run closes an idle connection. Clients give theirs up much earlier: a request
must not meet a server that is just closing."""
STRANGER_S = 10.0
"""Seconds that a connection to such a server has for its first request with the right secret or key."""
MOST_STRANGERS = 1024
"""Most connections that may be waiting for that at the same time."""
_SITE, _SITE_LISTEN = "AREAL_SITE", "AREAL_SITE_LISTEN"
CREDENTIALS_FILE = "AREAL_CREDENTIALS_FILE"
"""Environment variable, from engine/server.py to server and ranks of an engine at another site: the file of the run's
credentials."""
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 6}
_LOOKED_AT = 64
_TURNS = 4
"""Turns of the event loop after which a request that was read has reached whoever looks for the secret."""


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
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        raise ConfigError(
            f"machine.host: {host!r} is no address and no interface of {socket.gethostname()}; it has "
            f"{', '.join(sorted(interfaces))}"
        ) from None


def split_address(text: str) -> tuple[str, int]:
    """Returns host and port of `HOST:PORT` or `[HOST]:PORT`; port 0 if there is none. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or ("[" not in host and ":" in host) or text.endswith("]"):  # no port, perhaps an IPv6 address
        host, port = text, "0"
    if host.startswith("[") != host.endswith("]") or not host.strip("[]"):
        raise ValueError(f"{text} is not HOST or HOST:PORT")
    if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(f"{port} is no port")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Site(NamedTuple):
    """Where an engine at another site is, as its launcher tells it in its environment."""

    host: str
    """By which the run reaches it."""
    port: int
    """Where its server listens; rank R takes weights at the R-th port after it. 0: whichever ports are free."""
    listens: str
    """An address of its machine, which may be another one than the run knows."""

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)

    @property
    def settings(self) -> dict[str, str]:
        """The environment variables that say so."""
        return {_SITE: self.address, _SITE_LISTEN: self.listens}

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Site | None:
        """Returns this engine's, or None if it is at the run's own site."""
        if _SITE not in environment:
            return None
        return cls(*split_address(environment[_SITE]), environment[_SITE_LISTEN])


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
    try:
        return address_towards("192.0.2.1", 9)  # no machine's (RFC 5737)
    except OSError:
        raise ConfigError(
            f"machine.host: auto, but {socket.gethostname()} has no default route; name an interface: "
            f"{', '.join(sorted(psutil.net_if_addrs()))}"
        ) from None


def address_towards(host: str, port: int) -> str:
    """Returns the IP address of this machine in the network in which it reaches `host`. Raises OSError."""
    family, kind, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # of a datagram socket: sends nothing
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


def keep_alive(connection: socket.socket) -> None:
    """Has the kernel probe a connection that is silent for a minute, so that no firewall forgets it, and close it after
    another without an answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def backlog() -> int:
    """Returns how many connections may wait to be accepted: an event loop accepts them all before it looks at one."""
    return _share_of_descriptors(4096)


def _share_of_descriptors(most: int) -> int:
    """A quarter of the descriptors that this process may open, but not more than `most`."""
    return min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


class Strangers:
    """The connections of a server over which nobody has shown yet that he may use it.

    One that is not discarded within STRANGER_S is closed. So is the oldest that has said all it had to say, when there
    are more than MOST_STRANGERS, or than a quarter of the descriptors that this process may open: strangers cannot use
    them up.
    """

    def __init__(self):
        self._waiting: dict[Hashable, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}
        self._leaving: dict[Hashable, asyncio.Transport] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._leaving)

    def add(self, connection: Hashable, transport: asyncio.Transport) -> None:
        """Begins to wait for the connection's first good request."""
        clock = asyncio.get_running_loop().call_later(STRANGER_S, self._read_once_more, connection)
        self._waiting[connection] = transport, clock
        if len(self._waiting) > _share_of_descriptors(MOST_STRANGERS):
            self._make_room()

    def discard(self, connection: Hashable) -> None:
        """Stops waiting: the good request has come, or the connection is gone."""
        self._leaving.pop(connection, None)
        if found := self._waiting.pop(connection, None):
            found[1].cancel()

    def _read_once_more(self, connection: Hashable) -> None:
        # An event loop that was held up for so long has not read yet what came meanwhile.
        self._leave(connection)
        asyncio.get_running_loop().call_later(0.1, self._close, connection)

    def _make_room(self) -> None:
        # An event loop accepts many connections before it reads from one: what is to be read may hold the secret.
        for connection, (transport, _) in itertools.islice(self._waiting.items(), _LOOKED_AT):
            incoming = select.poll()
            incoming.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
            if not incoming.poll(0):
                self._leave(connection)
                self._close_after(_TURNS, connection)
                return

    def _leave(self, connection: Hashable) -> None:
        transport, clock = self._waiting.pop(connection)
        clock.cancel()
        self._leaving[connection] = transport

    def _close_after(self, turns: int, connection: Hashable) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._close_after, turns - 1, connection)
        else:
            self._close(connection)

    def _close(self, connection: Hashable) -> None:
        if transport := self._leaving.pop(connection, None):
            transport.abort()
