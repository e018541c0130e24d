"""The trainers' side of weight updates: sends this rank's boxes to every engine while training continues.

Each class has a partner on the engine's side:

| trainer rank | engine rank | role |
|---|---|---|
| Publisher | Receiver (receive.py) | what the process itself calls, from its start to its end |
| TrainerRank (outlet.py) | Shard (staging.py) | what all links of the rank share |
| Outlet (outlet.py) | Inlet (reception.py) | the rank's end of a link, for one generation; it owns the transport.Link |
| Transmission | Reception (reception.py) | one update, on a thread of its own |
| Parcel (outlet.py) | Arrival (staging.py) | one message: its flat tensor, and what fills it or takes from it |

With `reshard.update` `delta` or `auto`, what has changed since the version of an engine is sent in place of a message
where that is less (published.py). Then a pair's messages go in groups, which come in segments:

| part | elements | content |
|---|---|---|
| head | 4 × int64 | of how many messages the changes follow, their bytes, 1 if a whole message comes then, and the |
| | | CRC-32 of all of the last message that has changes, as it is then, or −1 |
| changes | as many bytes | one message's after the other (changes.py); nothing if there are none |
| message | as the plan has it | if the head says so |
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from areal_megatron.reshard.carriers.base import Deadline, LinkError
from areal_megatron.reshard.copies import pack
from areal_megatron.reshard.messages import Announced, EngineReady, Publication, Staged
from areal_megatron.reshard.outlet import Outlet, Parcel, Received, TrainerRank
from areal_megatron.reshard.published import Cost
from areal_megatron.reshard.session import LinkRef
from areal_megatron.reshard.transport import Link, Message
from areal_megatron.run.folder import RunError

_LOOKING = ThreadPoolExecutor(2, thread_name_prefix="changes")
"""Looks for changes in several messages at a time; on a CPU a core compares 1 to 3 GB/s."""
_LOOK_S = 0.5
"""How often a trainer that waits, and the rank that reports, look whether other ranks have given up the update."""
TO_SAY_WHY_S = 1.0
"""How much longer those wait who only wait for other ranks: one that is itself inside a message knows which."""


class Publisher:
    """Sends the live parameters of one trainer rank to the engines, in the background.

    Every trainer rank has one, and all ranks make the same calls. No step may change the parameters between `publish`
    and the return of `wait_until_read`. Raises LayoutError if they differ from the layout's.

    Example:
        planner = Planner(hf_config, MegatronSizes(tp=2), EngineSizes(tp=1))
        publisher = Publisher(TrainerRank(parameters=trainer.parameters, planner=planner, rank=rank, timeline=timeline,
                                          dtype=torch.bfloat16, store="10.0.0.1:29500", reshard=config.reshard,
                                          on_delivered=report))
        publisher.publish(1, [LinkRef(engine=0, generation=1)])
        ...                                   # forward and backward passes of the next batch
        publisher.wait_until_read()
        optimizer.step()
    """

    def __init__(self, trainer: TrainerRank):
        held = {name: parameter.shape for name, parameter in trainer.parameters().items()}
        trainer.planner.sources[trainer.rank].check(held, f"trainer rank {trainer.rank}")
        self._trainer = trainer if trainer.rank == 0 else replace(trainer, on_delivered=None)
        for engine in range(trainer.planner.engines):
            trainer.plan(engine)
        self._outlets: dict[int, Outlet] = {}
        self._updates: list[Transmission] = []

    def publish(self, version: int, links: Sequence[LinkRef]) -> None:
        """Starts sending `version` over each link in the background; returns at once.

        `wait_until_read` gives up trials instead of waiting for them. Raises RunError, before anything is sent, for a
        weight that is NaN or Inf if check_finite is set.
        """
        self._updates = [update for update in self._updates if update.thread.is_alive()]
        parameters = self._trainer.parameters()
        if self._trainer.reshard.check_finite:
            _refuse_not_finite(parameters, f"trainer-{self._trainer.rank}, version {version}")
        for link in links:
            outlet = self._outlets.get(link.engine)
            if outlet is None or outlet.generation != link.generation:
                self._cut_off(outlet)
                outlet = self._outlets[link.engine] = Outlet(self._trainer, link)
            self._updates.append(Transmission(outlet, version, parameters, link))

    def wait_until_read(self) -> None:
        """Returns when the live parameters are no longer being read: from here on a step may change them.

        An update given up by another rank, or not read by its timeout, is cut off and holds the trainer no longer.
        """
        for update in self._updates:
            update.wait_until_read()

    def sending(self) -> set[tuple[int, int]]:
        """Returns (engine, generation) of each link with an update under way. May be called from any thread."""
        return {update.outlet.key for update in list(self._updates) if update.thread.is_alive()}

    def give_up(self, engine: int, generation: int) -> None:
        """Ends what is under way to an engine that will never have it; no rank waits for it any longer. May be called
        from any thread."""
        for update in list(self._updates):
            if update.outlet.key == (engine, generation) and update.thread.is_alive():
                update.give_up(f"engine {engine} has left generation {generation}")

    def _cut_off(self, outlet: Outlet | None) -> None:
        for update in self._updates:
            if update.outlet is outlet:
                update.cut_off("a new generation has begun")
        if outlet is not None:
            outlet.abort()

    def close(self) -> None:
        """Waits for the updates in flight, at most their timeout; trials are given up."""
        for update in self._updates:
            update.end_trial("training is over")
            update.join()
        for outlet in self._outlets.values():
            outlet.close()
        self._outlets.clear()


def _refuse_not_finite(parameters: Mapping[str, Tensor], holder: str) -> None:
    largest = torch.stack(torch._foreach_norm(list(parameters.values()), torch.inf))  # one transfer from the device
    for name, finite in zip(parameters, largest.isfinite().tolist(), strict=True):
        if not finite:
            raise RunError(f"{holder}: {name} holds NaN or Inf and is not published (reshard.check_finite)")


class Transmission:
    """One version on its way to one engine."""

    def __init__(self, outlet: Outlet, version: int, parameters: Mapping[str, Tensor], link: LinkRef):
        self.outlet, self.version, self.parameters = outlet, version, parameters
        self._trial, self.few_changes = link.trial, link.few_changes
        self.deadline = Deadline(outlet.trainer.reshard.timeout_s)  # from `publish`; transport.py lists all limits
        self._read = threading.Event()
        """Set when no live parameter is read any more."""
        outlet.updates += 1
        self._number = outlet.updates
        self._reading = threading.Lock()
        self._cut_off = ""
        self._begun, self._unreported = time.monotonic(), threading.Lock()
        self._reported = threading.Event()
        device = outlet.trainer.device
        self._settled = torch.get_device_module(device).Event() if device.type != "cpu" else None
        if self._settled:
            self._settled.record()
        self.thread = threading.Thread(target=self._run, name=f"publish-{outlet.engine}", daemon=True)
        self.thread.start()
        if outlet.trainer.on_delivered:
            threading.Thread(target=self._watch, name=f"watch-{outlet.engine}", daemon=True).start()

    def _watch(self) -> None:
        """Gives up what another rank has given up: this rank's own thread may be inside a message until the deadline,
        and no next step may come before the controller knows."""
        while not self._reported.wait(_LOOK_S):
            if failure := self.outlet.failure(self._number):
                self.give_up(failure)

    def wait_until_read(self) -> None:
        """Returns when no live parameter is read any more, or will be; at once if it is a trial."""
        self.end_trial("it was a trial, and the next step does not wait for those")
        # A little more, in which the link's own thread says whom it waited for.
        overdue = time.monotonic() + self.deadline.left.total_seconds() + TO_SAY_WHY_S
        while not self._read.wait(_LOOK_S):
            if failure := self.outlet.failure(self._number):  # which that thread does not hear of inside a message
                self.give_up(failure)
            elif time.monotonic() > overdue:
                self.cut_off(f"not read within {self.deadline.timeout_s:.0f} s and given up for the next step")

    def end_trial(self, reason: str) -> None:
        """Gives a trial up unless everything has been read."""
        if self._trial and not self._read.is_set():
            self.give_up(reason)

    def cut_off(self, reason: str) -> None:
        """Makes the update fail unless all of it has been read: what is read from here on never gets into an engine's
        commit."""
        with self._reading:
            self._cut_off = reason
            self._read.set()

    def give_up(self, reason: str) -> None:
        """Cuts the update off on every rank, none of which waits for the engine any longer."""
        self.outlet.say_failed(self._number, reason)
        self.outlet.given_up = self.outlet.given_up or reason
        self.deadline.expire()
        self.cut_off(reason)
        self.outlet.abort()  # this update's own thread may be inside a message
        # The report has a thread of its own: the controller may take long to answer.
        threading.Thread(target=self._report, args=(Received(), reason), name="report-given-up", daemon=True).start()

    def join(self) -> None:
        """Waits until it has arrived or failed, at most its timeout."""
        self.thread.join(self.deadline.left.total_seconds() + 2 * TO_SAY_WHY_S)

    def _run(self) -> None:
        outlet, trainer = self.outlet, self.outlet.trainer
        received, error = Received(), outlet.given_up
        if not error:
            with outlet.busy:  # the last instructions of the update before may still run
                try:
                    self._send()
                    if trainer.on_delivered:
                        received = self._wait_received()
                except Exception as e:  # a thread's traceback would be lost
                    error = str(e) if isinstance(e, LinkError) else f"trainer rank {trainer.rank}: {e!r}"
                    self._read.set()  # what is not read yet never gets into a commit, and the next step waits for this
                    error = outlet.break_link(self._number, error)
        self._read.set()
        self._report(received, error)

    def _report(self, received: Received, error: str) -> None:
        """Tells the controller how this update ended, once."""
        trainer, outlet = self.outlet.trainer, self.outlet
        if trainer.on_delivered and self._unreported.acquire(blocking=False):
            seconds = time.monotonic() - self._begun
            self._reported.set()
            trainer.on_delivered(outlet.engine, outlet.generation, self.version, seconds, received, error)

    def _send(self) -> None:
        outlet, trainer, n, link = self.outlet, self.outlet.trainer, self._number, self.outlet.link()
        if not outlet.buckets:
            self._read.set()
            return
        ranks = range(outlet.plan.destinations)
        ready = {f"ready/{n}/{rank}": f"engine rank {rank} to start update {n}" for rank in ranks}
        said = [link.decode(s, EngineReady) for s in link.wait(ready, self.deadline, update=n, stop=self._stop)]
        for rank, one in enumerate(said):
            if one.plan != outlet.plan.order(outlet.may_send_changes):
                raise LinkError(
                    f"{link.name}: engine rank {rank} follows another plan; do trainers and engines run "
                    "the same release, with the same model, sizes and settings?"
                )
        with link.stream():
            sending = _Sending(self, link, said)
        link.say(f"sending/{n}/{trainer.rank}", Announced(sending.how, Publication(trainer.run, self.version)))
        link.meet(self.deadline, update=n, stop=self._stop)
        size = sum(map(outlet.size, outlet.buckets))
        span = trainer.timeline.span("publish", engine=outlet.engine, version=self.version, bytes=size)
        if self._settled:
            self._settled.synchronize()
        with span, link.stream():
            sending.send()
        link.say(f"sent/{n}/{trainer.rank}")

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Returns a context in which live parameters may be read; no step changes them before it ends.

        Raises LinkError if the update was cut off.
        """
        with self._reading:
            self._stop()
            yield

    def all_is_read(self) -> None:
        """Lets the next step change the parameters. Raises LinkError if the update was cut off: what was read since may
        belong to the next version."""
        with self.reading():
            self._read.set()

    def _stop(self) -> None:
        if self._cut_off:
            outlet = self.outlet
            raise LinkError(
                f"engine {outlet.engine}, generation {outlet.generation}, version {self.version}: {self._cut_off}"
            )

    def _wait_received(self) -> Received:
        """Returns what the engine received, once all its ranks have it and no sender was cut off."""
        n, link, outlet = self._number, self.outlet.link(), self.outlet
        ranks = range(outlet.plan.destinations)
        received = {f"received/{n}/{rank}": f"engine rank {rank} to have received update {n}" for rank in ranks}
        sent = {f"sent/{n}/{rank}": f"trainer rank {rank} to have sent update {n}" for rank in outlet.members.senders}
        values = link.wait(received | sent, self.deadline.later(TO_SAY_WHY_S), update=n, stop=lambda: None)
        told = [link.decode(value, Staged) for value in values[: len(received)]]
        link.forget((*received, *sent))
        link.forget(f"ready/{n}/{rank}" for rank in ranks)
        link.forget(f"sending/{n}/{rank}" for rank in outlet.members.senders)
        changed = sum(one.changed for one in told) / sum(one.elements for one in told)
        return Received(sum(one.bytes for one in told), changed)


