"""One link: the trainer ranks that send to one engine and the ranks of this engine, for one generation.

Weights travel over a process group of the link's own: gloo between CPUs, NCCL between GPUs, or gloo between buffers in
the memory of the host (`reshard.link=host`); to an engine at another site over TLS streams, which also carry the
engine's use of the keys (carriers/streams.py). What the ranks have to tell each other they write under keys of the
trainers' TCPStore, with a prefix of the link's own:

| key | set by | value |
|---|---|---|
| library | the first rank of either side that joined | what carries its messages, and who it is |
| member/M | member M | it is about to connect to all the others at once (NCCL only) |
| ready/N/R | engine rank R | digest of the plan it follows, and what it holds; it waits for update N |
| sending/N/S | trainer rank S | what it publishes; its first message of update N is on its way |
| sent/N/S | trainer rank S | it read every parameter before any could change |
| received/N/R | engine rank R | bytes and elements received; staging holds the update |
| failed/N | the first rank of either side that failed | why |

N counts the updates of a generation from 1. A group in which anything failed is never used again: gloo's pairs
are unusable after a timeout, so the controller gives the link a new generation.

`reshard.timeout_s` is how long one update may take. Every limit of an update is derived from it:

| limit | value | set in |
|---|---|---|
| a trainer rank, from `publish` until its last message is sent; rank 0, until all have arrived | timeout_s | publish |
| an optimizer step that waits until the parameters have been read | timeout_s + 1 s | publish.Transmission |
| an engine rank, from /start_weight_update until it has its last message | timeout_s | staging.Reception |
| connecting to the store; an operation of an NCCL group | timeout_s | `connect`, `_nccl_group` |
| connecting to an engine at another site; an answer about its keys | timeout_s | carriers/streams.py |
| a member that waits for the others, or for the name of NCCL's group | the update's own | `Link.meet` |
| one attempt of gloo to connect a pair of ranks; it makes GLOO_TRIES | timeout_s / GLOO_TRIES | `_gloo_group` |
| the controller, which waits for the trainers' report | 2 × timeout_s | controller/updates.py |

The controller waits twice as long because trainers that are alive report the end of their own limit; its limit passes
only if one is dead.

Over NCCL a rank has one message of a link on its way at most, and posts the next when it has seen that one arrive: a
link has one communicator, and that has one stream. A GPU holds the work of all its streams in a few queues, and a
second message that waited there for the first could hold up the all-reduce of a training step, which another rank needs
before it gets to the message for which everybody waits. gloo has no such queues; there a pair has as many messages on
their way as there are buffers for them. Both ends go through their messages in the plan's one order and wait for
earlier ones only, so the earliest message that has not arrived is never held up.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor

from areal_megatron.errors import first_line
from areal_megatron.reshard.carriers.streams import KEYS, Dialer, Listener, RemoteKeys, Stream, Streams, serve_keys
from areal_megatron.reshard.plan import Bucket, Plan

POLL_S = (0.001, 0.005)
"""The pause between two looks at the store: the first, and the longest, to which it grows."""
POLL_S_PER_RANK = 0.001
"""The longest pause for each rank of a link, if that is more: all ranks of all links look at the same store, and a look
takes 36 µs of it."""

_NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""With these, torch's watchdog aborts a link's group when a peer dies, and no more. By default it ends the process: at
once, or some minutes later if a dump of what hangs is asked for, or if its monitor sees no progress
(ProcessGroupNCCL.cpp). The last one silences a warning that messages wait for each other, as here they should."""
_nccl_settings = threading.Lock()
_NCCL_BLOCKS = 2, 4
"""The fewest and the most thread blocks of a message on the GPU, which its computation lacks for so long."""
_LOOK_AT_GPU_S = 0.0001
"""The pause between two looks whether a message on the GPU has arrived. torch's own wait looks every millisecond."""

_WIRES = 2
"""Buffers of the host for each peer: one is copied to or from while the other is on its way."""

_FIRST_TAG = 2**20
"""Tags below it are the numbers of buckets."""

GLOO_TRIES = 5
"""How often gloo waits for a peer that does not connect before it gives up."""


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

    def trainer(self, rank: int) -> int | None:
        """Returns the number of a trainer rank among the members, or None if it sends nothing."""
        return self.senders.index(rank) if rank in self.senders else None

    def engine(self, rank: int) -> int:
        """Returns the number of an engine rank among the members."""
        return len(self.senders) + rank

    def name(self, member: int) -> str:
        """Returns what a member is called in messages."""
        sends = member < len(self.senders)
        return f"trainer rank {self.senders[member]}" if sends else f"engine rank {member - len(self.senders)}"


