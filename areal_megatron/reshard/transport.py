"""One link: the trainer ranks and the ranks of one engine, for one generation.

Weights travel over a process group of the link's own (gloo between CPUs, NCCL between GPUs). What the ranks have to
tell each other they write under keys of the trainers' TCPStore, with a prefix of the link's own:

| key | set by | value |
|---|---|---|
| library | the first rank of either side that joined | what carries its messages, and who it is |
| ready/N/R | engine rank R | digest of the plan it follows; it waits for update N |
| sending/N/S | trainer rank S | its first message of update N is on its way |
| sent/N/S | trainer rank S | it read every parameter before any could change |
| received/N/R | engine rank R | bytes received; staging holds the update |
| failed/N | the first rank of either side that failed | why |

N counts the updates of a generation from 1. A group in which anything failed is never used again: gloo's pairs
are unusable after a timeout, so the controller gives the link a new generation.

`reshard.timeout_s` is how long one update may take. Every limit of an update is derived from it:

| limit | value | set in |
|---|---|---|
| a trainer rank, from `publish` until its last message is sent; rank 0, until all have arrived | timeout_s | publish |
| an optimizer step that waits until the parameters have been read | timeout_s + 1 s | publish.Transmission |
| an engine rank, from /start_weight_update until it has its last message | timeout_s | staging.Reception |
| connecting to the store; an operation of an NCCL group | timeout_s | `connect`, `_process_group` |
| one attempt of gloo to connect a pair of ranks; it makes GLOO_TRIES | timeout_s / GLOO_TRIES | `_process_group` |
| the controller, which waits for the trainers' report | 2 × timeout_s | controller/updates.py |

The controller waits twice as long because trainers that are alive report the end of their own limit; its limit passes
only if one is dead.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from areal_megatron.errors import first_line
from areal_megatron.reshard.plan import Bucket

POLL_S = (0.001, 0.005)
"""The pause between two looks at the store: the first, and the longest, to which it grows."""
POLL_S_PER_RANK = 0.001
"""The longest pause for each rank of a link, if that is more: all ranks of all links look at the same store, and a look
takes 36 µs of it."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → an integer dtype of that size."""

_NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""With these, torch's watchdog aborts a link's group when a peer dies, and no more. By default it ends the process: at
once, or some minutes later if a dump of what hangs is asked for (ProcessGroupNCCL.cpp)."""
_nccl_settings = threading.Lock()

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


class Link:
    """One rank's end of a link. The trainer ranks come first; rank R of the engine is rank `trainers` + R of the link.

    One thread at a time may use it, but any thread may call `say_failed` and `failure`.
    """

    def __init__(
        self,
        *,
        engine: int,
        generation: int,
        rank: int,
        trainers: int,
        engine_ranks: int,
        store: str,
        device: torch.device,
        timeout_s: float,
    ):
        self.name = f"link to engine {engine}, generation {generation}"
        self.device = device
        prefix = f"link/{engine}/{generation}"
        self._keys = dist.PrefixStore(prefix, connect(store, timeout_s))
        pairs = dist.PrefixStore("pairs", self._keys)
        ranks = trainers + engine_ranks
        self._agree_on_library(f"trainer rank {rank}" if rank < trainers else f"engine rank {rank - trainers}")
        self._group = _process_group(pairs, rank, ranks, device, timeout_s)
        self._longest_pause_s = max(POLL_S[1], POLL_S_PER_RANK * ranks)
        self._stream = torch.get_device_module(device).Stream(device) if device.type != "cpu" else None

    def _agree_on_library(self, who: str) -> None:
        """Raises LinkError, after telling the other ranks, if this rank's library is not that of the first to join. Two
        versions of NCCL do not connect, and the reason is in NCCL's own log at most."""
        mine = library(self.device)
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
        """Ends messages on the GPU that no peer will send or take; the link is unusable then. gloo's end by themselves,
        at their timeout."""
        if self._stream:
            with contextlib.suppress(RuntimeError):  # the group may have failed already
                self._group.abort()

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
            return self._keys.get(key).decode() if self._keys.check([key]) else ""
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

    def send(self, flat: Tensor, peer: int, bucket: Bucket) -> Message:
        return Message(self, f"send {_describe(bucket)}", lambda: self._group.send([flat], peer, bucket.number))

    def receive(self, flat: Tensor, peer: int, bucket: Bucket) -> Message:
        return Message(self, f"receive {_describe(bucket)}", lambda: self._group.recv([flat], peer, bucket.number))


