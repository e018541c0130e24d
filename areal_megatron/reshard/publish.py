"""The trainers' side of weight updates: sends this rank's boxes to every engine while training goes on."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from areal_megatron.observe.timeline import Timeline
from areal_megatron.reshard import trainer_layout
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.plan import BUCKET_ELEMENTS, Bucket, Plan, Planner
from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.reshard.transport import Copies, Deadline, Link, LinkError, Message, bind, pack
from areal_megatron.run import RunError

_LOOK_S = 0.5
"""Between two looks at whether others have given up what the trainer waits for."""
OnDelivered = Callable[[int, int, int, float, int, str], None]
"""(engine, generation, version, seconds since publish, bytes received, error or ""); called on the link's thread."""


class Publisher:
    """Sends the live parameters of one trainer rank; every trainer rank has one and calls it alike.

    `parameters` returns this rank's settled parameters by Megatron's names; their storage is read in place, so no step
    may change them between `publish` and the return of `wait_until_read`. Each engine has the sizes `engine` and holds
    `dtype`; `engines` of them are there from the start. `on_delivered` is called on global rank 0 alone, once for each
    version and link. Raises ConfigError or LayoutError at once where model, sizes and parameters disagree.
    """

    def __init__(
        self,
        *,
        parameters: Callable[[], Mapping[str, Tensor]],
        hf_config: Mapping[str, Any],
        sizes: MegatronSizes,
        rank: int,
        engine: EngineSizes,
        engines: int,
        dtype: str,
        store_host: str,
        store_port: int,
        timeout_s: float,
        on_delivered: OnDelivered | None,
        timeline: Timeline,
        bucket_elements: int = BUCKET_ELEMENTS,
        check_finite: bool = False,
    ):
        held = parameters()
        trainer_layout.layout(hf_config, sizes, rank).check(
            {n: p.shape for n, p in held.items()}, f"trainer rank {rank}"
        )
        self.parameters, self.rank, self.trainers, self.engine_ranks = parameters, rank, sizes.ranks, engine.ranks
        self.dtype, self.device = getattr(torch, dtype), next(iter(held.values())).device
        self.store, self.timeout_s, self.timeline = f"{store_host}:{store_port}", timeout_s, timeline
        self.on_delivered = on_delivered if rank == 0 else None
        self._check_finite = check_finite
        self._planner = Planner(hf_config, sizes, engine, bucket_elements)
        self._plans = {number: self._planner.plan(number) for number in range(engines)}
        self._planning = threading.Lock()
        self._outlets: dict[int, Outlet] = {}
        self._updates: list[Transmission] = []

    def publish(self, version: int, links: Sequence[tuple[int, int]]) -> None:
        """Starts sending `version` to each (engine, generation) in the background; returns at once.

        Raises RunError, before anything is sent, for a weight that is NaN or Inf if check_finite is set.
        """
        self._updates = [update for update in self._updates if update.thread.is_alive()]
        parameters = self.parameters()
        if self._check_finite:
            _refuse_not_finite(parameters, f"trainer-{self.rank}, version {version}")
        for engine, generation in links:
            outlet = self._outlets.get(engine)
            if outlet is None or outlet.generation != generation:
                self._cut_off(outlet)
                outlet = self._outlets[engine] = Outlet(self, engine, generation)
            self._updates.append(Transmission(outlet, version, parameters))

    def plan(self, engine: int) -> Plan:
        """What is sent to it. One that was added to the run is planned here, on its link's thread."""
        with self._planning:
            if engine not in self._plans:
                self._plans[engine] = self._planner.plan(engine)
            return self._plans[engine]

    def wait_until_read(self) -> None:
        """Returns when the live parameters are no longer being read: from here on a step may change them.

        A link that has failed for another rank, or is not done by its timeout, is cut off; it never holds the trainer
        longer.
        """
        for update in self._updates:
            update.wait_until_read()

    def sending(self) -> set[tuple[int, int]]:
        """(engine, generation) of the links with an update under way; from any thread."""
        return {update.outlet.key for update in list(self._updates) if update.thread.is_alive()}

    def give_up(self, engine: int, generation: int) -> None:
        """The engine will never have what is under way in this generation: no rank waits for it any longer; from any
        thread."""
        for update in list(self._updates):
            if update.outlet.key == (engine, generation) and update.thread.is_alive():
                update.give_up(f"engine {engine} has left generation {generation}")

    def _cut_off(self, outlet: Outlet | None) -> None:
        for update in self._updates:
            if update.outlet is outlet:
                update.cut_off("a new generation has begun")

    def close(self) -> None:
        """Waits for the updates in flight, at most their timeout."""
        for update in self._updates:
            update.join()
        self._outlets.clear()