class Link:
    """One rank's end of a link. Every rank of both sides may use the store; messages need `join` and, from update to
    update, `meet`.

    One thread at a time may use it, but any thread may call `say_failed` and `failure`.
    """

    def __init__(
        self,
        *,
        engine: int,
        generation: int,
        store: str,
        device: torch.device,
        timeout_s: float,
        through_host: bool = False,
        site: Dialer | Listener | None = None,
    ):
        """`site`: how the ends of a link between two sites connect; only the trainers' end then needs the store."""
        self.name = f"link to engine {engine}, generation {generation}"
        self.device, self._timeout_s, self._site = device, timeout_s, site
        self._through_host = through_host or (site is not None and device.type != "cpu")
        self._site_name = f"{store} {engine}/{generation}"
        if isinstance(site, Listener):
            site.begin(self._site_name)
            self._keys = RemoteKeys(functools.partial(site.take, self._site_name, KEYS), timeout_s)
        else:
            self._keys = dist.PrefixStore(f"link/{engine}/{generation}", connect(store, timeout_s))
        self._served: list[Stream] = []
        self._lost_rank = ""
        self._group: dist.Backend | Streams | None = None
        self._longest_pause_s = POLL_S[1]
        self._stream: torch.Stream | None = None
        self._under_way: dict[int, deque[Message]] = defaultdict(deque)
        """The messages of each stream that this rank has not seen arrive, the oldest first."""
        self._wires: dict[int, deque[Tensor]] = defaultdict(deque)
        """Buffers of the host for each peer, used in turns."""
        self._told: Counter[int] = Counter()
        """Messages to or from each peer that the plan does not know of."""

    @property
    def uses_nccl(self) -> bool:
        return self.device.type != "cpu" and not self._through_host and self._site is None

    @property
    def _most(self) -> float:
        """How many messages may be on their way: over NCCL of this rank, over gloo between a pair."""
        return 1 if self.uses_nccl else _WIRES if self._through_host else inf

    def join(self, members: Members, member: int) -> None:
        """Makes this rank member number `member`, one of those that exchange messages. Raises LinkError."""
        self._members, self._member = members, member
        self._agree_on_library(members.name(member))
        self._longest_pause_s = max(POLL_S[1], POLL_S_PER_RANK * len(members))
        if self.device.type != "cpu":
            self._stream = torch.get_device_module(self.device).Stream(self.device)
        if self._site is not None:
            self._group = Streams(self._open_stream, self._timeout_s)
        elif not self.uses_nccl:
            pairs = dist.PrefixStore("pairs", self._keys)
            self._group = _gloo_group(pairs, member, len(members), self._timeout_s)

    def serve(self, engine_ranks: int) -> None:
        """Has the ranks of an engine at another site use the keys; for one of the trainer ranks. Raises LinkError."""
        if not isinstance(self._site, Dialer):
            return
        deadline = time.monotonic() + self._timeout_s
        for rank in range(engine_ranks):
            try:
                stream = self._site.dial(rank, self._site_name, KEYS, deadline)
            except OSError as e:
                raise LinkError(f"{self.name}: {first_line(e)}") from None
            self._served.append(stream)
            serve_keys(stream, self._keys, functools.partial(self._lose, rank))

    def _lose(self, rank: int, reason: str) -> None:
        """An engine rank at another site can tell nothing any more."""
        self._lost_rank = self._lost_rank or f"{self.name}: lost engine rank {rank}: {reason}"

    def _open_stream(self, peer: int, until: float) -> Stream:
        """Returns the stream to or from a member. Raises OSError."""
        sender = f"member {self._member if isinstance(self._site, Dialer) else peer}"
        if isinstance(self._site, Listener):
            return self._site.take(self._site_name, sender, until)
        return self._site.dial(peer - len(self._members.senders), self._site_name, sender, until)

    def meet(self, deadline: Deadline, *, update: int, stop: Callable[[], None]) -> None:
        """Connects all members over NCCL, once in a generation; gloo connects a pair at its first message.

        What torch would wait for in the store without a deadline, and with every other link of the process waiting
        behind it, is waited for here as in `wait`. Raises LinkError.
        """
        if not self.uses_nccl or self._group:
            return
        self.say(f"member/{self._member}", "")
        here = {f"member/{number}": f"member {number} to connect" for number in range(len(self._members))}
        self.wait(here, deadline, update=update, stop=stop)

        def wait_for(key: str) -> None:
            self.wait({f"pairs/{key}": f"NCCL's {key} of member 0"}, deadline, update=update, stop=stop)

        self._pairs = _PolledStore(dist.PrefixStore("pairs", self._keys), wait_for)
        self._group = _nccl_group(self._pairs, self._member, len(self._members), self._timeout_s)
        try:
            self._group.eager_connect_single_device(self.device)
        except RuntimeError as e:
            raise LinkError(f"{self.name}: cannot connect over NCCL: {first_line(e)}") from None

    def _agree_on_library(self, who: str) -> None:
        """Raises LinkError, after telling the other ranks, if this rank's library is not that of the first to join. Two
        versions of NCCL do not connect, and the reason is in NCCL's own log at most."""
        mine = library() if self.uses_nccl else "gloo" if self._site is None else "TLS"
        try:
            theirs, _, other = self._keys.compare_set("library", "", f"{mine} of {who}").decode().partition(" of ")
        except RuntimeError as e:
            raise LinkError(self._lost(e)) from None
        if theirs != mine:
            reason = (
                f"{self.name}: {who} has {mine}, but {other} has {theirs}; install the same torch and nvidia-nccl for "
                "trainers and engines (docs/operations.md)"
            )
            raise LinkError(self.say_failed(1, reason))

    def stream(self) -> contextlib.AbstractContextManager:
        """Returns a context in which copies and messages run on a stream of the link, beside training or generation."""
        return torch.get_device_module(self.device).stream(self._stream) if self._stream else contextlib.nullcontext()

    def settle(self) -> None:
        """Returns when everything issued on the link's stream is done."""
        if self._stream:
            self._stream.synchronize()

    def abort(self) -> None:
        """Ends messages on the GPU, and those of streams, that no peer will send or take; the link is unusable then.
        gloo's end by themselves, at their timeout."""
        self.close()
        if self.uses_nccl and self._group:
            with contextlib.suppress(RuntimeError):  # the group may have failed already
                self._group.abort()

    def close(self) -> None:
        """Ends the streams of a link between two sites. Any thread may call it."""
        for stream in self._served:
            stream.end()
        for carrier in (self._group, self._keys):
            if isinstance(carrier, (Streams, RemoteKeys)):
                carrier.end()

    def say(self, key: str, text: str) -> None:
        """Sets a key of the link for all its ranks."""
        try:
            self._keys.set(key, text)
        except RuntimeError as e:
            raise LinkError(self._lost(e)) from None

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

    def wait(self, keys: Mapping[str, str], deadline: Deadline, *, update: int, stop: Callable[[], None]) -> list[str]:
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
            return [value.decode() for value in self._keys.multi_get(names)]
        except dist.DistError as e:
            raise LinkError(self._lost(e)) from None

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
        self._make_room(peer, deadline)
        if self._through_host:
            wire = self._wire(peer, flat)  # filled while the message before is still on its way
            wire.copy_(flat, non_blocking=True)
            self.settle()
            flat = wire
        return self._begin(peer, Message(self, f"send {what}", lambda: self._group.send([flat], peer, tag)))

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
        place, deliver = flat, None
        self._make_room(peer, deadline)
        if self._through_host:
            self.settle()  # what this buffer held may still be on its way to its place
            flat = self._wire(peer, place)
            deliver = functools.partial(place.copy_, flat, non_blocking=True)
        message = Message(self, f"receive {what}", lambda: self._group.recv([flat], peer, tag), deliver)
        return self._begin(peer, message)

    def _next_tag(self, peer: int) -> int:
        """Returns the tag of the next message that the plan does not know of; both ends count them."""
        self._told[peer] += 1
        return _FIRST_TAG + self._told[peer]

    def _make_room(self, peer: int, deadline: Deadline) -> None:
        """Waits until another message to or from `peer` may be posted."""
        posted = self._under_way[0 if self.uses_nccl else peer]
        while posted and (posted[0].is_over or len(posted) >= self._most):
            posted.popleft().wait(deadline)

    def _begin(self, peer: int, message: Message) -> Message:
        self._under_way[0 if self.uses_nccl else peer].append(message)
        return message

    def _wire(self, peer: int, flat: Tensor) -> Tensor:
        """Returns the buffer of the host that was not used for longest, as a tensor like `flat`."""
        turns = self._wires[peer]
        wire = turns.popleft() if len(turns) == _WIRES else torch.empty(0, dtype=torch.uint8)
        if wire.nbytes < flat.nbytes:
            wire = torch.empty(flat.nbytes, dtype=torch.uint8, pin_memory=self.device.type != "cpu")
        turns.append(wire)
        return wire[: flat.nbytes].view(flat.dtype)