class _Sending:
    """The messages of one update from one trainer rank to one engine."""

    def __init__(self, update: Transmission, link: Link, ready: Sequence[EngineReady]):
        """`ready`: what each engine rank has said."""
        self._update, self._link = update, link
        self._outlet, self._trainer = update.outlet, update.outlet.trainer
        self._parcels = self._outlet.parcels(update.parameters)
        self._choice = self._trainer.choice(self._outlet.engine, self._outlet.update)
        self._looks_at = [update.few_changes or self._choice.looks_at(parcel.elements) for parcel in self._parcels]
        self._to_check = {n for n, b in enumerate(self._outlet.buckets) if ready[b.destination].to_check == b.name}
        has = [one.has for one in ready]
        self._held = [each.version if each and each.run == self._trainer.run else None for each in has]
        """Engine rank → the version of these trainers that it has, or None."""
        self._from_buffer: dict[int, Message] = {}
        """Address of a buffer → the message that was sent from it last."""
        self._direct: list[Message] = []
        self._aside: list[tuple[Message, Tensor]] = []
        """Heads and changes; a carrier does not keep what it sends."""
        self._whole_bytes, self._looked_s = 0, 0.0
        self._costs: list[Cost] = []

    @property
    def how(self) -> Literal["whole", "changes", "few-changes"]:
        return "few-changes" if self._update.few_changes else "changes" if any(self._looks_at) else "whole"

    def send(self) -> None:
        """Returns when all that was sent may change. Raises LinkError."""
        try:
            self._send()
        except Exception as e:
            looked_at = zip(self._parcels, self._looks_at, strict=True)
            self._choice.failed(parcel.elements for parcel, looked in looked_at if looked)
            if self._choice.lacks_link and self._update.deadline.passed and not self._outlet.given_up:
                raise LinkError(
                    f"{e}; reshard.update=auto cannot measure the link before a whole version has arrived within "
                    f"reshard.timeout_s={self._update.deadline.timeout_s:g}: raise it if the link is that slow"
                ) from None
            raise

    def _send(self) -> None:
        begun = time.monotonic()
        if any(self._looks_at):
            for group in self._outlet.groups:
                self._send_group(group)
        else:
            for number in itertools.chain(*self._outlet.groups):
                self._wait_for_buffer(self._parcels[number])
                with self._update.reading():
                    self._pack(self._parcels[number])
                self._send_whole(self._parcels[number])
        for message in self._direct:
            message.wait(self._update.deadline)
        self._link.settle()
        if self._choice.lacks_look:
            with self._looking():
                largest = max(self._parcels, key=lambda parcel: parcel.flat.nbytes)
                self._choice.look_takes(self._trainer.published.least_s_per_byte(largest.flat))
        self._update.all_is_read()
        for message in (*self._from_buffer.values(), *(message for message, _ in self._aside)):
            message.wait(self._update.deadline)
        self._link.settle()
        size = sum(map(self._outlet.size, self._outlet.buckets))
        if 2 * self._whole_bytes >= size:
            self._choice.measured(self._whole_bytes, time.monotonic() - begun - self._looked_s)
        self._choice.judge(self._costs, self._looked_s)

    def _send_group(self, group: Sequence[int]) -> None:
        told: list[bytes] = []
        found: dict[int, bytes | None] = {}
        if self._trainer.device.type == "cpu":
            in_place = [n for n in group if self._looks_at[n] and self._parcels[n].copies is None]
            parcels = [self._parcels[number] for number in in_place]
            with self._update.reading(), self._looking():
                found = dict(zip(in_place, _LOOKING.map(self._changes, parcels), strict=True))
        for number in group:
            parcel = self._parcels[number]
            if number not in found:
                self._wait_for_buffer(parcel)
                with self._update.reading():
                    self._pack(parcel)
                    if self._looks_at[number]:
                        with self._looking():
                            found[number] = self._changes(parcel)
            changes = found.get(number)
            if changes is None:
                self._tell(parcel.bucket.destination, told, whole=True)
                self._send_whole(parcel)
                told = []
            else:
                told.append(changes)
                if number in self._to_check:
                    checksum = self._trainer.published.kept(parcel.elements).checksum()
                    self._tell(parcel.bucket.destination, told, whole=False, checksum=checksum)
                    told = []
        if told:
            self._tell(self._parcels[group[0]].bucket.destination, told, whole=False)

    def _changes(self, parcel: Parcel) -> bytes | None:
        kept = self._trainer.published.kept(parcel.elements)
        changes = kept.changes(parcel.flat, self._update.version, self._held[parcel.bucket.destination])
        if kept.found is not None:  # what an engine needs that has no base says nothing about the next version
            encoded = kept.found if changes is None else len(changes)
            self._costs.append(Cost(parcel.elements, parcel.flat.nbytes, encoded))
        return changes

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self._looked_s += time.monotonic() - begun

    def _tell(self, engine_rank: int, told: Sequence[bytes], whole: bool, checksum: int = -1) -> None:
        changes = b"".join(told)
        head = torch.tensor([len(told), len(changes), whole, checksum])
        body = torch.frombuffer(bytearray(changes), dtype=torch.uint8) if changes else None
        for flat in (head, body):
            if flat is not None:
                flat = flat.to(self._trainer.device)
                self._aside.append((self._link.tell(flat, engine_rank, self._update.deadline), flat))

    def _pack(self, parcel: Parcel) -> None:
        if parcel.copies is not None:
            pack(parcel.copies)
            self._link.settle()

    def _wait_for_buffer(self, parcel: Parcel) -> None:
        """Returns when the buffer of a message is free: not while parameters are read, which a step waits for."""
        if message := self._from_buffer.pop(parcel.flat.data_ptr(), None):
            message.wait(self._update.deadline)

    def _send_whole(self, parcel: Parcel) -> None:
        message = self._link.send(parcel.flat, parcel.bucket, self._update.deadline)
        self._whole_bytes += parcel.flat.nbytes
        if parcel.copies is None:
            self._direct.append(message)
        else:
            self._from_buffer[parcel.flat.data_ptr()] = message
