import socket

import psutil
import pytest

from areal_megatron import network
from areal_megatron.config import ConfigError


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