class Message:
    """A message that is on its way, sent or received. Raises LinkError if it cannot be issued.

    `deliver` copies what was received from a buffer of the link to its place, on the link's stream.
    """

    def __init__(
        self, link: Link, what: str, issue: Callable[[], dist.Work], deliver: Callable[[], object] | None = None
    ):
        self._what, self._on_gpu, self._deliver = f"{link.name}: {what}", link.uses_nccl, deliver
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
            # torch's wait puts one into the GPU's queues first, which holds up what comes after it there until the
            # message has arrived.
            while self._on_gpu and not self._work.is_completed() and not deadline.passed:
                time.sleep(_LOOK_AT_GPU_S)
            self._work.wait(deadline.left)
        except RuntimeError as e:
            raise LinkError(f"{self._what}: {first_line(e)}") from None
        if self._deliver:
            self._deliver()
        self.is_over = True


def library() -> str:
    """Returns NCCL's name and version."""
    version = ctypes.c_int()
    try:  # the one that torch has loaded, which need not be the one whose headers it was built with
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(version))
    except OSError:  # NCCL is part of torch's own library
        return "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
    major, rest = divmod(version.value, 10_000)
    return f"NCCL {major}.{rest // 100}.{rest % 100}"


def _gloo_group(store: dist.Store, member: int, members: int, timeout_s: float) -> dist.Backend:
    options = dist.ProcessGroupGloo._Options()
    # for one attempt to connect; messages have deadlines of their own
    options._timeout = timedelta(seconds=timeout_s) / GLOO_TRIES
    options._threads = 2
    # Lazy: only pairs that exchange messages connect, and no rank waits for another to make the group.
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")  # torch heeds it only where it makes the devices itself
    make = functools.partial(dist.ProcessGroupGloo.create_device, lazy_init=True)
    options._devices = [make(interface=name) for name in interfaces.split(",") if name] or [
        dist.ProcessGroupGloo.create_default_device(lazy_init=True)
    ]
    return dist.ProcessGroupGloo(store, member, members, options)


