"""The slow link that tests put between two sites is as slow as it says, and cuts off."""

import contextlib
import socket
import threading
import time

import pytest

from tests.support.slow_link import NoNamespaces, slow_link

MBPS, DELAY_MS = 80, 60


@pytest.fixture(scope="module")
def link():
    try:
        with slow_link(mbps=MBPS, delay_ms=DELAY_MS) as link:
            yield link
    except NoNamespaces as e:
        pytest.skip(str(e))


@contextlib.contextmanager
def connected(link):
    """A connection from the near side to the far one."""
    with link.far.inside():
        server = socket.create_server((link.far.address, 0))
    with link.near.inside():
        near = socket.create_connection(server.getsockname(), 20)
    with server, near, server.accept()[0] as far:
        far.settimeout(20)
        yield near, far


def test_there_and_back(link):
    with connected(link) as (near, far):
        took = []
        for _ in range(5):
            begun = time.monotonic()
            near.sendall(b"?")
            far.recv(1)
            far.sendall(b"!")
            near.recv(1)
            took.append(time.monotonic() - begun)
    assert DELAY_MS / 1000 <= min(took) < 5 * DELAY_MS / 1000


def test_the_rate(link):
    size, read = 6_000_000, 0
    with connected(link) as (near, far):
        begun = time.monotonic()
        sender = threading.Thread(target=near.sendall, args=(bytes(size),))
        sender.start()
        while read < size:
            read += len(far.recv(1 << 16))
        sender.join()
        mbps = 8e-6 * size / (time.monotonic() - begun)
    assert MBPS / 10 < mbps < 1.1 * MBPS, "slower on a busy machine, but never faster"


def test_nothing_arrives_while_it_is_cut_off(link):
    with connected(link) as (near, far):
        with link.near.cut_off():
            near.sendall(b"?")
            far.settimeout(0.5)
            with pytest.raises(TimeoutError):
                far.recv(1)
        far.settimeout(20)
        assert far.recv(1) == b"?", "it is sent again"


def test_nothing_but_the_link_leads_out(link):
    with link.near.inside(), pytest.raises(OSError):
        socket.create_connection(("192.0.2.1", 9), 1)
