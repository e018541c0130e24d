"""An engine rank's end of a link: receives updates into staging, in the background, and commits them.

Shard, Inlet and Reception are the partners of TrainerRank, Outlet and Transmission in publish.py; receive.py has the
Receiver, through which vLLM uses them. Imports no vllm.

Staging is reserved once and has one of two sizes:

- `full`: a second copy of the rank's shard. Messages are received into it while the engine generates, the commit copies
  them into the live parameters, and a failed update leaves those complete.
- `streamed`: room for one layer. The engine is paused, and messages are copied into the live parameters as they arrive,
  so a failed update leaves a mixture of versions.

Changes are based on the live parameters, which stay as they are until the commit. With `full` staging they wait in the
place of the message that they stand for: as places and new values, which the commit writes, or, where that is not less,
as the whole message. With `streamed` staging they are written at once; but if the last update had few changes, the
engine generates, and all that arrives waits in the staging: changes, and the whole messages among them.
"""

from __future__ import annotations

import re
import threading
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_megatron.reshard import engine_layout
from areal_megatron.reshard.boxes import LayoutError
from areal_megatron.reshard.carriers.base import Deadline, LinkEnd, LinkError, Members
from areal_megatron.reshard.carriers.streams import Listener
from areal_megatron.reshard.changes import Changes, ChangesError, bits, decode
from areal_megatron.reshard.copies import Copies, bind, pack, settle, unpack
from areal_megatron.reshard.edits import Edit, Places, Room, move
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.plan import Bucket, Plan, largest_bucket
from areal_megatron.reshard.session import LinkInfo
from areal_megatron.reshard.transport import Link, Message

_EDITED = 1 / 16
"""Changes are written one by one at a commit if they take up to so much of their message's place; above, copying the
whole message is as fast."""


@dataclass
class Live:
    """What the live parameters of an engine rank are."""

    publication: str = ""
    """The name of the version that they all have (session.publication); empty: unknown, or a mixture."""
    turn: int = 0
    """Counts updates: at each of them all elements of another message are checked, if it comes as changes."""


_ALIGNED = 16
"""Messages of any dtype begin at multiples of this many bytes."""


@dataclass(frozen=True)
class Shard:
    """The parameters of engine rank `rank`, and staging for what it receives."""

    parameters: Mapping[str, Tensor]
    """The live parameters by vLLM's names."""
    staging: Tensor
    sizes: EngineSizes
    rank: int
    streamed: bool = False
    repack: Callable[[], None] = lambda: None
    """Called at the end of a commit: updates what vLLM has derived from the parameters."""
    live: Live = field(default_factory=Live)
    site: Listener | None = None
    """Where trainers of another site reach the rank."""


def reserve(parameters: Mapping[str, Tensor], streamed: bool = False, room: float = 0.0) -> Tensor:
    """Returns staging for these parameters: bytes on their device. If `streamed` it has at least the share `room` of
    theirs."""
    first = next(iter(parameters.values()))
    size = sum(parameter.nbytes for parameter in parameters.values())
    if streamed:
        layers: dict[str, int] = defaultdict(int)
        for name, parameter in parameters.items():
            layers[re.sub(r"(layers\.\d+\.).*", r"\1", name)] += parameter.nbytes
        buckets = 2 * largest_bucket(first.device.type != "cpu") * first.itemsize
        size = min(size, max(*layers.values(), buckets, int(size * room)))
    return torch.empty(size, dtype=torch.uint8, device=first.device)


_NO_ROOM = "more changes came than there is room for; next time the engine stands still"


