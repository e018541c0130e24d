"""The end of a link on a trainer rank, and what all ends of the rank share; publish.py sends by it."""

from __future__ import annotations

import itertools
import secrets
import ssl
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from areal_megatron.config import ReshardConfig
from areal_megatron.observe.timeline import Timeline
from areal_megatron.reshard.carriers.base import LinkEnd, LinkError, Members, connect
from areal_megatron.reshard.carriers.streams import Dialer
from areal_megatron.reshard.changes import zstd
from areal_megatron.reshard.copies import Copies, bind
from areal_megatron.reshard.plan import Bucket, Plan, Planner
from areal_megatron.reshard.published import Choice, Publications
from areal_megatron.reshard.session import LinkRef
from areal_megatron.reshard.transport import Link


class Received(NamedTuple):
    """What all ranks of an engine received of an update."""

    bytes: int = 0
    changed: float = 1.0
    """The share of elements that were sent, alone or in a whole message."""


OnDelivered = Callable[[int, int, int, float, Received, str], None]
"""(engine, generation, version, seconds since publish, what was received, error or ""); called on the link's thread."""


@dataclass(frozen=True)
class TrainerRank:
    """What all links of one trainer rank share."""

    parameters: Callable[[], Mapping[str, Tensor]]
    """Returns the rank's parameters by Megatron's names, with every gather into them finished; they are read in
    place."""
    planner: Planner
    """Knows the layouts of both sides."""
    rank: int
    dtype: torch.dtype
    """What the engines hold; parameters of another dtype are cast."""
    store: str
    """The trainers' TCPStore, host:port."""
    reshard: ReshardConfig
    timeline: Timeline
    on_delivered: OnDelivered | None = None
    """Called on rank 0 alone, once for each version and link."""
    link: str = "device"
    """reshard.link, with `auto` decided."""
    choices: dict[tuple[int, str], Choice] = field(default_factory=dict)
    """Number of an engine, and reshard.update on a link like its own → whether it gets changes."""
    tls: ssl.SSLContext | None = None
    """By which this rank and engines at other sites know each other."""
    plans: dict[int, Plan] = field(default_factory=dict)

    def plan(self, engine: int) -> Plan:
        """Returns what is sent to an engine; for one that is new to the run, it is called on its link's thread."""
        if engine not in self.plans:
            self.plans[engine] = self.planner.plan(engine)
        return self.plans[engine]

    @cached_property
    def device(self) -> torch.device:
        return next(iter(self.parameters().values())).device

    @cached_property
    def published(self) -> Publications:
        return Publications(zstd if self.reshard.compression == "zstd" else None)

    @cached_property
    def run(self) -> str:
        """What all these trainer ranks call themselves: versions of earlier ones of the run may have other weights.

        Raises LinkError without their store.
        """
        return connect(self.store, self.reshard.timeout_s).compare_set("incarnation", "", secrets.token_hex(8)).decode()

    def choice(self, engine: int, update: str) -> Choice:
        """Returns what is known of an engine that gets weights by `update` (reshard.update)."""
        return self.choices.setdefault((engine, update), Choice(update))


