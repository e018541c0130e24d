"""The run's ZeroMQ sockets between machines: how they listen, and see to connections whose other end is gone."""

from __future__ import annotations

import zmq

HANDSHAKE_S = 1
"""How long a connection may take to show the key. One that took longer tries again by itself."""
MESSAGE_BYTES = 2**20
"""The longest message to a socket that listens: numbers, links, events or the text of an error."""

_OPTIONS = {
    zmq.IPV6: 1,  # where the address is one
    # The kernel answers these for a process that is stopped; heartbeats of ZeroMQ would take it for dead.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 60,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 6,
    zmq.TCP_MAXRT: 120_000,
}
"""Both sides close a connection to a machine that is gone, or cut off for two minutes."""


def open_socket(kind: int, context: zmq.Context | None = None) -> zmq.Socket:
    """Returns a socket with these options. `context`: the process's, by default."""
    made = (context or zmq.Context.instance()).socket(kind)
    for option, value in _OPTIONS.items():
        made.setsockopt(option, value)
    return made


def listen(socket: zmq.Socket, host: str, secret: bytes, longest: int = MESSAGE_BYTES) -> str:
    """Has a socket listen on a free port of an address, for those who know the public key of `secret` (Z85), and send
    no message longer than `longest` bytes. Returns its endpoint. Raises zmq.ZMQError."""
    socket.setsockopt(zmq.MAXMSGSIZE, longest)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_S * 1000)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    place = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
    return f"{place}:{socket.bind_to_random_port(place)}"
