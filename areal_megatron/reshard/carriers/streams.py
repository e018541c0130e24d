"""Streams between trainer ranks and engine ranks, which carry the messages of a link in place of a process group.

Each engine rank listens, and trainer ranks connect to it, with a stream for each direction that they use:

| stream | from | content |
|---|---|---|
| keys | trainer rank 0, to an engine | the rank's requests for keys of the link (transport.py), one after another, |
| | at another site | and the answers |
| from member S to member R | the trainer rank of the two | messages, each after its tag and its length |

Within a site they are TCP, and a trainer rank shows a secret that the engine rank has put into the trainers' store. To
another site they are TLS, and both sides show the credentials of the run (credentials.py). Nothing else is read before.
Then the trainer rank says for which link the stream is. A message must have the tag and the length that the receiver
expects next, and a request a length within bounds: no memory is taken because a peer says so. A stream that fails is
never used again, and the link with it.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import queue
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from areal_megatron.process.errors import Rarely, first_line, printable
from areal_megatron.run.network import STRANGER_S, join_address, keep_alive, split_address

log = logging.getLogger("vllm.areal_megatron.streams")
log.addFilter(Rarely(logging.WARNING))

KEYS = "keys"
_MOST_STRANGERS = 64
"""Connections in their handshake; a further one has the oldest of them closed."""
_MESSAGE = struct.Struct("<QQ")
"""Tag and bytes of the message that follows."""
_LENGTH = struct.Struct("<I")
_LONGEST = 1 << 20
"""Most bytes of a request for keys, or of an answer."""
_PIECE = 1 << 20
"""Most bytes that are handed to OpenSSL at a time."""
_TIMEVAL = struct.Struct("@ll")
"""Seconds and microseconds, as the kernel has them."""
_WELCOME = b"\1"
_ENDED = "the link has ended"
_AGAIN_S = 0.2
Trust = ssl.SSLContext | bytes
"""By what the two ends of a stream know each other: the run's credentials, or a secret of the link."""


class _Greeting(msgspec.Struct):
    """The first thing that a trainer rank says."""

    link: str
    role: str


class _Request(msgspec.Struct):
    """What an engine rank asks of the link's keys."""

    do: Literal["set", "compare_set", "check", "get"]
    keys: list[str]
    values: list[bytes] = []


class _Answer(msgspec.Struct):
    values: list[bytes] = []
    problem: str = ""


_encode = msgspec.msgpack.encode


def _left(until: float) -> float:
    """Returns the time left; never zero or less, which no socket takes for a wait."""
    return max(until - time.monotonic(), 0.001)


