"""What the ranks of a link tell each other, under keys with a prefix of the link's own.

| key | set by | value |
|---|---|---|
| library | the first rank of either side that joined | Library |
| member/M | member M | it is about to connect to all the others at once (NCCL only) |
| listens/M | member M, an engine rank | Listens (TCP only) |
| ready/N/R | engine rank R | EngineReady: it waits for update N |
| sending/N/S | trainer rank S | Announced: its first message of update N is on its way |
| sent/N/S | trainer rank S | it read every parameter before any could change |
| received/N/R | engine rank R | Staged: staging holds update N |
| failed/N | the first rank of either side that failed | why, as text |

N counts the updates of a generation from 1. Trainer rank 0 removes the keys of an update that has arrived.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Publication(msgspec.Struct, frozen=True):
    """A version of the weights, of trainer ranks that call themselves `run`: after a restart they have another name,
    and their versions may have other weights."""

    run: str
    version: int


class Library(msgspec.Struct, frozen=True):
    """What carries the messages of a rank."""

    name: str
    rank: str


class Listens(msgspec.Struct, frozen=True):
    """Where trainer ranks connect to an engine rank."""

    host: str
    port: int
    secret: str
    """What they show it, in hexadecimal."""


class EngineReady(msgspec.Struct, frozen=True):
    """What an engine rank expects, and what it has."""

    plan: str
    """`Plan.order` of the plan that it follows."""
    to_check: str
    """`Bucket.name` of the message of which it checks all elements, if it comes as changes."""
    has: Publication | None
    """What all its live parameters are; None: unknown, or a mixture."""


class Announced(msgspec.Struct, frozen=True):
    """What a trainer rank sends."""

    how: Literal["whole", "changes", "few-changes"]
    """Whole messages without heads; groups with heads (publish.py); or groups that wait whole in the engine's room for
    the commit."""
    publication: Publication


class Staged(msgspec.Struct, frozen=True):
    """What one engine rank received of an update."""

    bytes: int
    changed: int
    """Elements that were sent, alone or in a whole message."""
    elements: int
    """Elements of all its messages."""