class Outlet:
    """This rank's end of the link to one engine in one generation, kept from update to update."""

    def __init__(self, trainer: TrainerRank, link: LinkRef):
        self.trainer, self.engine, self.generation, self._site = trainer, link.engine, link.generation, link.site
        self.update = trainer.reshard.update if link.may_send_changes else "full"
        self.may_send_changes = self.update != "full"
        self.key = link.engine, link.generation
        self.updates = 0
        self.given_up = ""
        """Why an update of this generation was given up, perhaps while its thread was inside a message: no later one
        can be sent, and none may wait for that thread."""
        self.busy = threading.Lock()
        self._link: Link | None = None
        self._broken = ""
        self._buffers: list[Tensor] = []
        self._parcels: list[Parcel] = []
        self._bound_to: list[int] = []

    @cached_property
    def plan(self) -> Plan:
        return self.trainer.plan(self.engine)

    @cached_property
    def buckets(self) -> list[Bucket]:
        return self.plan.sent_by(self.trainer.rank)

    @cached_property
    def groups(self) -> list[list[int]]:
        """The numbers of `buckets` in the order of an update."""
        return self.plan.groups(self.buckets, self.may_send_changes)

    @cached_property
    def members(self) -> Members:
        return Members.of(self.plan)

    def link(self) -> Link:
        """Opens the link at the first call, and joins it if this rank sends. Raises LinkError if an earlier update of
        this generation failed."""
        if self._broken:
            raise LinkError(
                f"engine {self.engine} needs a new generation after {self.generation}, which failed: {self._broken}"
            )
        if self._link is None:
            site, tls = self._site, self.trainer.tls
            assert not site or tls is not None  # engines at other sites are reached with the run's credentials
            self._link = Link(
                LinkEnd(
                    engine=self.engine,
                    generation=self.generation,
                    store=self.trainer.store,
                    device=self.trainer.device,
                    timeout_s=self.trainer.reshard.timeout_s,
                    link=self.trainer.link,
                    site=Dialer(site, tls) if site and tls else None,
                )
            )
            if self.trainer.rank == 0:
                self._link.serve(self.plan.destinations)
            if self.trainer.rank in self.members.senders:
                self._link.join(self.members, self.members.trainer(self.trainer.rank))
        return self._link

    def break_link(self, update: int, reason: str) -> str:
        """Tells the other ranks and closes this one's connections; this generation cannot be used again.

        Returns the first reason that any rank of the link gave.
        """
        if not self._broken:
            link, self._link = self._link, None
            self._broken = link.say_failed(update, reason) if link else reason
            if link:
                link.abort()
            return self._broken
        return reason

    def abort(self) -> None:
        """Ends what is under way: nobody has a use for this generation any more. Does not wait."""
        if link := self._link:
            link.abort()

    def close(self) -> None:
        """Ends the streams to an engine at another site; nothing is sent any more."""
        if link := self._link:
            link.close()

    def failure(self, update: int) -> str:
        """Returns why a rank of the link has given up `update`, or "". May be called from any thread."""
        link = self._link
        return link.failure(update) if link else ""

    def say_failed(self, update: int, reason: str) -> None:
        """Tells the other ranks. May be called from any thread."""
        if link := self._link:
            link.say_failed(update, reason)

    def parcels(self, parameters: Mapping[str, Tensor]) -> list[Parcel]:
        """Returns the messages of an update, one a bucket. They are made once, and again only if the parameters have
        moved to other storage."""
        storage = [parameter.data_ptr() for parameter in parameters.values()]
        if storage != self._bound_to:
            self._parcels, self._bound_to = self._bind(parameters), storage
        return self._parcels

    def dtype(self, bucket: Bucket) -> torch.dtype:
        return getattr(torch, bucket.dtype) if bucket.dtype else self.trainer.dtype

    def size(self, bucket: Bucket) -> int:
        """Returns the bytes of a message."""
        return bucket.elements * self.dtype(bucket).itemsize

    def _bind(self, parameters: Mapping[str, Tensor]) -> list[Parcel]:
        views = [list(self._views(bucket, parameters)) for bucket in self.buckets]
        direct = [_is_message(held, self.dtype(bucket)) for bucket, held in zip(self.buckets, views, strict=True)]
        largest = max((self.size(b) for b, as_is in zip(self.buckets, direct, strict=True) if not as_is), default=0)
        self._buffers = [torch.empty(largest, dtype=torch.uint8, device=self.trainer.device) for _ in range(2)]
        turns = itertools.cycle(self._buffers)
        parcels = []
        for bucket, held, as_is in zip(self.buckets, views, direct, strict=True):
            if as_is:
                parcels.append(Parcel(bucket, held[0].view(-1), None, _elements(bucket)))
            else:
                flat = next(turns)[: self.size(bucket)].view(self.dtype(bucket))
                copies = bind((transfer.send for transfer in bucket.transfers), parameters, flat)
                parcels.append(Parcel(bucket, flat, copies, _elements(bucket)))
        return parcels

    @staticmethod
    def _views(bucket: Bucket, parameters: Mapping[str, Tensor]) -> Iterator[Tensor]:
        for transfer in bucket.transfers:
            yield from transfer.send.views(parameters)


def _is_message(views: list[Tensor], dtype: torch.dtype) -> bool:
    """Returns whether the parameter itself can be sent."""
    return len(views) == 1 and views[0].is_contiguous() and views[0].dtype == dtype


class Parcel(NamedTuple):
    """One message of every update of an outlet."""

    bucket: Bucket
    flat: Tensor
    """What is sent: one of the outlet's two buffers, or the part of a parameter that is the message as it is."""
    copies: Copies | None
    """What packs the buffer; None where the parameter itself is sent."""
    elements: Hashable
    """Which elements of the rank's parameters the message has; engines may have such a message in common."""


def _elements(bucket: Bucket) -> Hashable:
    return tuple(transfer.send for transfer in bucket.transfers)
