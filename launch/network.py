"""Whether the processes of several machines can reach each other at machine.host."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from areal_megatron.config import Config, ConfigError
from areal_megatron.network import address
from launch.orders import NodeHello


def check_network(config: Config, found: Sequence[NodeHello]) -> None:
    """Raises ConfigError where this node has no such address, or processes of several machines would all have it."""
    machines, own = {hello.machine for hello in found}, ipaddress.ip_address(address(config.machine.host))
    if len(machines) > 1 and (own.is_loopback or config.machine.host[:1].isdigit()):
        kind = "a loopback address" if own.is_loopback else "the address of one machine"
        raise ConfigError(
            f"machine.host: {config.machine.host} is {kind} and the job has {len(machines)} nodes: name the "
            "cluster's network interface, e.g. machine.host=ib0"
        )
