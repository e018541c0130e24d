"""The parts that make up the memory of a rank, and the constants that all estimates share. Sizes are in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GIB = 2**30
CONTEXT = GIB
"""CUDA context, cuBLAS workspaces and the allocator's rounding. An allowance: it has not been measured."""
COMMUNICATOR = 128 * 2**20
"""An NCCL communicator: 16 channels that send from and receive into NCCL_BUFFSIZE = 4 MiB each. Also an allowance."""
LINK = 64 * 2**20
"""NCCL's communicator of a link, without its connections. It runs on four channels (_BLOCKS in carriers/nccl.py), and
NCCL keeps 16 steps of up to 512 KiB for each in a buffer shared by all peers on other nodes: 32 MiB; as much again for
its queues and for rounding. An allowance: it has not been measured."""
PEER = 16 * 2**20
"""A connection of such a communicator to another rank: NCCL_BUFFSIZE = 4 MiB for each channel. Peers on other nodes
need less, since they share. Also an allowance."""
USABLE = 0.92
"""The share of a GPU's memory that a trainer rank may need: micro-batches of every length leave gaps between what is
allocated."""

FILLED = 0.9
"""The share of a GPU's memory up to which trainer.recompute=auto keeps activations instead of recomputing them."""


def communicator_bytes(links: Sequence[int]) -> int:
    """Returns the bytes of the communicators of a rank's links, given the number of peers in each."""
    return LINK * len(links) + PEER * sum(links)


@dataclass(frozen=True)
class MemoryPart:
    name: str
    bytes: int
    note: str = ""
    """How the size comes about, for the table."""


@dataclass(frozen=True)
class GpuShares:
    """How a trainer rank and an engine rank divide the memory of a GPU."""

    trainer: float
    """The most that torch's allocator may take, as a part of the whole."""
    engine: float
    """What an engine rank takes, likewise."""
    kv_cache: int
    """Bytes of the engine rank's KV cache."""


@dataclass(frozen=True)
class RankMemory:
    """The memory of the fullest rank of a pool."""

    holder: str
    """The rank, for messages and the table."""
    parts: tuple[MemoryPart, ...]

    @property
    def total(self) -> int:
        return sum(part.bytes for part in self.parts)

    def of(self, name: str) -> int:
        return sum(part.bytes for part in self.parts if part.name == name)
