"""An engine rank's end of a link: receives updates into staging, in the background, and commits them.

Shard, Inlet and Reception are the partners of TrainerRank, Outlet and Transmission in publish.py; receive.py has the
Receiver, through which vLLM uses them. Imports no vllm.

Staging is reserved once and has one of two sizes:

- `full`: a second copy of the rank's shard. Messages are received into it while the engine generates, the commit copies
  them into the live parameters, and a failed update leaves those complete.
- `streamed`: room for one layer. The engine is paused, and messages are copied into the live parameters as they arrive,
  so a failed update leaves a mixture of versions.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal_megatron.reshard import engine_layout
from areal_megatron.reshard.boxes import LayoutError
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.plan import Bucket, Plan, largest_bucket
from areal_megatron.reshard.session import LinkInfo
from areal_megatron.reshard.transport import Copies, Deadline, Link, LinkError, Members, Message, bind, settle, unpack


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


def reserve(parameters: Mapping[str, Tensor], streamed: bool = False) -> Tensor:
    """Returns staging for these parameters: one axis, their dtype, on their device."""
    first = next(iter(parameters.values()))
    size = sum(parameter.numel() for parameter in parameters.values())
    if streamed:
        layers: dict[str, int] = defaultdict(int)
        for name, parameter in parameters.items():
            layers[re.sub(r"(layers\.\d+\.).*", r"\1", name)] += parameter.numel()
        size = min(size, max(*layers.values(), 2 * largest_bucket(first.device.type != "cpu")))
    return torch.empty(size, dtype=first.dtype, device=first.device)


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
        self.slots = 0
        """How many messages fit into staging at the same time."""
        self.digest = ""
        _check(shard, info.hf_config, EngineSizes(**info.engine_sizes), getattr(torch, info.dtype), self.name)

        def join() -> None:
            try:
                self.link = Link(
                    engine=info.engine,
                    generation=info.generation,
                    store=info.store,
                    device=shard.staging.device,
                    timeout_s=info.timeout_s,
                    through_host=info.link == "host",
                )
                plan = info.planner().plan(info.engine)
                members = Members.of(plan)
                self.link.join(members, members.engine(shard.rank))
                self._bind(plan)
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

    def _bind(self, plan: Plan) -> None:
        """Gives each message its place: one after another in `full` staging, in turns in `streamed` staging."""
        self.digest = plan.digest
        self.buckets = plan.received_by(self.shard.rank)
        largest = max((bucket.elements for bucket in self.buckets), default=1)
        self.slots = self.shard.staging.numel() // largest if self.shard.streamed else len(self.buckets)
        if self.buckets and not self.slots:
            raise LayoutError(
                f"{self.name}: staging of {self.shard.staging.numel()} elements has no room for a message of {largest}"
            )
        offset = 0
        for number, bucket in enumerate(self.buckets):
            if self.shard.streamed:
                offset = number % self.slots * largest
            self.places.append(self.shard.staging[offset : offset + bucket.elements])
            offset += bucket.elements
            received = (transfer.receive for transfer in bucket.transfers)
            self.copies.append(bind(received, self.shard.parameters, self.places[-1]))


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
        if not shard.streamed:
            for copies in self._inlet.copies:
                unpack(copies)
        shard.repack()
        settle(shard.staging.device)

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
            received = sum(bucket.elements for bucket in inlet.buckets) * inlet.shard.staging.itemsize
            link.say(f"received/{self._number}/{inlet.shard.rank}", str(received))
        except Exception as e:  # a thread's traceback would be lost
            self._error = str(e)
            inlet.break_link(self._number, f"{inlet.name}: update {self._number}: {e}")

    def _receive(self, link: Link) -> None:
        inlet, n = self._inlet, self._number
        link.say(f"ready/{n}/{inlet.shard.rank}", inlet.digest)
        senders = sorted({bucket.source for bucket in inlet.buckets})
        # A posted gloo receive ends only with its message or its timeout, so none is posted before its sender sends.
        sending = {f"sending/{n}/{source}": f"trainer rank {source} to send update {n}" for source in senders}
        link.wait(sending, self._deadline, update=n, stop=self._stop)
        link.meet(self._deadline, update=n, stop=self._stop)
        with link.stream():
            arriving: deque[tuple[Message, Copies]] = deque()
            for bucket, place, copies in zip(inlet.buckets, inlet.places, inlet.copies, strict=True):
                if len(arriving) == inlet.slots:
                    self._arrive(*arriving.popleft())
                arriving.append((link.receive(place, bucket, self._deadline), copies))
            while arriving:
                self._arrive(*arriving.popleft())
            link.settle()

    def _arrive(self, message: Message, copies: Copies) -> None:
        message.wait(self._deadline)
        if self._inlet.shard.streamed:
            self._stop()
            unpack(copies)

    def _stop(self) -> None:
        if self.abandoned:
            raise LinkError("abandoned by the controller")


def _check(shard: Shard, hf_config: Mapping[str, Any], sizes: EngineSizes, dtype: torch.dtype, name: str) -> None:
    holder = f"{name} (vLLM)"
    if shard.sizes != sizes:
        raise LayoutError(f"{holder} has {shard.sizes}, the trainers send to {sizes}")
    layout = engine_layout.layout(hf_config, sizes, shard.rank)
    layout.check({name: parameter.shape for name, parameter in shard.parameters.items()}, holder)
    for name, parameter in shard.parameters.items():
        if parameter.dtype != dtype:
            raise LayoutError(f"{holder}: {name} is {parameter.dtype}, the trainers send {dtype}")
        if not parameter.is_contiguous():
            raise LayoutError(f"{holder}: {name} of shape {list(parameter.shape)} is not contiguous")