def _nccl_group(store: dist.Store, member: int, members: int, timeout_s: float) -> dist.Backend:
    """Returns a group that has one communicator once `eager_connect_single_device` was called, which every member must.

    Otherwise torch would make one for each pair that exchanges messages (ProcessGroupNCCL::pointToPoint), with buffers
    of its own on both GPUs.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.config.blocking = 1
    options.config.min_ctas, options.config.max_ctas = _NCCL_BLOCKS
    # A pool of streams that nothing else draws from, so that no message shares a stream with training or generation.
    # torch deals its 32 streams in turns: two groups of a process share one if 31 others were made between them.
    options.is_high_priority_stream = True
    with _nccl_settings:
        before = {name: os.environ.get(name) for name in _NCCL_SETTINGS}
        os.environ.update(_NCCL_SETTINGS)
        try:
            return dist.ProcessGroupNCCL(store, member, members, options)  # reads the settings here only
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


class _PolledStore(dist.Store):
    """A store for torch that never waits inside torch: a TCPStore that waits for a key keeps all threads of the process
    from using it. `wait` is called with each key that is asked for; it returns when the key is set, or raises."""

    def __init__(self, keys: dist.Store, wait: Callable[[str], None]):
        super().__init__()
        self._keys, self._wait = keys, wait

    def set(self, key: str, value: bytes) -> None:
        self._keys.set(key, value)

    def get(self, key: str) -> bytes:
        self._wait(key)
        return self._keys.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._keys.check(keys)


def _describe(bucket: Bucket) -> str:
    return (
        f"bucket {bucket.number} ({bucket.transfers[0].send.tensor} …) of trainer rank {bucket.source} "
        f"for engine rank {bucket.destination}"
    )
