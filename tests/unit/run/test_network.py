import asyncio
import resource
import socket
import time

import psutil
import pytest

from areal_megatron.config import ConfigError
from areal_megatron.run import network
from areal_megatron.run.network import Strangers, join_address, split_address


def test_an_address_a_name_and_an_interface():
    assert network.address("127.0.0.1") == network.address("localhost") == network.address("lo") == "127.0.0.1"
    assert network.address("::1") == "::1"


def test_auto_is_an_address_of_this_machine_or_says_what_there_is():
    own = {a.address for addresses in psutil.net_if_addrs().values() for a in addresses}
    try:
        assert network.address("auto") in own
    except ConfigError as e:
        assert "no default route" in str(e) and "lo" in str(e)


def test_an_interface_without_an_address_and_what_is_neither(monkeypatch):
    with pytest.raises(ConfigError, match=r"machine\.host: 'ib7' is no address and no interface of .*; it has .*lo"):
        network.address("ib7")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"ib0": []})
    with pytest.raises(ConfigError, match=r"interface ib0 of .* has no address"):
        network.address("ib0")


def test_gloo_nccl_and_vllm_use_the_interface_of_the_address(monkeypatch):
    assert network.socket_settings("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
    found = type(psutil.net_if_addrs()["lo"][0])(socket.AF_INET, "10.1.2.3", None, None, None)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"ib0": [found]})
    expected = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0", "VLLM_HOST_IP": "10.1.2.3"}
    assert network.socket_settings("ib0") == network.socket_settings("10.1.2.3") == expected


class Talk(asyncio.Protocol):
    """A server's connection, which the first byte lets in."""

    def __init__(self, strangers):
        self._strangers, self.lost = strangers, asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        self.transport = transport
        self._strangers.add(self, transport)

    def data_received(self, data):
        self._strangers.discard(self)

    def connection_lost(self, exc):
        self._strangers.discard(self)
        self.lost.set_result(None)


async def connections(strangers, count):
    """Returns the servers' ends of that many new connections, and the clients'."""
    accepted = []

    def accept():
        accepted.append(Talk(strangers))
        return accepted[-1]

    server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
    clients = []
    for number in range(count):
        clients.append(socket.create_connection(server.sockets[0].getsockname()))
        while len(accepted) <= number:
            await asyncio.sleep(0.001)
    server.close()
    return accepted, clients


def test_a_server_that_was_held_up_reads_before_it_takes_somebody_for_silent(monkeypatch):
    monkeypatch.setattr(network, "STRANGER_S", 0.2)

    async def held_up():
        strangers = Strangers()
        (spoke, silent), clients = await connections(strangers, 2)
        clients[0].send(b"x")
        time.sleep(0.5)  # the clocks of both have run out when the loop sees that byte
        async with asyncio.timeout(5):
            await silent.lost
        assert not spoke.lost.done() and len(strangers) == 0
        for client in clients:
            client.close()

    asyncio.run(held_up())


def test_of_too_many_strangers_the_oldest_that_has_no_more_to_say_leaves(monkeypatch):
    monkeypatch.setattr(network, "MOST_STRANGERS", 3)

    async def crowd():
        strangers = Strangers()
        (speaking, silent, newest), clients = await connections(strangers, 3)
        clients[0].send(b"x")
        strangers.add("one more", newest.transport)  # in the same turn: the loop has not read that byte
        async with asyncio.timeout(5):
            await silent.lost
        assert not speaking.lost.done() and not newest.lost.done() and len(strangers) == 2
        strangers.discard("one more")
        for client in clients:
            client.close()

    asyncio.run(crowd())


def test_strangers_get_a_share_of_the_descriptors():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    try:
        assert network.backlog() == 50
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("far", ("far", 0)),
        ("far:7000", ("far", 7000)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("fe80::1", ("fe80::1", 0)),
        ("[fe80::1]", ("fe80::1", 0)),
        ("[fe80::1]:7000", ("fe80::1", 7000)),
    ],
)
def test_a_host_and_its_port(text, parts):
    assert split_address(text) == parts
    assert split_address(join_address(*parts)) == parts


@pytest.mark.parametrize("text", ["", ":7000", "[]:7000", "[fe80::1:7000", "far:", "far:65536", "far:x", "far:-1"])
def test_what_is_no_host_with_a_port(text):
    with pytest.raises(ValueError, match=r"is not HOST|is no port"):
        split_address(text)
