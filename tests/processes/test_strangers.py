"""Strangers at the HTTP servers of a run: what they can neither end, nor use up, nor write into a log."""

import asyncio
import contextlib
import http.client
import itertools
import logging
import random
import socket
import statistics
import threading
import time

import pytest

from areal_megatron.process.errors import Rarely
from areal_megatron.run.credentials import Credentials, new_credentials
from tests.support.listeners import DESCRIPTORS, STRANGER_S, listening

CRAFTED, SILENT = 500, 1000
COUNTS = [1000, pytest.param(5000, marks=pytest.mark.soak)]
"""How many random requests there are."""


@pytest.fixture(params=["engine", "agents", "page"])
def listener(request, tmp_path):
    with listening(request.param, tmp_path) as listener:
        yield listener


class Friend(threading.Thread):
    """Asks with the secret, over a new connection each time, until it is told to stop."""

    def __init__(self, listener, tls=None):
        super().__init__()
        self._listener, self._tls, self._done = listener, tls, threading.Event()
        self.seconds, self.problems = [], []

    def run(self):
        while not self._done.wait(0.02):
            started = time.monotonic()
            try:
                self.ask(self.connect())
            except OSError as e:
                self.problems.append(e)
            self.seconds.append(time.monotonic() - started)

    def connect(self):
        place = self._listener.host, self._listener.port
        if self._tls:
            return http.client.HTTPSConnection(*place, timeout=10, context=self._tls)
        return http.client.HTTPConnection(*place, timeout=10)

    def ask(self, connection, close=True):
        connection.request("GET", self._listener.path, headers={"Authorization": f"Bearer {self._listener.secret}"})
        response = connection.getresponse()
        response.read()
        assert response.status == 200
        if close:
            connection.close()

    def stop(self):
        self._done.set()
        self.join()


def random_requests(count):
    generator = random.Random(1)
    for _ in range(count):
        start = generator.choice(
            [b"", b"GET ", b"POST / HTTP/1.1\r\n", b"GET /models HTTP/1.1\r\nHost: x\r\n", b"\x16\x03\x01"]
        )
        yield start + generator.randbytes(generator.randrange(1, 1500)) + generator.choice([b"", b"\r\n\r\n"])


def crafted_requests(listener, count):
    lines = [
        b"GET %s HTTP/1.1",
        b"POST %s HTTP/1.1",
        b"GET %s HTTP/1.0",
        b"OPTIONS %s HTTP/1.1",
        b"CONNECT %s HTTP/1.1",
    ]
    paths = [
        listener.path.encode(),
        b"/%0a%1b[2Jforged: line",
        b"http://x/commit",
        b"//commit",
        b"*",
        b"/" + b"a" * 9000,
    ]
    secret = listener.secret.encode()
    headers = [
        b"",
        b"Authorization: Bearer guess",
        b"Authorization: Bearer " + secret[:-1],
        b"Authorization: Bearer " + secret.upper(),
        b"Authorization: Bearer " + secret + b"x",
        b"Authorization: Basic " + secret,
        b"X-Authorization: Bearer " + secret,
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + b"A" * 24,
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c",
        b"Content-Length: 1000000000000",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked",
        b"Expect: 100-continue\r\nContent-Length: 100",
        b"X: " + b"y" * 70000,
        b"\r\n".join(b"X-%d: y" % number for number in range(3000)),
        b"X: \x00\x1b[31m",
        b"Host: x\nAuthorization : Bearer " + secret,
    ]
    bodies = [b"", b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"[" * 5000, b"GET /commit HTTP/1.1\r\nHost: x\r\n\r\n" * 50]
    for parts in itertools.islice(itertools.product(lines, paths, headers, bodies), 0, None, 5):
        line, path, header, body = parts
        yield line % path + b"\r\nHost: x\r\n" + header + b"\r\n\r\n" + body
        if not (count := count - 1):
            return


async def send(listener, request, gate):
    """Returns the beginning of the answer."""
    async with gate:
        try:
            reader, writer = await asyncio.open_connection(listener.host, listener.port)
        except OSError:
            return b""
        answer = b""
        try:
            writer.write(request)
            async with asyncio.timeout(0.1):
                answer = await reader.read(100)
        except (TimeoutError, OSError):
            pass
        finally:
            writer.transport.abort()
        return answer


