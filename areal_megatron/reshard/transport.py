"""One link: the trainer ranks that send to one engine and the ranks of this engine, for one generation.

Weights travel by a carrier (carriers/): a process group of the link's own, NCCL, or TCP streams, which are TLS to an
engine at another site. What the ranks have to tell each other they write under keys of the trainers' TCPStore
(messages.py). A carrier with which anything failed is never used again: the controller gives the link a new generation.

`reshard.timeout_s` is how long one update may take. Every limit of an update is derived from it:

| limit | value | set in |
|---|---|---|
| a trainer rank, from `publish` until its last message is sent | timeout_s | publish.Transmission |
| rank 0, until all have arrived; a step, until all is read | timeout_s + TO_SAY_WHY_S | publish.Transmission |
| an engine rank, from /start_weight_update until it has its last message | timeout_s | reception.Reception |
| connecting to the store; an operation of an NCCL group | timeout_s | carriers/base.py, carriers/nccl.py |
| connecting over TCP or TLS; an answer about the keys of an engine at another site | timeout_s | carriers/streams.py |
| a member that waits for the others, or for the name of NCCL's group | the update's own | `Link.meet` |
| the controller, which waits for the trainers' report | 2 × timeout_s | controller/updates.py |

The controller waits twice as long because trainers that are alive report the end of their own limit; its limit passes
only if one is dead.

Both ends go through their messages in the plan's one order. A carrier says how many of a queue may be on their way; a
rank waits for earlier ones only, so the earliest message that has not arrived is never held up.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from areal_megatron.process.errors import first_line
from areal_megatron.reshard.carriers import carrier_of
from areal_megatron.reshard.carriers.base import Deadline, LinkEnd, LinkError, Members
from areal_megatron.reshard.messages import Library
from areal_megatron.reshard.plan import Bucket

POLL_S = (0.001, 0.005)
"""The pause between two looks at the store: the first, and the longest, to which it grows."""
POLL_S_PER_RANK = 0.001
"""The longest pause for each rank of a link, if that is more: all ranks of all links look at the same store, and a look
takes 36 µs of it."""

_FIRST_TAG = 2**20
"""Tags below it are the numbers of buckets."""


Told = TypeVar("Told", bound=msgspec.Struct)


def _encode(message: msgspec.Struct) -> str:
    return msgspec.json.encode(message).decode()


class Link:
    """One rank's end of a link. Every rank of both sides may use the keys; messages need `join` and, from update to
    update, `meet`.

    One thread at a time may use it, but any thread may call `say_failed`, `failure`, `abort` and `close`.
    """

    def __init__(self, end: LinkEnd):
        self.name, self._device = end.name, end.device
        self.carrier = carrier_of(end)
        self._keys = self.carrier.keys()
        self._lost_rank = ""
        self._longest_pause_s = POLL_S[1]
        self._stream: torch.Stream | None = None
        self._under_way: dict[int, deque[Message]] = defaultdict(deque)
        """The messages of each queue that this rank has not seen arrive, the oldest first."""
        self._told: Counter[int] = Counter()
        """Messages to or from each peer that the plan does not know of."""

    def join(self, members: Members, member: int) -> None:
        """Makes this rank member number `member`, one of those that exchange messages. Raises LinkError."""
        self._members = members
        self._agree_on_library(members.name(member))
        self._longest_pause_s = max(POLL_S[1], POLL_S_PER_RANK * len(members))
        if self._device.type != "cpu":
            self._stream = torch.get_device_module(self._device).Stream(self._device, priority=-1)
        self.carrier.join(self._keys, members, member)

    def serve(self, engine_ranks: int) -> None:
        """Has the engine's ranks use the keys where they cannot reach the store; for one of the trainer ranks. Raises
        LinkError."""
        try:
            self.carrier.serve(engine_ranks, self._keys, self._lose)
        except OSError as e:
            raise LinkError(f"{self.name}: {first_line(e)}") from None

    def _lose(self, rank: int, reason: str) -> None:
        """An engine rank can tell nothing any more."""
        self._lost_rank = self._lost_rank or f"{self.name}: lost engine rank {rank}: {reason}"

    def meet(self, deadline: Deadline, *, update: int, stop: Callable[[], None]) -> None:
        """Connects the members, if their carrier needs that, and waits for them as `wait` does. Raises LinkError."""
        try:
            self.carrier.meet(lambda keys: self.wait(keys, deadline, update=update, stop=stop))
        except dist.DistError as e:
            raise LinkError(self._lost(e)) from None

    def _agree_on_library(self, who: str) -> None:
        """Raises LinkError, after telling the other ranks, if this rank's library differs from the first rank's. Two
        versions of NCCL do not connect, and the reason is in NCCL's own log at most."""
        mine = self.carrier.library
        try:
            first = self._keys.compare_set("library", "", _encode(Library(mine, who)))
        except RuntimeError as e:
            raise LinkError(self._lost(e)) from None
        theirs = self.decode(first, Library)
        if theirs.name != mine:
            reason = (
                f"{self.name}: {who} has {mine}, but {theirs.rank} has {theirs.name}; install the same torch and "
                "nvidia-nccl for trainers and engines (docs/operations.md)"
            )
            raise LinkError(self.say_failed(1, reason))

    def stream(self) -> contextlib.AbstractContextManager:
        """Returns a context in which copies and messages run on a stream of the link, beside training or generation."""
        return torch.get_device_module(self._device).stream(self._stream) if self._stream else contextlib.nullcontext()

    def settle(self) -> None:
        """Returns when everything issued on the link's stream is done."""
        if self._stream:
            self._stream.synchronize()

    def abort(self) -> None:
        """Ends messages that no peer will send or take, without waiting for that; the link is unusable then. Any thread
        may call it."""
        self.carrier.abort()

    def close(self) -> None:
        """Ends the connections of a link that carries nothing any more. Any thread may call it."""
        self.carrier.close()

    def say(self, key: str, message: msgspec.Struct | None = None) -> None:
        """Sets a key of the link for all its ranks."""
        try:
            self._keys.set(key, _encode(message) if message else "")
        except RuntimeError as e:
            raise LinkError(self._lost(e)) from None

    def forget(self, keys: Iterable[str]) -> None:
        """Removes keys that no rank reads any more."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            for key in keys:
                self._keys.delete_key(key)

    def say_failed(self, update: int, reason: str) -> str:
        """Reports that this rank has given up `update`. Returns the first reason that any rank gave; it is kept, since
        later ones only follow from it."""
        try:
            return self._keys.compare_set(f"failed/{update}", "", reason).decode()
        except RuntimeError:  # the store is gone, and with it the trainers who would read this
            return reason

    def failure(self, update: int) -> str:
        """Returns the first reason that any rank gave for the failure of `update`, or "" if none has failed."""
        key = f"failed/{update}"
        try:
            return self._keys.get(key).decode() if self._keys.check([key]) else self._lost_rank
        except dist.DistError as e:
            return self._lost(e)

    def wait(
        self, keys: Mapping[str, str], deadline: Deadline, *, update: int, stop: Callable[[], None]
    ) -> list[bytes]:
        """Returns the values of `keys` (key → who has to do what), once all are set.

        Raises LinkError at the deadline, naming who is missing, and as soon as a rank of the link reports that `update`
        has failed. Calls `stop` at every look at the store; it raises to end the wait.
        """
        names, pause = list(keys), POLL_S[0]
        try:
            while not self._keys.check(names):
                stop()
                if failure := self.failure(update):
                    raise LinkError(failure)
                if deadline.passed:
                    missing = (who for key, who in keys.items() if not self._keys.check([key]))
                    raise LinkError(f"{self.name}: waited {deadline.timeout_s:.0f} s in vain for {', '.join(missing)}")
                time.sleep(pause)
                pause = min(1.2 * pause, self._longest_pause_s)
            return self._keys.multi_get(names)
        except dist.DistError as e:
            raise LinkError(self._lost(e)) from None

    def decode(self, value: bytes, of: type[Told]) -> Told:
        """Returns the message that a rank has set. Raises LinkError."""
        try:
            return msgspec.json.decode(value, type=of)
        except msgspec.MsgspecError as e:
            raise LinkError(f"{self.name}: do all ranks run the same release? {of.__name__}: {e}") from None

    def _lost(self, error: Exception) -> str:
        return f"{self.name}: lost the trainers' store: {first_line(error)}"

    def send(self, flat: Tensor, bucket: Bucket, deadline: Deadline) -> Message:
        """Sends a bucket to its engine rank, as soon as earlier messages leave room for it.

        Raises LinkError, after which the link is unusable.
        """
        return self._send(flat, self._members.engine(bucket.destination), bucket.number, _describe(bucket), deadline)

    def tell(self, flat: Tensor, engine_rank: int, deadline: Deadline) -> Message:
        """Sends an engine rank what the plan does not know of; `hear` with as many elements receives it."""
        peer = self._members.engine(engine_rank)
        return self._send(flat, peer, self._next_tag(peer), f"what is new for engine rank {engine_rank}", deadline)

    def _send(self, flat: Tensor, peer: int, tag: int, what: str, deadline: Deadline) -> Message:
        return self._post(peer, f"send {what}", lambda: self.carrier.send(flat, peer, tag, deadline), deadline)

    def receive(self, flat: Tensor, bucket: Bucket, deadline: Deadline) -> Message:
        """Receives a bucket from its trainer rank, as soon as earlier messages leave room for it.

        Raises LinkError, after which the link is unusable.
        """
        return self._receive(flat, self._members.trainer(bucket.source), bucket.number, _describe(bucket), deadline)

    def hear(self, flat: Tensor, trainer_rank: int, deadline: Deadline) -> Message:
        """Receives what a trainer rank sends by `tell`."""
        peer = self._members.trainer(trainer_rank)
        return self._receive(flat, peer, self._next_tag(peer), f"what is new of trainer rank {trainer_rank}", deadline)

    def _receive(self, flat: Tensor, peer: int, tag: int, what: str, deadline: Deadline) -> Message:
        return self._post(peer, f"receive {what}", lambda: self.carrier.receive(flat, peer, tag, deadline), deadline)

    def _next_tag(self, peer: int) -> int:
        """Returns the tag of the next message that the plan does not know of; both ends count them."""
        self._told[peer] += 1
        return _FIRST_TAG + self._told[peer]

    def _post(self, peer: int, what: str, issue: Callable[[], Any], deadline: Deadline) -> Message:
        """Issues a message to or from `peer` as soon as earlier ones leave room for it."""
        posted = self._under_way[self.carrier.queue(peer)]
        while posted and (posted[0].is_over or len(posted) >= self.carrier.most_under_way):
            posted.popleft().wait(deadline)
        posted.append(Message(self, what, issue))
        return posted[-1]


class Message:
    """A message that is on its way, sent or received. Raises LinkError if it cannot be issued."""

    def __init__(self, link: Link, what: str, issue: Callable[[], Any]):
        self._what, self._carrier = f"{link.name}: {what}", link.carrier
        self.is_over = False
        """Whether `wait` has returned."""
        try:
            self._work = issue()
        except RuntimeError as e:
            raise LinkError(f"{self._what}: {first_line(e)}") from None

    def wait(self, deadline: Deadline) -> None:
        """Returns when the buffer may be used again. Raises LinkError, after which the link is unusable."""
        if self.is_over:
            return
        try:
            self._carrier.wait(self._work, deadline)
        except RuntimeError as e:
            raise LinkError(f"{self._what}: {first_line(e)}") from None
        self.is_over = True


def _describe(bucket: Bucket) -> str:
    return (
        f"bucket {bucket.number} ({bucket.transfers[0].send.tensor} …) of trainer rank {bucket.source} "
        f"for engine rank {bucket.destination}"
    )
