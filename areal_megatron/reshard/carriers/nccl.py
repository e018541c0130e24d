"""Messages between GPUs, by NCCL; all members connect at the first update of a generation.

A GPU holds the work of all its streams in a few queues, and a message that waits there for its other end holds up what
is behind it, such as the all-reduce of a training step (run/gpu_settings.py). Another rank may need this all-reduce
before it gets to the message for which everybody waits. So

- a rank has one message of a link on its way at most, and posts the next when it has seen that one arrive;
- the engine rank posts its receive once the trainer rank has turned to this message, and the trainer rank posts the
  message after that; both say so over TCP (tcp.py). Until then it takes nothing of either GPU;
- of all its links together a rank sends eight messages at once, since each takes up to four blocks of the GPU from
  training. The receives of others that it has turned to wait on their engines' GPUs.

NCCL connects two members inside their first call for each other, which returns once both have made it. So a pair first
exchanges one element, after the same words. NCCL takes so little off the trainer's GPU before it is received.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist
from torch import Tensor

from areal_megatron.process.errors import first_line
from areal_megatron.reshard.carriers.base import Carrier, Deadline, LinkEnd, LinkError, Members
from areal_megatron.reshard.carriers.tcp import Tcp
from areal_megatron.run.gpu_settings import WATCHDOG

SETTINGS = WATCHDOG | {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""With these, torch's watchdog aborts a link's group when a peer dies, and no more; the process's own environment must
have WATCHDOG too. The last one silences a warning that messages wait for each other, as here they should."""
_GIVEN_UP = "the link was given up"
_READY = torch.empty(0)
"""Says by its tag alone that a trainer rank has turned to a message, or that an engine rank has posted its receive."""
_settings = threading.Lock()
_BLOCKS = 2, 4
"""The fewest and the most thread blocks of a message on the GPU, which its computation lacks for so long."""
_sends = threading.Semaphore(8)
"""How many messages a rank may send at once, of all its links."""
_ENTER_S = 0.1
"""The longest pause between two looks whether a message that waits for this was given up."""
_LOOK_S = 0.0001, 0.001
"""The pause between two looks whether a message on the GPU has arrived: the first, and the longest, to which it grows.
A rank has a thread for each of its links, and none of them can look while another thread launches training's work."""


class Nccl(Carrier):
    """A communicator of the link's own."""

    most_under_way = 1
    _over = False

    def __init__(self, end: LinkEnd):
        super().__init__(end)
        self._words = Tcp(end)
        self._connected: set[int] = set()
        self._entered: list[None] = []
        """Has an element while a message of this link is one of `_sends`."""

    @property
    def library(self) -> str:
        return library()

    def join(self, keys: dist.Store, members: Members, member: int) -> None:
        self._keys, self._members, self._member = keys, len(members), member
        self._words.join(keys, members, member)

    def meet(self, wait: Callable[[Mapping[str, str]], object]) -> None:
        """Connects all members, once in a generation.

        What torch would wait for in the store without a deadline, and with every other link of the process waiting
        behind it, is waited for here by `wait`.
        """
        if self.group:
            return
        if self._over:
            raise LinkError(f"{self.end.name}: {_GIVEN_UP}")
        self._keys.set(f"member/{self._member}", "")
        wait({f"member/{number}": f"member {number} to connect" for number in range(self._members)})
        self._pairs = _PolledStore(
            dist.PrefixStore("pairs", self._keys), lambda key: wait({f"pairs/{key}": f"NCCL's {key} of member 0"})
        )
        self.group = _group(self._pairs, self._member, self._members, self.end.timeout_s)
        try:
            self.group.eager_connect_single_device(self.end.device)
        except RuntimeError as e:
            raise LinkError(f"{self.end.name}: cannot connect over NCCL: {first_line(e)}") from None

    def queue(self, peer: int) -> int:
        return 0

    def send(self, flat: Tensor, peer: int, tag: int, deadline: Deadline) -> dist.Work:
        if peer not in self._connected:
            self._turn_to(peer, tag, deadline)
            self.wait(self._live().send([self._one()], peer, tag), deadline)
            self._connected.add(peer)
        self._turn_to(peer, tag, deadline)
        self._enter(deadline)
        try:
            return self._live().send([flat], peer, tag)
        except RuntimeError:
            self._leave()
            raise

    def _turn_to(self, peer: int, tag: int, deadline: Deadline) -> None:
        self._say(peer, tag, deadline)
        self._hear(peer, tag, deadline)

    def _say(self, peer: int, tag: int, deadline: Deadline) -> None:
        self._words.wait(self._words.send(_READY, peer, tag, deadline), deadline)

    def _hear(self, peer: int, tag: int, deadline: Deadline) -> None:
        self._words.wait(self._words.receive(_READY, peer, tag, deadline), deadline)

    def _enter(self, deadline: Deadline) -> None:
        while not _sends.acquire(timeout=_ENTER_S):
            _check(deadline)
        self._entered.append(None)

    def _leave(self) -> None:
        with contextlib.suppress(IndexError):  # it has left, or receives
            self._entered.pop()
            _sends.release()

    def receive(self, flat: Tensor, peer: int, tag: int, deadline: Deadline) -> dist.Work:
        self._hear(peer, tag, deadline)
        if peer not in self._connected:
            self._say(peer, tag, deadline)  # before the call, which waits for the sender's
            self.wait(self._live().recv([self._one()], peer, tag), deadline)
            self._connected.add(peer)
            self._hear(peer, tag, deadline)
        work = self._live().recv([flat], peer, tag)
        self._say(peer, tag, deadline)
        return work

    def _one(self) -> Tensor:
        return torch.zeros(1, device=self.end.device)

    def _live(self) -> Any:  # of a ProcessGroupNCCL torch's stubs know neither send nor recv
        group = self.group
        if group is None:
            raise RuntimeError(_GIVEN_UP)
        return group

    def wait(self, work: dist.Work, deadline: Deadline) -> None:
        # torch's wait puts one into the GPU's queues first, which holds up what comes after it there until the message
        # has arrived; and at its timeout it would end the communicator itself, which may take long.
        pause, longest = _LOOK_S
        try:
            while not work.is_completed():
                _check(deadline)
                time.sleep(pause)
                pause = min(2 * pause, longest)
            work.wait(deadline.left)
        finally:
            self._leave()

    def abort(self) -> None:
        """Ends the group in the background: NCCL waits for the GPU and for threads of its own, and the group's
        destructor, which a collection of garbage could call on any thread, for torch's watchdog."""
        self._over = True
        self._words.abort()
        held, self.group = [self.group], None
        self._leave()
        if held[0]:
            threading.Thread(target=_end, args=(held,), name=f"end-{self.end.name}", daemon=True).start()

    def close(self) -> None:
        self._words.close()


