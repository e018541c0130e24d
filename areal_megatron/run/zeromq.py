"""How the run's ZeroMQ sockets see to connections whose other end is gone."""

from __future__ import annotations

import zmq

SOCKET_OPTIONS = {
    zmq.IPV6: 1,  # where the address is one
    # The kernel answers these for a process that is stopped; heartbeats of ZeroMQ would take it for dead.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 60,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 6,
    zmq.TCP_MAXRT: 120_000,
}
"""Both sides close a connection to a machine that is gone, or cut off for two minutes."""