class Message:
    """A message that is on its way, sent or received. Raises LinkError if it cannot be issued."""

    def __init__(self, link: Link, what: str, issue: Callable[[], dist.Work]):
        self._what = f"{link.name}: {what}"
        try:
            self._work = issue()
        except RuntimeError as e:
            raise LinkError(f"{self._what}: {first_line(e)}") from None

    def wait(self, deadline: Deadline) -> None:
        """Returns when the buffer may be used again. Raises LinkError, after which the link is unusable."""
        try:
            self._work.wait(deadline.left)
        except RuntimeError as e:
            raise LinkError(f"{self._what}: {first_line(e)}") from None


Copies = tuple[list[Tensor], list[Tensor]] | tuple[list[np.ndarray], list[np.ndarray]]
"""Views into parameters, and views of the same shapes into a message: arrays on a CPU if no element need be cast."""


def bind(pieces: Iterable, parameters: Mapping[str, Tensor], flat: Tensor) -> Copies:
    """Returns views of `pieces` in their parameters, and of their places in the message `flat`, one after another."""
    held, packed, offset = [], [], 0
    for piece in pieces:
        views = list(piece.views(parameters))
        held += views
        packed += flat[offset : offset + piece.box.size].view(len(views), *views[0].shape).unbind()
        offset += piece.box.size
    if flat.device.type == "cpu" and all(view.dtype == flat.dtype for view in held):
        return [_array(view) for view in held], [_array(place) for place in packed]
    return held, packed


def pack(copies: Copies) -> None:
    """Copies parameters into the message, cast to its dtype."""
    held, packed = copies
    _copy(packed, held)


def unpack(copies: Copies) -> None:
    """Copies the message into the parameters."""
    held, packed = copies
    _copy(held, packed)


def _array(view: Tensor) -> np.ndarray:
    """Returns the same memory as integers, because numpy has no bfloat16."""
    return view.detach().view(_INTEGERS[view.dtype.itemsize]).numpy()


@torch.no_grad()
def _copy(targets: list, sources: list) -> None:
    if targets and isinstance(targets[0], np.ndarray):
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)  # memcpy, which may go past the caches (launch/orders.py); torch's copy does not
    else:
        torch._foreach_copy_(targets, sources)


def library(device: torch.device) -> str:
    """Returns what carries messages between devices of this kind: "gloo", or NCCL with its version."""
    if device.type == "cpu":
        return "gloo"
    version = ctypes.c_int()
    try:  # the one that torch has loaded, which need not be the one whose headers it was built with
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(version))
    except OSError:  # NCCL is part of torch's own library
        return "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
    major, rest = divmod(version.value, 10_000)
    return f"NCCL {major}.{rest // 100}.{rest % 100}"


def _process_group(store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float):
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cpu":
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout / GLOO_TRIES  # for one attempt to connect; messages have deadlines of their own
        options._threads = 2
        # Lazy: only pairs that exchange messages connect, and no rank waits for another to make the group.
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")  # torch heeds it only where it makes the devices itself
        make = functools.partial(dist.ProcessGroupGloo.create_device, lazy_init=True)
        options._devices = [make(interface=name) for name in interfaces.split(",") if name] or [
            dist.ProcessGroupGloo.create_default_device(lazy_init=True)
        ]
        return dist.ProcessGroupGloo(store, rank, size, options)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    with _nccl_settings:
        before = {name: os.environ.get(name) for name in _NCCL_SETTINGS}
        os.environ.update(_NCCL_SETTINGS)
        try:
            return dist.ProcessGroupNCCL(store, rank, size, options)  # reads the settings here only
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def _describe(bucket: Bucket) -> str:
    return (
        f"bucket {bucket.number} ({bucket.transfers[0].send.tensor} …) of trainer rank {bucket.source} "
        f"for engine rank {bucket.destination}"
    )