class Stream:
    """A TCP connection to an end that belongs to the run. One thread reads or writes at a time; any may end it.

    Everything raises OSError once it has failed.
    """

    def __init__(self, connection: socket.socket):
        """Takes over a connection, over which nothing has been said yet."""
        self._connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection)

    @classmethod
    def of(cls, connection: socket.socket, trust: Trust, is_server: bool) -> Stream:
        """Returns the stream of a connection by what its ends know each other."""
        return _Secret(connection, trust, is_server) if isinstance(trust, bytes) else _Tls(connection, trust, is_server)

    def shake_hands(self, until: float) -> None:
        """Returns when the other end has shown that it belongs to the run; to be called before anything else."""
        raise NotImplementedError

    def write(self, *parts: bytes | memoryview) -> None:
        """Returns when the parts are on their way."""
        self._connection.settimeout(None)
        for part in parts:
            self._connection.sendall(part)

    def read(self, place: memoryview, until: float | None) -> None:
        """Fills `place`; until: by that time of the monotonic clock."""
        done = 0
        while done < len(place):
            if until is not None and until <= time.monotonic():
                raise TimeoutError("timed out")
            count = self._receive(place[done:], until)
            if not count:
                raise ConnectionError("the other end has closed the stream")
            done += count

    def _receive(self, place: memoryview, until: float | None) -> int:
        """Fills `place`, or a part of it. Returns the number of bytes."""
        # One call into the kernel for all of it, with the kernel's timeout: after each, a thread waits for the
        # interpreter, which the engine's own may hold for milliseconds.
        left = 0.0 if until is None else _left(until)
        limit = _TIMEVAL.pack(int(left), int(left % 1 * 1e6))
        self._connection.settimeout(None)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        try:
            return self._connection.recv_into(place, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError("timed out") from None

    def read_bounded(self, until: float | None) -> bytes:
        """Returns what `write_bounded` has written at the other end."""
        head = bytearray(_LENGTH.size)
        self.read(memoryview(head), until)
        (length,) = _LENGTH.unpack(head)
        if length > _LONGEST:
            raise ConnectionError(f"the other end announces {length} bytes, more than {_LONGEST}")
        content = bytearray(length)
        self.read(memoryview(content), until)
        return bytes(content)

    def write_bounded(self, content: bytes) -> None:
        if len(content) > _LONGEST:
            raise ConnectionError(f"{len(content)} bytes are more than {_LONGEST}")
        self.write(_LENGTH.pack(len(content)) + content)

    def end(self) -> None:
        """Wakes whoever reads or writes, at either end. Any thread may call it."""
        # Not SSLSocket.shutdown, after which a thread that still writes would do so in clear; and the descriptor stays
        # open, since another file could get its number while that thread uses it.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)

    def __del__(self):
        self._connection.close()


class _Secret(Stream):
    """One whose trainer rank shows a secret."""

    def __init__(self, connection: socket.socket, secret: bytes, is_server: bool):
        super().__init__(connection)
        self._secret, self._is_server = secret, is_server

    def shake_hands(self, until: float) -> None:
        if not self._is_server:
            self.write(self._secret)
            return
        shown = bytearray(len(self._secret))
        self.read(memoryview(shown), until)
        if not hmac.compare_digest(shown, self._secret):
            raise ConnectionError("another secret than the link's")


class _Tls(Stream):
    """One over TLS, whose ends both show credentials."""

    def __init__(self, connection: socket.socket, tls: ssl.SSLContext, is_server: bool):
        super().__init__(connection)
        self._connection = tls.wrap_socket(connection, is_server, do_handshake_on_connect=False)

    def shake_hands(self, until: float) -> None:
        self._connection.settimeout(_left(until))
        self._connection.do_handshake()

    def write(self, *parts: bytes | memoryview) -> None:
        self._connection.settimeout(None)
        for part in parts:
            for start in range(0, len(part), _PIECE):
                self._connection.sendall(part[start : start + _PIECE])

    def _receive(self, place: memoryview, until: float | None) -> int:
        self._connection.settimeout(None if until is None else _left(until))
        return self._connection.recv_into(place[:_PIECE])


class Listener:
    """Where an engine rank takes the streams of trainer ranks. Raises OSError if it cannot listen there."""

    def __init__(self, host: str, port: int, trust: Trust):
        self._trust, self._closed = trust, False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=_MOST_STRANGERS)
        self.port = self._socket.getsockname()[1]
        self._strangers: dict[Stream, None] = {}
        self._link = ""
        self._arrived: dict[tuple[str, str], Stream] = {}
        """(link, role) → the stream; also of links that have not begun here yet."""
        self._taken: list[Stream] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._accept, name="accept-streams", daemon=True).start()

    def begin(self, link: str) -> None:
        """Begins with the streams of `link`; all others end."""
        with self._changed:
            self._link = link
            others = [key for key in self._arrived if key[0] != link]
            for stream in [*self._taken, *map(self._arrived.pop, others)]:
                stream.end()
            self._taken = []
            self._changed.notify_all()

    def take(self, link: str, role: str, until: float) -> Stream:
        """Returns the stream of a role, once it is there. Raises OSError."""
        key = link, role
        with self._changed:
            self._changed.wait_for(lambda: key in self._arrived or self._link != link, until - time.monotonic())
            if self._link != link:
                raise ConnectionError("another generation of the link has begun")
            if key not in self._arrived:
                raise TimeoutError("no trainer rank has connected")
            self._taken.append(self._arrived.pop(key))
            return self._taken[-1]

    def close(self) -> None:
        """Stops listening and ends all streams."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.begin("")

    def _accept(self) -> None:
        while True:
            try:
                connection, (peer, *_) = self._socket.accept()
            except OSError as e:
                if self._closed:
                    return
                log.warning("no stream can be accepted: %s", e.strerror)  # out of descriptors, perhaps for a moment
                time.sleep(_AGAIN_S)
                continue
            try:
                stream = Stream.of(connection, self._trust, is_server=True)
            except OSError:  # it has gone again
                connection.close()
                continue
            waiting = [*self._strangers]
            if len(waiting) >= _MOST_STRANGERS:
                waiting[0].end()
            self._strangers[stream] = None
            try:
                threading.Thread(target=self._greet, args=(stream, peer), name="greet", daemon=True).start()
            except RuntimeError as e:  # out of threads, perhaps for a moment
                log.warning("no stream can be greeted: %s", first_line(e))
                self._strangers.pop(stream, None)
                stream.end()

    def _greet(self, stream: Stream, peer: str) -> None:
        until = time.monotonic() + STRANGER_S
        try:
            stream.shake_hands(until)
            greeting = msgspec.msgpack.decode(stream.read_bounded(until), type=_Greeting)
            stream.write(_WELCOME)
        except (OSError, msgspec.MsgspecError) as e:
            log.warning("refused a stream from %s: %s", peer, printable(first_line(e)))
            stream.end()
            return
        finally:
            self._strangers.pop(stream, None)
        with self._changed:
            if before := self._arrived.pop((greeting.link, greeting.role), None):
                before.end()
            self._arrived[greeting.link, greeting.role] = stream
            self._changed.notify_all()


class Dialer:
    """Opens streams from a trainer rank to the ranks of an engine. `address` is host:port of its server: rank R listens
    at the R-th port after that one."""

    def __init__(self, address: str, tls: ssl.SSLContext):
        self._host, self._port = split_address(address)
        self._tls = tls

    def dial(self, rank: int, link: str, role: str, until: float) -> Stream:
        """Returns a stream for `role` of `link`. Raises OSError."""
        return dial(self._host, self._port + 1 + rank, f"engine rank {rank}", self._tls, link, role, until)


def dial(host: str, port: int, who: str, trust: Trust, link: str, role: str, until: float) -> Stream:
    """Returns a stream to where `who` listens, for `role` of `link`. Raises OSError."""
    where = f"{who} at {join_address(host, port)}"
    try:
        connection = socket.create_connection((host, port), _left(until))
    except OSError as e:
        raise ConnectionError(f"cannot reach {where}: {first_line(e)}") from None
    try:
        stream = Stream.of(connection, trust, is_server=False)
        stream.shake_hands(until)
        stream.write_bounded(_encode(_Greeting(link, role)))
        stream.read(memoryview(bytearray(len(_WELCOME))), until)  # a server refuses a client after its handshake
    except OSError as e:
        connection.close()
        raise ConnectionError(
            f"{where} and this trainer rank do not know each other, or were cut off: {first_line(e)}"
        ) from None
    return stream


def role(sender: int, receiver: int) -> str:
    """Returns the role of the stream that carries messages from a member of a link to another."""
    return f"from member {sender} to member {receiver}"


class Streams:
    """Carries the messages of one rank of a link. Messages of a pair arrive in the order in which they were sent, and
    must be received in it. `open_stream` returns the stream from a member to another, of which `member` is one, by a
    time of the monotonic clock; it raises OSError."""

    def __init__(self, member: int, open_stream: Callable[[int, int, float], Stream], timeout_s: float):
        self._member, self._open, self._timeout_s = member, open_stream, timeout_s
        self._outboxes: dict[int, _Outbox] = {}
        self._inboxes: dict[int, _Inbox] = {}

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _Sent:
        """Sends one tensor, which must not change before the end of `wait`."""
        if peer not in self._outboxes:
            until = time.monotonic() + self._timeout_s
            self._outboxes[peer] = _Outbox(functools.partial(self._open, self._member, peer, until))
        return self._outboxes[peer].put(_bytes(*tensors), tag)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _Awaited:
        """Receives into one tensor, by the end of `wait`."""
        if peer not in self._inboxes:
            self._inboxes[peer] = _Inbox(functools.partial(self._open, peer, self._member))
        return self._inboxes[peer].expect(_bytes(*tensors), tag)

    def end(self) -> None:
        """Ends all streams, and what is on its way. Any thread may call it."""
        for box in (*self._outboxes.values(), *self._inboxes.values()):
            box.end()


class _Outbox:
    """What is sent to one member, on a thread of its own."""

    def __init__(self, open_stream: Callable[[], Stream]):
        self._open, self._stream, self._ended = open_stream, None, False
        self._waiting: queue.SimpleQueue[_Sent | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="send-stream", daemon=True).start()

    def put(self, content: memoryview, tag: int) -> _Sent:
        message = _Sent(content, tag)
        if self._ended:
            message.over(_ENDED)
        self._waiting.put(message)
        return message

    def end(self) -> None:
        self._ended = True
        self._waiting.put(None)
        if stream := self._stream:
            stream.end()

    def _run(self) -> None:
        problem = ""
        while (message := self._waiting.get()) is not None:
            try:
                if not problem:
                    self._stream = self._stream or self._open()
                    if self._ended:
                        raise ConnectionError(_ENDED)
                    self._stream.write(_MESSAGE.pack(message.tag, len(message.content)), message.content)
            except OSError as e:
                problem = first_line(e)
            message.over(problem)


class _Sent:
    """A message that is to be sent."""

    def __init__(self, content: memoryview, tag: int):
        self.content, self.tag = content, tag
        self._problem, self._over = "", threading.Event()

    def over(self, problem: str) -> None:
        self._problem = problem
        self._over.set()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: timedelta) -> None:
        """Returns when the tensor may change. Raises RuntimeError."""
        if not self._over.wait(timeout.total_seconds()):
            raise RuntimeError("timed out")
        if self._problem:
            raise RuntimeError(self._problem)


class _Inbox:
    """What is received from one member, by whoever waits for it."""

    def __init__(self, open_stream: Callable[[float], Stream]):
        self._open, self._stream, self._ended = open_stream, None, False
        self._expected: deque[_Awaited] = deque()

    def expect(self, place: memoryview, tag: int) -> _Awaited:
        self._expected.append(_Awaited(self, place, tag))
        return self._expected[-1]

    def read(self, last: _Awaited, until: float) -> None:
        """Receives all that is expected up to `last`."""
        self._stream = self._stream or self._open(until)
        if self._ended:
            self._stream.end()
            raise ConnectionError(_ENDED)
        while not last.is_completed():
            message, head = self._expected[0], bytearray(_MESSAGE.size)
            self._stream.read(memoryview(head), until)
            if (found := _MESSAGE.unpack(head)) != (message.tag, len(message.place)):
                raise ConnectionError(
                    f"message {found[0]} of {found[1]} bytes came in place of message {message.tag} of "
                    f"{len(message.place)}"
                )
            self._stream.read(message.place, until)
            self._expected.popleft().arrived = True

    def end(self) -> None:
        self._ended = True
        if stream := self._stream:
            stream.end()


class _Awaited:
    """A message that is to be received."""

    def __init__(self, inbox: _Inbox, place: memoryview, tag: int):
        self._inbox, self.place, self.tag = inbox, place, tag
        self.arrived = False

    def is_completed(self) -> bool:
        return self.arrived

    def wait(self, timeout: timedelta) -> None:
        """Returns when the tensor is filled. Raises RuntimeError."""
        try:
            self._inbox.read(self, time.monotonic() + timeout.total_seconds())
        except OSError as e:
            raise RuntimeError(first_line(e)) from None


def _bytes(flat: Tensor) -> memoryview:
    return memoryview(flat.detach().view(torch.uint8).numpy())


class RemoteKeys:
    """The keys of a link as an engine rank at another site uses them: by the methods of a store, which trainer rank 0
    carries out (`serve_keys`). Everything raises DistError, also ever after the first time."""

    def __init__(self, open_stream: Callable[[float], Stream], timeout_s: float):
        """`timeout_s`: how long the connection, and each answer, may take."""
        self._open, self._timeout_s = open_stream, timeout_s
        self._stream: Stream | None = None
        self._problem = ""
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self._ask(_Request("set", [key], [value.encode()]))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self._ask(_Request("compare_set", [key], [expected.encode(), value.encode()]))[0]

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(_Request("check", [*keys])))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._ask(_Request("get", [*keys]))

    def end(self) -> None:
        """Ends the stream. Any thread may call it."""
        self._problem = self._problem or _ENDED
        if stream := self._stream:
            stream.end()

    def _ask(self, request: _Request) -> list[bytes]:
        with self._lock:
            if self._problem:
                raise dist.DistError(self._problem)
            until = time.monotonic() + self._timeout_s
            try:
                self._stream = self._stream or self._open(until)
                self._stream.write_bounded(_encode(request))
                answer = msgspec.msgpack.decode(self._stream.read_bounded(until), type=_Answer)
            except (OSError, msgspec.MsgspecError) as e:
                self._problem = self._problem or first_line(e)
                raise dist.DistError(self._problem) from None
        if answer.problem:
            raise dist.DistError(answer.problem)
        return answer.values


def serve_keys(stream: Stream, keys: dist.Store, on_end: Callable[[str], None] = lambda reason: None) -> None:
    """Answers the requests of an engine rank on a thread of its own, until the stream ends; then calls `on_end`."""
    threading.Thread(target=_serve_keys, args=(stream, keys, on_end), name="serve-keys", daemon=True).start()


def _serve_keys(stream: Stream, keys: dist.Store, on_end: Callable[[str], None]) -> None:
    try:
        while True:
            request = msgspec.msgpack.decode(stream.read_bounded(None), type=_Request)
            try:
                answer = _Answer(_carry_out(request, keys))
            except (RuntimeError, ValueError) as e:
                answer = _Answer(problem=first_line(e))
            stream.write_bounded(_encode(answer))
    except (OSError, msgspec.MsgspecError) as e:
        on_end(first_line(e))
        stream.end()


def _carry_out(request: _Request, keys: dist.Store) -> list[bytes]:
    match request:
        case _Request("set", [key], [value]):
            keys.set(key, value)  # pyright: ignore[reportArgumentType]: torch's stub says str, and its store takes bytes
            return []
        case _Request("compare_set", [key], [expected, value]):
            return [keys.compare_set(key, expected.decode(), value.decode())]
        case _Request("check", names):
            return [b""] if keys.check(names) else []
        case _Request("get", names) if keys.check(names):  # the store would wait, and nobody else could use it
            return keys.multi_get(names)
    raise ValueError(f"{request.do}: no such keys, or not as many values as it takes")
