"""An engine rank's end of a link: receives updates into staging, in the background, and commits them.

Staging is reserved once and has one of two sizes. `full`: a second copy of the rank's shard; messages land in
it while the engine generates, the commit copies them into the live parameters, and an update that fails leaves
those whole. `streamed`: room for one layer; the engine is paused, and messages are copied into the live
parameters as they come, so an update that fails leaves a mixture of versions. Imports no vllm.
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
from areal_megatron.reshard.plan import BUCKET_ELEMENTS, Bucket, Plan, Planner
from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.reshard.transport import Copies, Deadline, Link, LinkError, Message, bind, unpack


@dataclass(frozen=True)
class Shard:
    """What engine rank `rank` holds, and room for what it receives."""

    parameters: Mapping[str, Tensor]
    """The live parameters by vLLM's names."""
    staging: Tensor
    sizes: EngineSizes
    rank: int
    streamed: bool = False
    repack: Callable[[], None] = lambda: None
    """Brings what vLLM has derived from the parameters up to date."""


def reserve(parameters: Mapping[str, Tensor], streamed: bool = False) -> Tensor:
    """Staging for these parameters: flat, of their dtype, on their device."""
    some = next(iter(parameters.values()))
    size = sum(parameter.numel() for parameter in parameters.values())
    if streamed:
        layers: dict[str, int] = defaultdict(int)
        for name, parameter in parameters.items():
            layers[re.sub(r"(layers\.\d+\.).*", r"\1", name)] += parameter.numel()
        size = min(size, max(*layers.values(), 2 * BUCKET_ELEMENTS))
    return torch.empty(size, dtype=some.dtype, device=some.device)


class Inlet:
    """One generation of the link. Plans and joins on a thread of its own.

    Raises LayoutError, before anything is received, if the parameters are not the layout's.
    """

    def __init__(
        self,
        shard: Shard,
        *,
        engine: int,
        generation: int,
        store: str,
        hf_config: Mapping[str, Any],
        sizes: Mapping[str, Any],
        engine_sizes: Mapping[str, Any],
        dtype: str,
        timeout_s: float,
        bucket_elements: int = BUCKET_ELEMENTS,
        log: Callable[[str], None] = print,
    ):
        self.name = f"engine {engine}, rank {shard.rank}, generation {generation}"
        self.shard, self.timeout_s, self.log = shard, timeout_s, log
        self.updates = 0
        self.broken = ""
        self.link: Link | None = None
        self.buckets: list[Bucket] = []
        self.places: list[Tensor] = []
        """Where the message of each bucket lands."""
        self.copies: list[Copies] = []
        """From there into the live parameters."""
        self.slots = 0
        """Messages that have a place at the same time."""
        self.digest = ""
        trainers, engine_sizes = MegatronSizes(**sizes), EngineSizes(**engine_sizes)
        _check(shard, hf_config, engine_sizes, getattr(torch, dtype), self.name)

        def join() -> None:
            try:
                self.link = Link(
                    engine=engine,
                    generation=generation,
                    rank=trainers.ranks + shard.rank,
                    trainers=trainers.ranks,
                    engine_ranks=engine_sizes.ranks,
                    store=store,
                    device=shard.staging.device,
                    timeout_s=timeout_s,
                )
                self._index(Planner(hf_config, trainers, engine_sizes, bucket_elements).plan(engine))
            except Exception as e:  # a thread's traceback would be lost
                self.break_link(1, f"{self.name}: cannot join: {e}")

        self._joining = threading.Thread(target=join, name=f"join-generation-{generation}", daemon=True)
        self._joining.start()

    def joined(self, deadline: Deadline) -> Link:
        self._joining.join(deadline.left.total_seconds())
        if self.broken or self._joining.is_alive():
            raise LinkError(self.broken or f"{self.name}: not joined within {deadline.timeout_s:.0f} s")
        return self.link

    def break_link(self, update: int, reason: str) -> None:
        """Tells the trainers and closes the connections; this generation cannot be used again."""
        if self.broken:
            return
        self.broken = reason
        self.log(reason)
        link, self.link = self.link, None
        if link is not None:
            link.say_failed(update, reason)
            link.abort()

    def _index(self, plan: Plan) -> None:
        """Plans where each message lands: one after another in `full` staging, in turns in `streamed` staging."""
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

    `after` is the update before it, of any generation: two never write into staging at the same time.
    """

    def __init__(self, inlet: Inlet, after: Reception | None):
        inlet.updates += 1
        self.abandoned = False
        self._inlet, self._number = inlet, inlet.updates
        self._deadline = Deadline(inlet.timeout_s)
        self._error = "not received yet"
        before = after._thread if after else None
        self._thread = threading.Thread(target=self._run, args=(before,), name=f"receive-{self._number}", daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """Gives the update up; what still arrives of it touches neither parameters nor a later update."""
        self.abandoned = True

    def problem(self) -> str:
        """Why the update cannot be committed, or "" if all of it is in staging."""
        self._thread.join(1.0)  # the trainers may hear of the last message before this thread has ended
        return self._error and f"{self._inlet.name}: update {self._number} cannot be committed: {self._error}"

    def commit(self) -> None:
        """Staging → live parameters; only where there is no problem."""
        shard = self._inlet.shard
        if not shard.streamed:
            for copies in self._inlet.copies:
                unpack(copies)
        shard.repack()

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
        # A posted gloo receive ends only with its message or its timeout: post none before its sender is there.
        begun = {f"sending/{n}/{source}": f"trainer rank {source} to send update {n}" for source in senders}
        link.wait(begun, self._deadline, update=n, stop=self._stop)
        with link.stream():
            arriving: deque[tuple[Message, Copies]] = deque()
            for bucket, place, copies in zip(inlet.buckets, inlet.places, inlet.copies, strict=True):
                if len(arriving) == inlet.slots:
                    self._arrive(*arriving.popleft())
                arriving.append((link.receive(place, bucket.source, bucket), copies))
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