def _check(deadline: Deadline) -> None:
    if deadline.passed:
        raise RuntimeError(f"not over by the deadline of {deadline.timeout_s:.0f} s, or given up before")


def _end(held: list[dist.ProcessGroupNCCL]) -> None:
    """Ends the group in `held`, to which nothing else refers any more."""
    group = held.pop()
    with contextlib.suppress(RuntimeError):  # the group may have failed already
        group.abort()


def library() -> str:
    """Returns NCCL's name and version."""
    version = ctypes.c_int()
    try:  # the one that torch has loaded, which need not be the one whose headers it was built with
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(version))
    except OSError:  # NCCL is part of torch's own library
        return "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
    major, rest = divmod(version.value, 10_000)
    return f"NCCL {major}.{rest // 100}.{rest % 100}"


def _group(store: dist.Store, member: int, members: int, timeout_s: float) -> dist.ProcessGroupNCCL:
    """Returns a group that has one communicator once `eager_connect_single_device` was called, which every member must.

    Otherwise torch would make one for each pair that exchanges messages (ProcessGroupNCCL::pointToPoint), with buffers
    of its own on both GPUs.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.config.blocking = 1
    options.config.min_ctas, options.config.max_ctas = _BLOCKS
    # A pool of streams that nothing else draws from, so that no message shares a stream with training or generation.
    # torch deals its 32 streams in turns: two groups of a process share one if 31 others were made between them.
    options.is_high_priority_stream = True
    with _settings:
        before = {name: os.environ.get(name) for name in SETTINGS}
        os.environ.update(SETTINGS)
        try:
            return dist.ProcessGroupNCCL(store, member, members, options)  # reads the settings here only
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


class _PolledStore(dist.Store):
    """A store for torch that never waits inside torch: a TCPStore that waits for a key keeps all threads of the process
    from using it. `wait` is called with each key that is asked for; it returns when the key is set, or raises."""

    def __init__(self, keys: dist.Store, wait: Callable[[str], object]):
        super().__init__()
        self._keys, self._wait = keys, wait

    def set(self, key: str, value: Any) -> None:  # bytes, where torch's stub says str
        self._keys.set(key, value)

    def get(self, key: str) -> bytes:
        self._wait(key)
        return self._keys.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._keys.check(keys)
