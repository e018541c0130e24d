"""An engine rank's end of a link: receives updates into staging (staging.py), in the background, and commits them.

Inlet and Reception are the partners of Outlet and Transmission in publish.py; receive.py has the Receiver, through
which vLLM uses them. Imports no vllm.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from areal_megatron.reshard import engine_layout
from areal_megatron.reshard.boxes import LayoutError
from areal_megatron.reshard.carriers.base import Deadline, LinkEnd, LinkError, Members
from areal_megatron.reshard.changes import Changes, ChangesError, bits, decode
from areal_megatron.reshard.copies import settle
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.messages import Announced, EngineReady, Publication, Staged
from areal_megatron.reshard.plan import Plan
from areal_megatron.reshard.session import LinkInfo
from areal_megatron.reshard.staging import Arrival, Shard, Staging
from areal_megatron.reshard.transport import Link, Message

_ABANDONED = "abandoned by the controller"
_SAY_S = 0.05
"""How long the end of a message may wait for the store to have heard why."""


class Inlet:
    """An engine rank's end of the link in one generation. Joins and plans on a thread of its own.

    Raises LayoutError, before anything is received, if the shard's parameters differ from the layout's.
    """

    def __init__(self, shard: Shard, info: LinkInfo, log: Callable[[str], None] = print):
        self.name = f"engine {info.engine}, rank {shard.rank}, generation {info.generation}"
        self.shard, self.timeout_s, self.log = shard, info.timeout_s, log
        self.updates = 0
        self.broken = ""
        self.link: Link | None = None
        self._ended = False
        self.arrivals: list[Arrival] = []
        self.digest = ""
        self.groups: list[list[int]] = []
        """The numbers of the arrivals in the order in which they arrive; only a group's may come as changes of several
        messages."""
        self.dtype = getattr(torch, info.dtype)
        """The dtype of the messages that have none of their own."""
        _check(shard, info, self.name)

        def join() -> None:
            try:
                link = self.link = Link(
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
                link.join(members, members.engine(shard.rank))
                self._bind(plan, info.may_send_changes)
                if self._ended or self.broken:  # meanwhile: what was opened after that is closed here
                    link.abort()
            except Exception as e:  # a thread's traceback would be lost
                self.break_link(1, f"{self.name}: cannot join: {e}")

        self._joining = threading.Thread(target=join, name=f"join-generation-{info.generation}", daemon=True)
        self._joining.start()

    def joined(self, deadline: Deadline) -> Link:
        """Returns the link once this rank has joined it. Raises LinkError if it cannot, or not by the deadline."""
        self._joining.join(deadline.left.total_seconds())
        link = self.link
        if link is None or self.broken or self._joining.is_alive():
            raise LinkError(self.broken or f"{self.name}: not joined within {deadline.timeout_s:.0f} s")
        return link

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

    def end(self) -> None:
        """Ends the connections of a generation that carries nothing any more; its updates fail."""
        self._ended = True
        if link := self.link:
            link.abort()

    def _bind(self, plan: Plan, in_groups: bool) -> None:
        self.digest = plan.order(in_groups)
        buckets = plan.received_by(self.shard.rank)
        self.groups = plan.groups(buckets, in_groups)
        self.arrivals = self.shard.arrivals(buckets, list(chain(*self.groups)), self.dtype)


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
        self._publication: Publication | None = None
        self._arriving: deque[tuple[Message, Arrival]] = deque()
        self._taken: set[int] = set()
        """Addresses of the places into which messages are on their way."""
        self._staging: Staging
        """Known when the trainers have said what they send."""
        self._bytes = self._elements = 0
        """What was received: bytes, and elements that changed or came in whole messages."""
        self._writing = threading.Lock()
        self._may_write = False
        """Whether this update has begun to write into staging; kept under `_writing`."""
        self._before = after
        """The update before, until it writes nothing any more."""
        self._thread = threading.Thread(target=self._run, name=f"receive-{self._number}", daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """Gives up the update, at once; what still arrives of it changes neither parameters nor a later update, and its
        link is unusable.

        vLLM waits for the whole device right after, so also for a message that no trainer will send any more.
        """
        self.abandoned = True
        self._deadline.expire()
        if link := self._inlet.link:
            # first the reason: trainers, whose messages end with the link, tell the controller the first one given
            saying = threading.Thread(target=link.say_failed, args=(self._number, self._said(_ABANDONED)), daemon=True)
            saying.start()
            saying.join(_SAY_S)
            link.abort()

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
        shard.live.publication = None
        self._staging.commit()
        shard.repack()
        settle(shard.staging.device)
        shard.live.publication = self._publication

    def _leaves_staging(self, deadline: Deadline) -> bool:
        """Returns whether this update, which has a successor, writes nothing any more. What it waits for before it
        writes may never end: NCCL connects to a node that is gone until TCP gives up."""
        with self._writing:
            self.abandoned = True
            may_write, before = self._may_write, self._before
        if not may_write:  # it may wait itself for one that does
            return before is None or before._leaves_staging(deadline)
        self._thread.join(deadline.left.total_seconds())
        return not self._thread.is_alive()

    def _run(self) -> None:
        inlet = self._inlet
        try:
            link = inlet.joined(self._deadline)
            if self._before is not None and not self._before._leaves_staging(self._deadline):
                raise LinkError(f"{inlet.name}: an abandoned update still holds staging")
            self._before = None
            self._receive(link)
            self._error = ""
            elements = sum(arrival.bucket.elements for arrival in inlet.arrivals)
            link.say(f"received/{self._number}/{inlet.shard.rank}", Staged(self._bytes, self._elements, elements))
        except Exception as e:  # a thread's traceback would be lost
            if isinstance(e, ChangesError):
                inlet.shard.live.publication = None  # whoever is wrong about it, the next generation begins with all
            self._error = _ABANDONED if self.abandoned else str(e)
            inlet.break_link(self._number, self._said(self._error))

    def _said(self, reason: str) -> str:
        return f"{self._inlet.name}: update {self._number}: {reason}"

    def _receive(self, link: Link) -> None:
        inlet, n = self._inlet, self._number
        live, arrivals = inlet.shard.live, inlet.arrivals
        to_check = arrivals[live.turn % len(arrivals)].bucket.name if arrivals else ""
        live.turn += 1
        link.say(f"ready/{n}/{inlet.shard.rank}", EngineReady(inlet.digest, to_check, live.publication))
        senders = sorted({arrival.bucket.source for arrival in arrivals})
        # A receive that is posted ends only with its message or its timeout, so none is before its sender sends.
        sending = {f"sending/{n}/{source}": f"trainer rank {source} to send update {n}" for source in senders}
        said = [link.decode(s, Announced) for s in link.wait(sending, self._deadline, update=n, stop=self._stop)]
        tells_changes = {source for source, one in zip(senders, said, strict=True) if one.how != "whole"}
        publications = {one.publication for one in said}
        few_changes = any(one.how == "few-changes" for one in said)
        self._staging = inlet.shard.kind.of_update(few_changes)(inlet.shard, self._stop)
        if len(publications) != 1:
            raise LinkError(f"the trainers send several versions: {', '.join(sorted(map(str, publications)))}")
        self._publication = publications.pop()
        link.meet(self._deadline, update=n, stop=self._stop)
        with self._writing:
            self._stop()
            self._may_write = True
        with link.stream():
            for group in inlet.groups:
                in_group = [arrivals[number] for number in group]
                if in_group[0].bucket.source in tells_changes:
                    self._receive_changes(link, in_group)
                else:
                    for arrival in in_group:
                        self._receive_whole(link, arrival)
            while self._arriving:
                self._arrive()
            link.settle()

    def _receive_whole(self, link: Link, arrival: Arrival) -> None:
        arrival = self._staging.placed(arrival)
        self._wait_for(arrival.place)
        self._arriving.append((link.receive(arrival.place, arrival.bucket, self._deadline), arrival))
        self._taken.add(arrival.place.data_ptr())
        self._elements += arrival.bucket.elements
        self._bytes += arrival.place.nbytes

    def _arrive(self) -> None:
        """Waits for the message that is on its way for longest."""
        message, arrival = self._arriving.popleft()
        message.wait(self._deadline)
        self._taken.remove(arrival.place.data_ptr())
        self._staging.take_whole(arrival)

    def _receive_changes(self, link: Link, group: Sequence[Arrival]) -> None:
        """Receives a group of messages of one trainer rank, of some of which there are only changes (publish.py)."""
        left, source = deque(group), group[0].bucket.source
        while left:
            self._stop()
            count, size, whole, checksum = self._hear(link, torch.empty(4, dtype=torch.int64), source).tolist()
            named = [left.popleft() for _ in range(min(count, len(left)))]
            most = sum(arrival.place.nbytes for arrival in named)
            if count != len(named) or not 0 <= size <= most or whole > len(left) or not (named or whole):
                raise LinkError(
                    f"trainer rank {source} sends a malformed head: changes of {count} messages in {size} bytes"
                )
            told = memoryview(self._hear(link, torch.empty(size, dtype=torch.uint8), source).numpy()) if size else b""
            self._bytes += size
            for arrival in named:
                changes, length = decode(told, arrival.bucket.elements, arrival.place.itemsize)
                told = told[length:]
                self._elements += len(changes.places)
                self._take(arrival, changes, checksum if arrival is named[-1] else -1)
            if whole:
                self._receive_whole(link, left.popleft())

    def _hear(self, link: Link, flat: Tensor, source: int) -> Tensor:
        flat = flat.to(self._inlet.shard.staging.device)
        link.hear(flat, source, self._deadline).wait(self._deadline)
        link.settle()
        return flat.cpu()

    def _take(self, arrival: Arrival, changes: Changes, checksum: int) -> None:
        edits, later = arrival.live.edits(changes)
        if checksum >= 0:
            self._check(arrival, changes.places, later, checksum)
        self._staging.take_changes(arrival, edits, changes.places, later)

    def _check(self, arrival: Arrival, places: np.ndarray, later: np.ndarray, checksum: int) -> None:
        """Raises ChangesError unless all of a message has this CRC-32 once its elements at `places` are `later`."""
        if (placed := self._staging.placed_to_check(arrival)) is None:
            return  # its turn comes again
        self._wait_for(placed.place)
        placed.pack_changed(places, later)
        if zlib.crc32(bits(placed.place).cpu().numpy()) != checksum:
            raise ChangesError("unchanged weights differ from the trainers' (CRC-32 mismatch)")

    def _wait_for(self, place: Tensor) -> None:
        """Returns when no message is on its way to a place, which several may have in turn."""
        while place.data_ptr() in self._taken:
            self._arrive()

    def _stop(self) -> None:
        if self.abandoned:
            raise LinkError(_ABANDONED)


def _check(shard: Shard, info: LinkInfo, name: str) -> None:
    holder, sizes = f"{name} (vLLM)", EngineSizes(**info.engine_sizes)
    if shard.sizes != sizes:
        raise LayoutError(f"{holder} has {shard.sizes}, the trainers send to {sizes}")
    if shard.adapter != info.sent_adapter:
        takes, sent = (each or "weights" for each in (shard.adapter, info.sent_adapter))
        raise LayoutError(f"{holder} takes {takes}, the trainers send {sent}")
    layout = engine_layout.layout(info.hf_config, sizes, shard.rank, shard.adapter)
    layout.check({name: parameter.shape for name, parameter in shard.parameters.items()}, holder)
    own = layout.parameter_dtypes
    for name, parameter in shard.parameters.items():
        expected = own.get(name, info.dtype)
        if parameter.dtype != getattr(torch, expected):
            raise LayoutError(f"{holder}: {name} is {parameter.dtype}, the trainers send torch.{expected}")
        if not parameter.is_contiguous():
            raise LayoutError(f"{holder}: {name} of shape {list(parameter.shape)} is not contiguous")