async def flood(listener, count):
    """Returns the answers to all requests, and the connections that say too little."""
    halves = [
        b"",
        b"GET / HTTP/1.1\r\nAuthorization: ",
        b"POST /models HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{",
    ]
    silent = []
    for half in itertools.islice(itertools.cycle(halves), SILENT):
        connection = socket.socket()
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (listener.host, listener.port))
        connection.send(half)
        silent.append(connection)
        await asyncio.sleep(0.0005)
    gate = asyncio.Semaphore(60)
    requests = itertools.chain(random_requests(count), crafted_requests(listener, CRAFTED))
    return await asyncio.gather(*(send(listener, request, gate) for request in requests)), silent


def survived(listener, count, tls=None):
    """Floods the server, beside a friend who is served all the time, mostly within a second and each time within five,
    of which busy cores take their part; returns what the strangers were answered.

    Nothing of the server's is used up afterwards, and its log is short.
    """
    friend = Friend(listener, tls)
    kept = friend.connect()
    friend.ask(kept, close=False)
    descriptors = listener.process.num_fds() - 1
    friend.start()
    try:
        answers, silent = asyncio.run(flood(listener, count))
    finally:
        friend.stop()
    assert len(answers) == count + CRAFTED and len(silent) == SILENT > DESCRIPTORS
    assert not friend.problems and len(friend.seconds) > 50
    assert max(friend.seconds) < 5 and statistics.median(friend.seconds) < 1
    friend.ask(kept)  # its connection has survived

    deadline = time.monotonic() + STRANGER_S + 5
    while listener.process.num_fds() > descriptors and time.monotonic() < deadline:
        time.sleep(0.05)
    assert listener.process.num_fds() == descriptors
    for connection in silent:
        connection.close()
    assert len(listener.log.splitlines()) < 200 and len(listener.log) < 50_000
    return answers


@pytest.mark.parametrize("count", COUNTS)
def test_strangers_end_nothing_and_use_nothing_up(listener, count):
    found = {answer.split(b" ")[1] for answer in survived(listener, count) if answer}
    assert b"401" in found and all(status.startswith(b"4") for status in found), found
    assert "\x1b" not in listener.log and "\nforged" not in listener.log


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", ["site", "agents-tls"])
def test_strangers_at_an_engine_of_another_site_and_at_an_endpoint_for_others_use_nothing_up(tmp_path, kind, count):
    """None of them gets past the handshake. Thousands of them keep the cores busy, and a friend waits for that: but not
    for as long as it would behind a few strangers who are silent for STRANGER_S each."""
    (tmp_path / "site.pem").write_bytes(new_credentials())
    with listening(kind, tmp_path) as listener:
        answers = survived(listener, count, Credentials(tmp_path / "site.pem").calling())
        assert not any(b"HTTP" in answer for answer in answers)


def test_a_stranger_is_told_and_its_connection_closed(listener):
    for number, path in enumerate(("/models", "/%0aforged:line%1b[2J"), start=1):
        with socket.create_connection((listener.host, listener.port), timeout=1) as stranger:
            stranger.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            answer = b"".join(iter(lambda stranger=stranger: stranger.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 401") and b"\r\nconnection: close\r\n" in answer.lower()
        assert "\nforged" not in listener.log and "\x1b" not in listener.log
        assert len([line for line in listener.log.splitlines() if line.startswith("refused ")]) == number


def test_a_connection_that_says_too_little_is_closed(listener):
    for said in (b"", b"GET / HTTP/1.1\r\nHost: x\r\nX-Half: "):
        with socket.create_connection((listener.host, listener.port), timeout=STRANGER_S + 5) as stranger:
            stranger.sendall(said)
            started = time.monotonic()
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
            assert time.monotonic() - started > STRANGER_S - 0.5


def test_a_kind_of_error_gets_few_lines_whatever_each_was_about(caplog):
    """As asyncio tells of connections that it cannot accept: what is below the first line differs."""
    log = logging.getLogger("test_strangers")
    log.addFilter(Rarely(logging.ERROR))
    for number in range(5000):
        log.error(f"socket.accept() out of system resource\nsocket: <TransportSocket fd={number}>")
    assert len(caplog.records) == 15
