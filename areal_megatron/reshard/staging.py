"""An engine rank's end of a link: receives updates into staging, in the background, and commits them.

Staging is a second copy of the rank's shard, reserved once. Messages land in it at the places that the plan
says; the commit copies them from there into the live parameters. Imports no vllm.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from areal_megatron.reshard import vllm
from areal_megatron.reshard.layout import LayoutError
from areal_megatron.reshard.megatron import MegatronSizes
from areal_megatron.reshard.plan import BUCKET_ELEMENTS, Bucket, Plan, link_plan
from areal_megatron.reshard.transport import Copies, Deadline, Link, LinkError, bind, unpack


class Shard(NamedTuple):
    """The live parameters of engine rank `rank` of `tp`, by vLLM's names, and their staging."""

    parameters: Mapping[str, Tensor]
    staging: Tensor
    tp: int
    rank: int


def reserve(parameters: Mapping[str, Tensor]) -> Tensor:
    """Staging for these parameters: flat, of their dtype, on their device."""
    some = next(iter(parameters.values()))
    return torch.empty(sum(p.numel() for p in parameters.values()), dtype=some.dtype, device=some.device)


class Inlet:
    """One epoch of the link. Plans and joins on a thread of its own.

    Raises LayoutError, before anything is received, if the parameters are not the layout's.
    """

    def __init__(
        self,
        shard: Shard,
        *,
        engine: int,
        epoch: int,
        store: str,
        hf_config: Mapping[str, Any],
        sizes: Mapping[str, Any],
        dtype: str,
        timeout_s: float,
        bucket_elements: int = BUCKET_ELEMENTS,
        log: Callable[[str], None] = print,
    ):
        self.name = f"engine {engine}, rank {shard.rank}, epoch {epoch}"
        self.shard, self.timeout_s, self.log = shard, timeout_s, log
        self.updates = 0
        self.broken = ""
        self.link: Link | None = None
        self.buckets: list[Bucket] = []
        self.copies: list[Copies] = []
        self.digest = ""
        _check(shard, hf_config, getattr(torch, dtype), self.name)
        trainers = MegatronSizes(**sizes)

        def join() -> None:
            try:
                self.link = Link(engine=engine, epoch=epoch, rank=trainers.ranks + shard.rank, trainers=trainers.ranks,
                                 engine_tp=shard.tp, store=store, device=shard.staging.device,
                                 timeout_s=timeout_s)  # fmt: skip
                self._index(link_plan(hf_config, trainers, shard.tp, engine, bucket_elements))
            except Exception as e:  # a thread's traceback would be lost
                self.break_link(1, f"{self.name}: cannot join: {e}")

        self._joining = threading.Thread(target=join, name=f"join-epoch-{epoch}", daemon=True)
        self._joining.start()

    def joined(self, deadline: Deadline) -> Link:
        self._joining.join(deadline.left.total_seconds())
        if self.broken or self._joining.is_alive():
            raise LinkError(self.broken or f"{self.name}: not joined within {deadline.timeout_s:.0f} s")
        return self.link

    def break_link(self, update: int, reason: str) -> None:
        """Tells the trainers and closes the connections; this epoch cannot be used again."""
        if self.broken:
            return
        self.broken = reason
        self.log(reason)
        link, self.link = self.link, None
        if link is not None:
            link.say_failed(update, reason)

    def place(self, bucket: Bucket) -> Tensor:
        return self.shard.staging[bucket.offset : bucket.offset + bucket.elements]

    def _index(self, plan: Plan) -> None:
        self.digest = plan.digest
        self.buckets = plan.received_by(self.shard.rank)
        self.copies = [
            bind((transfer.receive for transfer in bucket.transfers), self.shard.parameters, self.place(bucket))
            for bucket in self.buckets
        ]


class Incoming:
    """One update on its way into staging, on a thread of its own.

    `after` is the update before it, of any epoch: two never write into staging at the same time.
    """

    def __init__(self, inlet: Inlet, after: Incoming | None):
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
        for copies in self._inlet.copies:
            unpack(copies)

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
            messages = [link.receive(inlet.place(bucket), bucket.source, bucket) for bucket in inlet.buckets]
            for message in messages:
                message.wait(self._deadline)
            link.settle()

    def _stop(self) -> None:
        if self.abandoned:
            raise LinkError("abandoned by the controller")


def _check(shard: Shard, hf_config: Mapping[str, Any], dtype: torch.dtype, name: str) -> None:
    layout = vllm.layout(hf_config, shard.tp, shard.rank)
    holder = f"{name} (vLLM)"
    layout.check({name: parameter.shape for name, parameter in shard.parameters.items()}, holder)
    for name, parameter in shard.parameters.items():
        if parameter.dtype != dtype:
            raise LayoutError(f"{holder}: {name} is {parameter.dtype}, the trainers send {dtype}")
        if not parameter.is_contiguous():
            raise LayoutError(f"{holder}: {name} of shape {list(parameter.shape)} is not contiguous")
