"""What the memory of a rank is made of, and how large the pieces are that every plan counts with. Bytes everywhere."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
CONTEXT = GIB
"""CUDA context, cuBLAS workspaces and the allocator's rounding. An allowance: nobody has measured it here."""
COMMUNICATOR = 128 * 2**20
"""Of one NCCL communicator: 16 channels that send from and receive into NCCL_BUFFSIZE = 4 MiB. An allowance too."""
LINK = 32 * 2**20
"""Of a communicator that only sends to a few peers: four channels each way."""


@dataclass(frozen=True)
class MemoryPart:
    name: str
    bytes: int
    note: str = ""
    """How it comes about, for the table."""


@dataclass(frozen=True)
class RankMemory:
    """The fullest rank of a pool."""

    holder: str
    parts: tuple[MemoryPart, ...]

    @property
    def total(self) -> int:
        return sum(part.bytes for part in self.parts)

    def of(self, name: str) -> int:
        return sum(part.bytes for part in self.parts if part.name == name)
