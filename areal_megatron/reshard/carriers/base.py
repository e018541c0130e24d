"""What carries the messages of a link: the interface that each file of this folder implements once.

A carrier belongs to one rank, and to one generation of its link. The link (transport.py) asks it for the keys at once,
on trainer rank 0 to serve them, and on the ranks that exchange messages to join, to meet before each update, and to
carry messages, on the link's stream. A further carrier is a subclass in a file of its own, a line of `CARRIERS`
(__init__.py), and a name that `reshard.link` may have.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal_megatron.process.errors import first_line
from areal_megatron.reshard.carriers.streams import Dialer, Listener
from areal_megatron.reshard.plan import Plan


class LinkError(RuntimeError):
    """A link cannot deliver an update; names engine, generation, rank and what it waited for."""


class Deadline:
    """A point in time that several waits share."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    @property
    def left(self) -> timedelta:
        """The time left; never zero, which gloo would take for no timeout."""
        return timedelta(seconds=max(self._end - time.monotonic(), 0.001))

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end

    def later(self, seconds: float) -> Deadline:
        """Returns a deadline of the same limit that passes this much after this one, as it is now."""
        deadline = Deadline(self.timeout_s)
        deadline._end = self._end + seconds
        return deadline

    def expire(self) -> None:
        """Makes the deadline pass now."""
        self._end = 0.0


@functools.cache
def connect(store: str, timeout_s: float) -> dist.TCPStore:
    """Returns this process's one connection to the store at host:port. Raises LinkError.

    All links share it: their calls are short, because a link reads only keys that are set. A connection per link and
    generation would be expensive: torch looks up the peer's name each time, and one lost DNS packet costs 5 s.
    """
    host, _, port = store.rpartition(":")
    try:
        return dist.TCPStore(host, int(port), None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
    except (RuntimeError, ValueError) as e:
        raise LinkError(f"cannot reach the trainers' store at {store}: {first_line(e)}") from None


@dataclass(frozen=True)
class LinkEnd:
    """One rank's end of a link, for one generation."""

    engine: int
    generation: int
    store: str
    """The trainers' TCPStore, host:port."""
    device: torch.device
    """Where messages are sent from and received into."""
    timeout_s: float
    """How long an update may take."""
    link: str = "device"
    """The setting of that name, with `auto` decided."""
    site: Dialer | Listener | None = None
    """How the ends of a link between two sites connect; only the trainers' end then needs the store."""

    @property
    def name(self) -> str:
        return f"link to engine {self.engine}, generation {self.generation}"


@dataclass(frozen=True)
class Members:
    """The ranks of a link, as the plan has them: first the trainer ranks that send to the engine, then the engine's."""

    senders: Sequence[int]
    """The trainer ranks, in ascending order."""
    engine_ranks: int

    @classmethod
    def of(cls, plan: Plan) -> Members:
        return cls(sorted({transfer.source for transfer in plan.transfers}), plan.destinations)

    def __len__(self) -> int:
        return len(self.senders) + self.engine_ranks

    def trainer(self, rank: int) -> int:
        """Returns the number of a trainer rank that sends among the members."""
        return self.senders.index(rank)

    def engine(self, rank: int) -> int:
        """Returns the number of an engine rank among the members."""
        return len(self.senders) + rank

    def name(self, member: int) -> str:
        """Returns what a member is called in messages."""
        sends = member < len(self.senders)
        return f"trainer rank {self.senders[member]}" if sends else f"engine rank {member - len(self.senders)}"


class Carrier(ABC):
    """Carries the messages of one rank. `send`, `receive` and `wait` raise RuntimeError, after which it is unusable.

    `group` is a process group, or sends and receives like one; `join` or `meet` sets it.
    """

    most_under_way: float = inf
    """How many messages of one queue may be on their way."""
    group: Any = None

    def __init__(self, end: LinkEnd):
        self.end = end

    @property
    @abstractmethod
    def library(self) -> str:
        """What all ranks of a link must have, with its version if two versions do not connect."""

    def keys(self) -> dist.Store:
        """Returns what holds the keys of the link. Raises LinkError."""
        end = self.end
        return dist.PrefixStore(f"link/{end.engine}/{end.generation}", connect(end.store, end.timeout_s))

    def serve(self, engine_ranks: int, keys: dist.Store, on_lost: Callable[[int, str], None]) -> None:
        """Lets engine ranks that cannot reach the store use the keys; calls `on_lost` (rank, reason) when one is lost.
        Raises OSError."""
        return

    @abstractmethod
    def join(self, keys: dist.Store, members: Members, member: int) -> None:
        """Makes this rank member number `member`. Waits for no other."""

    def meet(self, wait: Callable[[Mapping[str, str]], object]) -> None:
        """Connects the members, where messages cannot do that by themselves. `wait` returns when keys of the link are
        set (key → who has to do what). Raises LinkError."""
        return

    def queue(self, peer: int) -> int:
        """Returns which messages are in one queue with those to or from `peer`."""
        return peer

    def send(self, flat: Tensor, peer: int, tag: int, deadline: Deadline) -> Any:
        """Sends a flat tensor, which must not change before the end of `wait`. Returns what `wait` takes; some carriers
        do so once the peer receives, by the deadline."""
        return self.group.send([flat], peer, tag)

    def receive(self, flat: Tensor, peer: int, tag: int, deadline: Deadline) -> Any:
        """Receives into a flat tensor, by the end of `wait`; on a device, once its stream is done. Some carriers return
        once the peer sends, by the deadline."""
        return self.group.recv([flat], peer, tag)

    def wait(self, work: Any, deadline: Deadline) -> None:
        """Returns when the tensor of `send` or `receive` may be used again."""
        work.wait(deadline.left)

    def abort(self) -> None:
        """Ends messages that no peer will send or take, if they do not end by themselves at their timeout. Any thread
        may call it, also twice; it does not wait."""
        self.close()

    def close(self) -> None:
        """Ends connections that would outlive the carrier. Any thread may call it."""
        return