def _refuse_not_finite(parameters: Mapping[str, Tensor], holder: str) -> None:
    largest = torch.stack(torch._foreach_norm(list(parameters.values()), torch.inf))  # one look at the device
    for name, finite in zip(parameters, largest.isfinite().tolist(), strict=True):
        if not finite:
            raise RunError(f"{holder}: {name} holds NaN or Inf and is not published (reshard.check_finite)")


class Outlet:
    """This rank's end of the link to one engine in one generation, kept from update to update."""

    def __init__(self, publisher: Publisher, engine: int, generation: int):
        self.publisher, self.engine, self.generation = publisher, engine, generation
        self.key = engine, generation
        self.updates = 0
        self.busy = threading.Lock()
        self._link: Link | None = None
        self._broken = ""
        self._buffers: list[Tensor] = []
        self._messages: list[Parcel] = []
        self._bound_to: list[int] = []

    @cached_property
    def plan(self) -> Plan:
        return self.publisher.plan(self.engine)

    @cached_property
    def buckets(self) -> list[Bucket]:
        return self.plan.sent_by(self.publisher.rank)

    @cached_property
    def senders(self) -> list[int]:
        return sorted({transfer.source for transfer in self.plan.transfers})

    def link(self) -> Link:
        """Raises LinkError if an earlier update of this generation failed."""
        p = self.publisher
        if self._broken:
            raise LinkError(
                f"engine {self.engine} needs a new generation after {self.generation}, which failed: {self._broken}"
            )
        if self._link is None:
            self._link = Link(
                engine=self.engine,
                generation=self.generation,
                rank=p.rank,
                trainers=p.trainers,
                engine_ranks=p.engine_ranks,
                store=p.store,
                device=p.device,
                timeout_s=p.timeout_s,
            )
        return self._link

    def break_link(self, update: int, reason: str) -> str:
        """Tells the others and closes this rank's connections; this generation cannot be used again.

        Returns the reason that the link's ranks heard first.
        """
        if not self._broken:
            link, self._link = self._link, None
            self._broken = link.say_failed(update, reason) if link else reason
            if link:
                link.abort()
            return self._broken
        return reason

    def failure(self, update: int) -> str:
        """Why a rank of the link has given it up, or ""; from any thread."""
        link = self._link
        return link.failure(update) if link else ""

    def say_failed(self, update: int, reason: str) -> None:
        """Tells the others; from any thread."""
        if link := self._link:
            link.say_failed(update, reason)

    def messages(self, parameters: Mapping[str, Tensor]) -> list[Parcel]:
        """One for each bucket, indexed once; again only where the parameters moved to other storage."""
        p = self.publisher
        storage = [parameter.data_ptr() for parameter in parameters.values()]
        if storage != self._bound_to:
            views = [list(self._views(bucket, parameters)) for bucket in self.buckets]
            direct = [_is_message(held, p.dtype) for held in views]
            largest = max((b.elements for b, as_is in zip(self.buckets, direct, strict=True) if not as_is), default=0)
            self._buffers = [torch.empty(largest, dtype=p.dtype, device=p.device) for _ in range(2)]
            turns = itertools.cycle(self._buffers)
            self._messages = [
                Parcel(bucket, held[0].view(-1), None)
                if as_is
                else Parcel(
                    bucket,
                    buffer := next(turns)[: bucket.elements],
                    bind((transfer.send for transfer in bucket.transfers), parameters, buffer),
                )
                for bucket, held, as_is in zip(self.buckets, views, direct, strict=True)
            ]
            self._bound_to = storage
        return self._messages

    @staticmethod
    def _views(bucket: Bucket, parameters: Mapping[str, Tensor]) -> Iterator[Tensor]:
        for transfer in bucket.transfers:
            yield from transfer.send.views(parameters)


def _is_message(views: list[Tensor], dtype: torch.dtype) -> bool:
    """Whether the parameter itself can be sent."""
    return len(views) == 1 and views[0].is_contiguous() and views[0].dtype == dtype


class Parcel(NamedTuple):
    """One message."""

    bucket: Bucket
    flat: Tensor
    """A buffer, or the part of a parameter that is the message as it stands."""
    copies: Copies | None
    """What packs the buffer; two buffers take turns."""


