"""The parts that make up the memory of a rank, and the constants that all estimates share. Sizes are in bytes."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
CONTEXT = GIB
"""CUDA context, cuBLAS workspaces and the allocator's rounding. An allowance: it has not been measured."""
COMMUNICATOR = 128 * 2**20
"""An NCCL communicator: 16 channels that send from and receive into NCCL_BUFFSIZE = 4 MiB each. Also an allowance."""
LINK = 32 * 2**20
"""A communicator that only sends to a few peers: four channels each way."""


@dataclass(frozen=True)
class MemoryPart:
    name: str
    bytes: int
    note: str = ""
    """How the size comes about, for the table."""


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
