"""Messages of any device through buffers in the memory of the host, by a carrier between CPUs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from areal_megatron.reshard.carriers.base import Carrier, Deadline, LinkEnd
from areal_megatron.reshard.carriers.tcp import Tcp
from areal_megatron.reshard.carriers.tls import Tls
from areal_megatron.reshard.copies import settle

WIRES = 2
"""Buffers of the host for each peer: one is copied to or from while the other is on its way."""


class _Copied(NamedTuple):
    work: Any
    deliver: Callable[[], object] = lambda: None
    """Copies what was received to its place, on the current stream."""


class ThroughHost(Carrier):
    """What a carrier between CPUs lacks for other devices; it comes before that carrier among a class's bases."""

    most_under_way = WIRES

    def __init__(self, end: LinkEnd):
        super().__init__(end)
        self.wires: dict[int, deque[Tensor]] = defaultdict(deque)
        """Buffers of the host for each peer, used in turns."""

    def send(self, flat: Tensor, peer: int, tag: int, deadline: Deadline) -> _Copied:
        wire = self._wire(peer, flat)  # filled while the message before is still on its way
        wire.copy_(flat, non_blocking=True)
        settle(self.end.device)
        return _Copied(super().send(wire, peer, tag, deadline))

    def receive(self, flat: Tensor, peer: int, tag: int, deadline: Deadline) -> _Copied:
        settle(self.end.device)  # what this buffer held may still be on its way to its place
        wire = self._wire(peer, flat)
        return _Copied(super().receive(wire, peer, tag, deadline), lambda: flat.copy_(wire, non_blocking=True))

    def wait(self, work: _Copied, deadline: Deadline) -> None:
        super().wait(work.work, deadline)
        work.deliver()

    def _wire(self, peer: int, flat: Tensor) -> Tensor:
        """Returns the buffer of the host that was not used for longest, as a tensor like `flat`."""
        turns = self.wires[peer]
        wire = turns.popleft() if len(turns) == WIRES else torch.empty(0, dtype=torch.uint8)
        if wire.nbytes < flat.nbytes:
            wire = torch.empty(flat.nbytes, dtype=torch.uint8, pin_memory=self.end.device.type != "cpu")
        turns.append(wire)
        return wire[: flat.nbytes].view(flat.dtype)


class Host(ThroughHost, Tcp):
    """TCP, through the memory of the host."""


class HostTls(ThroughHost, Tls):
    """TLS, through the memory of the host."""