class Inlet:
    """An engine rank's end of the link in one generation. Joins and plans on a thread of its own.

    Raises LayoutError, before anything is received, if the shard's parameters are not those of the layout.
    """

    def __init__(self, shard: Shard, info: LinkInfo, log: Callable[[str], None] = print):
        self.name = f"engine {info.engine}, rank {shard.rank}, generation {info.generation}"
        self.shard, self.timeout_s, self.log = shard, info.timeout_s, log
        self.updates = 0
        self.broken = ""
        self.link: Link | None = None
        self.buckets: list[Bucket] = []
        self.places: list[Tensor] = []
        """The part of staging that receives each bucket."""
        self.copies: list[Copies] = []
        """What copies each bucket from there into the live parameters."""
        self.live_places: list[Places] = []
        """Where the elements of each bucket are in the live parameters."""
        self.digest = ""
        self.groups: list[list[int]] = []
        """The numbers of the buckets in the order in which they arrive; only those of a group may come as changes of
        several messages."""
        self.dtype = getattr(torch, info.dtype)
        """The dtype of the messages that have none of their own."""
        _check(shard, info.hf_config, EngineSizes(**info.engine_sizes), self.dtype, self.name)

        def join() -> None:
            try:
                self.link = Link(
                    LinkEnd(
                        engine=info.engine,
                        generation=info.generation,
                        store=info.store,
                        device=shard.staging.device,
                        timeout_s=info.timeout_s,
                        link=info.link,
                        site=shard.site,
                    )
                )
                plan = info.planner().plan(info.engine)
                members = Members.of(plan)
                self.link.join(members, members.engine(shard.rank))
                self._bind(plan, info.update)
            except Exception as e:  # a thread's traceback would be lost
                self.break_link(1, f"{self.name}: cannot join: {e}")

        self._joining = threading.Thread(target=join, name=f"join-generation-{info.generation}", daemon=True)
        self._joining.start()

    def joined(self, deadline: Deadline) -> Link:
        """Returns the link once this rank has joined it. Raises LinkError if it cannot, or not by the deadline."""
        self._joining.join(deadline.left.total_seconds())
        if self.broken or self._joining.is_alive():
            raise LinkError(self.broken or f"{self.name}: not joined within {deadline.timeout_s:.0f} s")
        return self.link

    def break_link(self, update: int, reason: str) -> None:
        """Tells the other ranks and closes this one's connections; this generation cannot be used again."""
        if self.broken:
            return
        self.broken = reason
        self.log(reason)
        link, self.link = self.link, None
        if link is not None:
            link.say_failed(update, reason)
            link.abort()

    def _bind(self, plan: Plan, update: str) -> None:
        """Gives each message its place: one after another in `full` staging, in turns in `streamed` staging."""
        self.digest = plan.order(update)
        self.buckets = plan.received_by(self.shard.rank)
        self.groups = plan.groups(self.buckets) if update != "full" else [list(range(len(self.buckets)))]
        dtypes = [getattr(torch, bucket.dtype) if bucket.dtype else self.dtype for bucket in self.buckets]
        sizes = [bucket.elements * dtype.itemsize for bucket, dtype in zip(self.buckets, dtypes, strict=True)]
        largest = -(-max(sizes, default=1) // _ALIGNED) * _ALIGNED
        staging = self.shard.staging
        slots = staging.nbytes // largest if self.shard.streamed else len(self.buckets)
        if self.buckets and not slots:
            raise LayoutError(
                f"{self.name}: staging of {staging.nbytes} bytes has no room for a message of {largest} bytes"
            )
        if self.shard.streamed:
            turns = {number: turn for turn, number in enumerate(chain(*self.groups))}
            starts = [turns[number] % slots * largest for number in range(len(self.buckets))]
        else:  # the widest elements first, so that all begin at multiples of their size
            starts, offset = [0] * len(self.buckets), 0
            for number in sorted(range(len(self.buckets)), key=lambda n: -dtypes[n].itemsize):
                starts[number] = offset
                offset += sizes[number]
        for bucket, dtype, start, size in zip(self.buckets, dtypes, starts, sizes, strict=True):
            self.places.append(staging[start : start + size].view(dtype))
            self.copies.append(self.copies_of(bucket, self.places[-1]))
            received = [transfer.receive for transfer in bucket.transfers]
            self.live_places.append(Places(received, self.shard.parameters, dtype))

    def copies_of(self, bucket: Bucket, place: Tensor) -> Copies:
        """Returns what copies a bucket between `place` and the live parameters."""
        return bind((transfer.receive for transfer in bucket.transfers), self.shard.parameters, place)


class Reception:
    """One update on its way into staging, on a thread of its own.

    `after` is the update before it, in whatever generation: two never write into staging at the same time.
    """

    def __init__(self, inlet: Inlet, after: Reception | None):
        inlet.updates += 1
        self.abandoned = False
        self._inlet, self._number = inlet, inlet.updates
        self._deadline = Deadline(inlet.timeout_s)  # from /start_weight_update; transport.py lists all limits
        self._error = "not received yet"
        self._publication = ""
        self._arriving: deque[tuple[Message, Tensor, Copies]] = deque()
        """Messages on their way, their places, and what copies them into the live parameters."""
        self._whole: list[Copies] = []
        """What copies the messages into the live parameters that wait for the commit as a whole."""
        self._edits: list[Edit] = []
        self._room: Room | None = None
        """Where all waits for the commit, if staging is `streamed` and the engine generates meanwhile."""
        self._bytes = self._elements = 0
        """What was received: bytes, and elements that changed or came in whole messages."""
        before = after._thread if after else None
        self._thread = threading.Thread(target=self._run, args=(before,), name=f"receive-{self._number}", daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """Gives up the update; what still arrives of it changes neither parameters nor a later update."""
        self.abandoned = True

    def problem(self) -> str:
        """Returns why the update cannot be committed, or "" if all of it is in staging."""
        self._thread.join(1.0)  # the trainers may hear of the last message before this thread has ended
        return self._error and f"{self._inlet.name}: update {self._number} cannot be committed: {self._error}"

    def commit(self) -> None:
        """Copies staging into the live parameters. Call it only if there is no `problem`.

        Returns when the device is done, so that its time counts as the engine's pause, and the next update may write
        into staging.
        """
        shard = self._inlet.shard
        shard.live.publication = ""
        for copies in self._whole:
            unpack(copies)
        for edit in self._edits:
            edit.write()
        shard.repack()
        settle(shard.staging.device)
        shard.live.publication = self._publication

    def _run(self, before: threading.Thread | None) -> None:
        inlet = self._inlet
        try:
            link = inlet.joined(self._deadline)
            if before is not None:
                before.join(self._deadline.left.total_seconds())
                if before.is_alive():
                    raise LinkError(f"{inlet.name}: an abandoned update still holds staging")
            self._receive(link)
            self._error = ""
            elements = sum(bucket.elements for bucket in inlet.buckets)
            link.say(f"received/{self._number}/{inlet.shard.rank}", f"{self._bytes} {self._elements} {elements}")
        except Exception as e:  # a thread's traceback would be lost
            if isinstance(e, ChangesError):
                inlet.shard.live.publication = ""  # whoever is wrong about it, the next generation begins with all
            self._error = str(e)
            inlet.break_link(self._number, f"{inlet.name}: update {self._number}: {e}")

    def _receive(self, link: Link) -> None:
        inlet, n = self._inlet, self._number
        live, buckets = inlet.shard.live, inlet.buckets
        to_check = buckets[live.turn % len(buckets)].name if buckets else ""
        live.turn += 1
        link.say(f"ready/{n}/{inlet.shard.rank}", f"{inlet.digest} {to_check} {live.publication}")
        senders = sorted({bucket.source for bucket in inlet.buckets})
        # A posted gloo receive ends only with its message or its timeout, so none is posted before its sender sends.
        sending = {f"sending/{n}/{source}": f"trainer rank {source} to send update {n}" for source in senders}
        said = [text.split(" ") for text in link.wait(sending, self._deadline, update=n, stop=self._stop)]
        tells_changes = {source for source, (how, _) in zip(senders, said, strict=True) if how != "whole"}
        publications = {publication for _, publication in said}
        if inlet.shard.streamed and any(how == "few-changes" for how, _ in said):
            self._room = Room(inlet.shard.staging, 0, inlet.shard.staging.nbytes)
        if len(publications) != 1:
            raise LinkError(f"the trainers send several versions: {', '.join(sorted(publications))}")
        self._publication = publications.pop()
        link.meet(self._deadline, update=n, stop=self._stop)
        with link.stream():
            for group in inlet.groups:
                if inlet.buckets[group[0]].source in tells_changes:
                    self._receive_changes(link, group)
                else:
                    for number in group:
                        self._receive_whole(link, number)
            while self._arriving:
                self._arrive()
            link.settle()

    def _receive_whole(self, link: Link, number: int) -> None:
        inlet = self._inlet
        bucket, place, copies = inlet.buckets[number], inlet.places[number], inlet.copies[number]
        if self._room:
            place = self._room.place(place.numel(), place.dtype)
            if place is None:
                raise LinkError(_NO_ROOM)
            copies = inlet.copies_of(bucket, place)
        elif inlet.shard.streamed:
            self._wait_for(place)
        self._arriving.append((link.receive(place, bucket, self._deadline), place, copies))
        self._elements += bucket.elements
        self._bytes += place.nbytes

    def _arrive(self) -> None:
        """Waits for the message that is on its way for longest."""
        message, _, copies = self._arriving.popleft()
        message.wait(self._deadline)
        self._in_place(copies)

    def _in_place(self, copies: Copies) -> None:
        """Has a whole message copied into the live parameters at the commit, or now if the engine stands still."""
        if self._inlet.shard.streamed and not self._room:
            self._stop()
            self._inlet.shard.live.publication = ""
            unpack(copies)
        else:
            self._whole.append(copies)

    def _receive_changes(self, link: Link, group: list[int]) -> None:
        """Receives a group of messages of one trainer rank, of some of which there are only changes (publish.py)."""
        inlet, left = self._inlet, deque(group)
        source = inlet.buckets[group[0]].source
        while left:
            self._stop()
            count, size, whole, checksum = self._hear(link, torch.empty(4, dtype=torch.int64), source).tolist()
            named = [left.popleft() for _ in range(min(count, len(left)))]
            most = sum(inlet.places[number].nbytes for number in named)
            if count != len(named) or not 0 <= size <= most or whole > len(left) or not (named or whole):
                raise LinkError(
                    f"trainer rank {source} sends changes of {count} messages in {size} bytes, which cannot be"
                )
            told = memoryview(self._hear(link, torch.empty(size, dtype=torch.uint8), source).numpy()) if size else b""
            self._bytes += size
            for number in named:
                changes, length = decode(told, inlet.buckets[number].elements, inlet.places[number].itemsize)
                told = told[length:]
                self._elements += len(changes.places)
                self._take(number, changes, checksum if number == named[-1] else -1)
            if whole:
                self._receive_whole(link, left.popleft())

    def _hear(self, link: Link, flat: Tensor, source: int) -> Tensor:
        flat = flat.to(self._inlet.shard.staging.device)
        link.hear(flat, source, self._deadline).wait(self._deadline)
        link.settle()
        return flat.cpu()

    def _take(self, number: int, changes: Changes, checksum: int) -> None:
        """Has the changes of a message written at the commit, or now if the engine stands still."""
        inlet = self._inlet
        edits, later = inlet.live_places[number].edits(changes)
        if checksum >= 0:
            self._check(number, changes.places, later, checksum)
        if self._room:
            moved = move(edits, self._room)
            if moved is None:
                raise LinkError(_NO_ROOM)
            self._edits += moved
        elif inlet.shard.streamed:
            self._stop()
            inlet.shard.live.publication = ""
            for edit in edits:
                edit.write()
        else:
            place, staging = inlet.places[number], inlet.shard.staging
            start, size = place.storage_offset() * place.itemsize, place.nbytes
            moved = move(edits, Room(staging, start, start + int(size * _EDITED)))
            if moved is not None:
                self._edits += moved
            else:
                _pack_changed(inlet.copies[number], place, changes.places, later)
                self._in_place(inlet.copies[number])

    def _check(self, number: int, places: np.ndarray, later: np.ndarray, checksum: int) -> None:
        """Raises ChangesError unless all of a message has this CRC-32 once its elements at `places` are `later`."""
        inlet, place, copies = self._inlet, self._inlet.places[number], self._inlet.copies[number]
        if self._room:
            place = self._room.rest(place.numel(), place.dtype)
            if place is None:
                return  # its turn comes again
            copies = inlet.copies_of(inlet.buckets[number], place)
        elif inlet.shard.streamed:
            self._wait_for(place)
        _pack_changed(copies, place, places, later)
        if zlib.crc32(bits(place).cpu().numpy()) != checksum:
            raise ChangesError("weights that have not changed are others than those that the trainers sent")

    def _wait_for(self, place: Tensor) -> None:
        """Returns when no message is on its way to a place, which several have in turn."""
        while any(other.data_ptr() == place.data_ptr() for _, other, _ in self._arriving):
            self._arrive()

    def _stop(self) -> None:
        if self.abandoned:
            raise LinkError("abandoned by the controller")


def _pack_changed(copies: Copies, place: Tensor, places: np.ndarray, later: np.ndarray) -> None:
    """Puts a message together in its place: from the live parameters, but `later` at `places`."""
    pack(copies)
    bits(place)[torch.from_numpy(places).to(place.device)] = torch.from_numpy(later).to(place.device)


def _check(shard: Shard, hf_config: Mapping[str, Any], sizes: EngineSizes, dtype: torch.dtype, name: str) -> None:
    holder = f"{name} (vLLM)"
    if shard.sizes != sizes:
        raise LayoutError(f"{holder} has {shard.sizes}, the trainers send to {sizes}")
    layout = engine_layout.layout(hf_config, sizes, shard.rank)
    layout.check({name: parameter.shape for name, parameter in shard.parameters.items()}, holder)
    own = layout.parameter_dtypes
    for name, parameter in shard.parameters.items():
        if parameter.dtype != (expected := getattr(torch, own[name]) if name in own else dtype):
            raise LayoutError(f"{holder}: {name} is {parameter.dtype}, the trainers send {expected}")
        if not parameter.is_contiguous():
            raise LayoutError(f"{holder}: {name} of shape {list(parameter.shape)} is not contiguous")