class Transmission:
    """One version on its way to one engine."""

    def __init__(self, outlet: Outlet, version: int, parameters: Mapping[str, Tensor]):
        self.outlet, self.version, self.parameters = outlet, version, parameters
        self.deadline = Deadline(outlet.publisher.timeout_s)
        self.read = threading.Event()
        """Set when no live parameter is read any more."""
        outlet.updates += 1
        self._number = outlet.updates
        self._reading = threading.Lock()
        self._cut_off = ""
        device = outlet.publisher.device
        self._settled = torch.get_device_module(device).Event() if device.type != "cpu" else None
        if self._settled:
            self._settled.record()
        self.thread = threading.Thread(target=self._run, name=f"publish-{outlet.engine}", daemon=True)
        self.thread.start()

    def wait_until_read(self) -> None:
        """Returns when no live parameter is read any more, or will be."""
        # One second more, in which the link's own thread says whom it waited for.
        overdue = time.monotonic() + self.deadline.left.total_seconds() + 1
        while not self.read.wait(_LOOK_S):
            if failure := self.outlet.failure(self._number):  # which that thread does not hear of inside a message
                self.give_up(failure)
            elif time.monotonic() > overdue:
                self.cut_off(f"not read within {self.deadline.timeout_s:.0f} s and given up for the next step")

    def cut_off(self, reason: str) -> None:
        """The update fails unless all of it has been read by now; nothing read from here on reaches an engine's
        commit."""
        with self._reading:
            self._cut_off = reason
            self.read.set()

    def give_up(self, reason: str) -> None:
        """The same on every rank, and nobody waits for the engine any longer."""
        self.outlet.say_failed(self._number, reason)
        self.deadline.expire()
        self.cut_off(reason)

    def join(self) -> None:
        """Waits until it has arrived or failed, at most its timeout."""
        self.thread.join(self.deadline.left.total_seconds() + 1)

    def _run(self) -> None:
        outlet, publisher, start = self.outlet, self.outlet.publisher, time.monotonic()
        received, error = 0, ""
        with outlet.busy:  # the last instructions of the update before may still run
            try:
                self._send()
                if publisher.on_delivered:
                    received = self._wait_received()
            except Exception as e:  # a thread's traceback would be lost
                error = str(e) if isinstance(e, LinkError) else f"trainer rank {publisher.rank}: {e!r}"
                error = outlet.break_link(self._number, error)
            finally:
                self.read.set()
        if publisher.on_delivered:
            seconds = time.monotonic() - start
            publisher.on_delivered(outlet.engine, outlet.generation, self.version, seconds, received, error)

    def _send(self) -> None:
        outlet, publisher, n, link = self.outlet, self.outlet.publisher, self._number, self.outlet.link()
        if not outlet.buckets:
            return
        ready = {f"ready/{n}/{r}": f"engine rank {r} to start update {n}" for r in range(publisher.engine_ranks)}
        for rank, digest in enumerate(link.wait(ready, self.deadline, update=n, stop=self._stop)):
            if digest != outlet.plan.digest:
                raise LinkError(
                    f"{link.name}: engine rank {rank} follows another plan; do trainers and engines run "
                    "the same release, with the same model and sizes?"
                )
        link.say(f"sending/{n}/{publisher.rank}", "")
        size = sum(bucket.elements for bucket in outlet.buckets) * publisher.dtype.itemsize
        span = publisher.timeline.span("publish", engine=outlet.engine, version=self.version, bytes=size)
        with span, link.stream():
            if self._settled:
                self._settled.wait()
            self._send_buckets(link)

    def _send_buckets(self, link: Link) -> None:
        first = self.outlet.publisher.trainers
        packed: deque[Message] = deque()
        direct: list[Message] = []
        for bucket, flat, copies in self.outlet.messages(self.parameters):
            if copies is not None and len(packed) == 2:
                packed.popleft().wait(self.deadline)
            with self._reading:
                self._stop()
                if copies is not None:
                    pack(copies)
                    link.settle()
            (direct if copies is None else packed).append(link.send(flat, first + bucket.destination, bucket))
        for message in direct:
            message.wait(self.deadline)
        link.settle()
        with self._reading:
            self._stop()  # else what was read since may be of the next version
            self.read.set()
        for message in packed:
            message.wait(self.deadline)
        link.settle()
        link.say(f"sent/{self._number}/{self.outlet.publisher.rank}", "")

    def _stop(self) -> None:
        if self._cut_off:
            outlet = self.outlet
            raise LinkError(
                f"engine {outlet.engine}, generation {outlet.generation}, version {self.version}: {self._cut_off}"
            )

    def _wait_received(self) -> int:
        """Bytes that the engine received, once all its ranks have them and no sender was cut off."""
        n, link = self._number, self.outlet.link()
        ranks = range(self.outlet.publisher.engine_ranks)
        received = {f"received/{n}/{rank}": f"engine rank {rank} to have received update {n}" for rank in ranks}
        sent = {f"sent/{n}/{rank}": f"trainer rank {rank} to have sent update {n}" for rank in self.outlet.senders}
        values = link.wait(received | sent, self.deadline, update=n, stop=lambda: None)
        return sum(map(int, values[: len(received)]))
