"""The process in front of the controller: it listens to the network and passes on what holders of the trainers' key
say.

It holds the connections and does the encryption. Strangers, who can connect but not shake hands, take descriptors of
this process for HANDSHAKE_S and none of the controller's, and their bytes are libzmq's work here and never the event
loop's. It ends when the controller closes its input, or dies.
"""

from __future__ import annotations

import hmac
import logging
import signal
import subprocess
import sys
import tempfile
import time

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from areal_megatron.process.shown import guard
from areal_megatron.process.streams import log_to_stderr
from areal_megatron.protocol import public_key
from areal_megatron.run import descriptors
from areal_megatron.run.folder import RunError, SecretKeys
from areal_megatron.run.zeromq import HANDSHAKE_S, listen, open_socket

log = logging.getLogger(__name__)

_IO_THREADS = 4
"""One encrypts about 0.5 GB/s; connections are spread over them."""
_START_S = 60
_LINGER_S = 1
_LOG_S = 60.0
_EVENTS, _ASKED = "inproc://events", "inproc://zeromq.zap.01"  # the second is the name that ZeroMQ RFC 27 gives


class Orders(msgspec.Struct):
    host: str
    """The IP address to listen on."""
    inner: str
    """Where the controller listens."""
    secret: bytes
    """The controller's secret key."""
    client: bytes
    """The trainers' public key."""
    longest: int
    """Bytes of a message at most."""


class Front:
    """The controller's end: starts the process and connects it to the ROUTER `inner`.

    Raises RunError if the process does not begin to listen within a minute. `endpoint` is where it listens.
    """

    def __init__(self, inner: zmq.Socket, host: str, keys: SecretKeys, longest: int):
        self._inner = inner
        with tempfile.TemporaryDirectory(prefix="areal-") as private:  # once connected, nobody needs the name any more
            inner.bind(endpoint := f"ipc://{private}/inner")
            orders = Orders(host, endpoint, keys.controller, z85.decode(public_key(keys.trainers)), longest)
            command = [sys.executable, "-m", "areal_megatron.controller.front"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
            assert self._process.stdin is not None
            self._stdin = self._process.stdin
            self._stdin.write(msgspec.json.encode(orders) + b"\n")
            self._stdin.flush()
            if not inner.poll(_START_S * 1000):
                self._process.kill()
                raise RunError(
                    f"the controller's front did not begin to listen on {host} within {_START_S} s; see above"
                )
            self._address, listening = inner.recv_multipart()
        self.endpoint = listening.decode()

    @property
    def exit_code(self) -> int | None:
        """None while it lives."""
        return self._process.poll()

    def close(self) -> None:
        """Ends the process, after what was sent has been passed on."""
        self._inner.send_multipart([self._address, b""], zmq.DONTWAIT)
        try:
            self._process.wait(_LINGER_S + 1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdin.close()


class _Strangers:
    """Counts the connections that showed no key, and says so once a minute."""

    def __init__(self):
        self._accepted = self._known = self._older = self._said = 0
        self._ends, self._said_at = time.monotonic() + HANDSHAKE_S, -_LOG_S

    def note(self, event: int) -> None:
        self._accepted += event == zmq.EVENT_ACCEPTED
        self._known += event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def look(self) -> None:
        if (now := time.monotonic()) < self._ends:
            return
        closed = self._older - self._known  # those that came before the last look have had their time
        self._ends, self._older = now + HANDSHAKE_S, self._accepted
        if closed > self._said and now - self._said_at >= _LOG_S:
            log.warning("closed %d connections, since the start, that did not show the trainers' key", closed)
            self._said, self._said_at = closed, now


def pass_on(orders: Orders, over: int) -> None:
    """Listens, and passes messages on in both directions, until the descriptor `over` or the controller ends it."""
    context = zmq.Context(io_threads=_IO_THREADS)
    asked, events = context.socket(zmq.REP), context.socket(zmq.PAIR)
    asked.bind(_ASKED)  # before clients come: with nobody to ask, libzmq lets in all who know the controller's key
    outer, inner = open_socket(zmq.ROUTER, context), context.socket(zmq.DEALER)
    inner.set_hwm(0)  # every trainer waits for the answer to its message before it sends another
    inner.connect(orders.inner)
    outer.setsockopt(zmq.LINGER, _LINGER_S * 1000)  # the answer to the last message still goes out
    outer.monitor(_EVENTS, zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    events.connect(_EVENTS)
    inner.send_string(listen(outer, orders.host, orders.secret, orders.longest))

    strangers, poller = _Strangers(), zmq.Poller()
    for source in (asked, events, outer, inner, over):
        poller.register(source, zmq.POLLIN)
    while over not in (ready := dict(poller.poll(HANDSHAKE_S * 1000))):
        if asked in ready:
            asked.send_multipart(_judge(asked.recv_multipart(), orders.client))
        if events in ready:
            strangers.note(parse_monitor_message(events.recv_multipart())["event"])
        if outer in ready:
            inner.send_multipart(outer.recv_multipart(copy=False), copy=False)
        if inner in ready:
            frames = inner.recv_multipart(copy=False)
            if len(frames) == 1:
                break
            outer.send_multipart(frames, copy=False)
        strangers.look()
    outer.disable_monitor()
    for each in (asked, events, inner):
        each.close(linger=0)
    outer.close()
    context.term()


def _judge(question: list[bytes], client: bytes) -> list[bytes]:
    """Returns the answer to libzmq's question whether to let a client in (ZeroMQ RFC 27)."""
    version, number, *_, mechanism, key = question
    known = mechanism == b"CURVE" and hmac.compare_digest(key, client)
    return [version, number, *((b"200", b"OK") if known else (b"400", b"not the trainers' key")), b"", b""]


def main() -> None:
    guard()
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends after the controller, which gets them too
        signal.signal(number, signal.SIG_IGN)
    log_to_stderr()
    descriptors.raise_limit()
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=Orders)
    pass_on(orders, sys.stdin.fileno())


if __name__ == "__main__":
    main()
