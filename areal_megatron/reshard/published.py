"""A trainer rank's last published weights, to find the changes since, and to decide whether to send only these."""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from areal_megatron.reshard.changes import Changes, bits, decode, encode, find, merge
from areal_megatron.reshard.session import HISTORY, HOST_BLOCK

_ALIGNED = 64
"""Every part of a block begins at a multiple of this many bytes."""
_REST = 16
"""For how many versions a message is sent in full, and nobody looks for changes in it, after they did not pay."""
_TRIALS = 3
"""How often a look is timed before one is worth while: the first also meets memory that nobody has used."""


class HostMemory:
    """Memory of the host, from and to which a device copies quickly if it is `pinned`, given out for good.

    torch takes a power of two for every pinned tensor, up to twice what was asked for; a block is one already.
    """

    def __init__(self, pinned: bool, block: int = HOST_BLOCK):
        self._pinned, self._size = pinned, block
        self._lock = threading.Lock()
        self._blocks: list[Tensor] = []
        """What is left of each block."""

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Returns a flat tensor in the first block that has room."""
        size = elements * dtype.itemsize
        with self._lock:
            number = next((n for n, left in enumerate(self._blocks) if left.numel() >= size), len(self._blocks))
            if number == len(self._blocks):
                self._blocks.append(torch.empty(max(self._size, size), dtype=torch.uint8, pin_memory=self._pinned))
            left = self._blocks[number]
            self._blocks[number] = left[-(-size // _ALIGNED) * _ALIGNED :]
            return left[:size].view(dtype)


class Looks:
    """Keeps messages in the memory of the host and compares others with them; those on a device one at a time, all on
    one stream, whose memory they use again."""

    def __init__(self) -> None:
        self._blocks = HostMemory(pinned=True)
        self._lock = threading.Lock()
        self._stream: torch.Stream | None = None

    def room(self, flat: Tensor) -> Tensor:
        """Returns memory of the host for a message like `flat`."""
        if flat.device.type == "cpu":
            return torch.empty_like(flat)
        return self._blocks.take(flat.numel(), flat.dtype)

    def find(self, base: Tensor, now: Tensor) -> tuple[Changes, np.ndarray]:
        """Returns what changes.find does."""
        if now.device.type == "cpu":
            return find(base, now)
        device = torch.get_device_module(now.device)
        with self._lock:
            # of high priority: training's work would be in front of it
            self._stream = stream = self._stream or device.Stream(now.device, priority=-1)
            stream.wait_stream(device.current_stream(now.device))
            with device.stream(stream):
                return find(base, now)

    def least_s_per_byte(self, flat: Tensor) -> float:
        """Returns how long a byte of a message like `flat` takes to be looked at where nothing has changed."""
        base, took = torch.empty_like(flat, device="cpu", pin_memory=flat.device.type != "cpu").copy_(flat), []
        for _ in range(_TRIALS):
            begun = time.monotonic()
            self.find(base, flat)
            took.append(time.monotonic() - begun)
        return min(took) / flat.nbytes


class Step(NamedTuple):
    """The changes of a message from one version to the next that was looked at."""

    since: int
    encoded: bytes


class Kept:
    """The bits of one message as they were published last, in the memory of the host, and the latest changes.

    All engines that take the message share this, so it is looked through once a version, however many get it.
    """

    def __init__(self, compress: Callable[[bytes], bytes] | None, looks: Looks | None = None):
        self._compress, self._looks = compress, looks or Looks()
        self._lock = threading.Lock()
        self._base: Tensor | None = None
        self._version = -1
        self._steps: deque[Step] = deque()
        self._merged: dict[int, bytes | None] = {}
        """Version that an engine has → the changes from there to the last version."""
        self.found: int | None = None
        """Bytes of the changes since the last version but one; None: this version was compared with none."""

    def changes(self, flat: Tensor, version: int, since: int | None) -> bytes | None:
        """Keeps the message `flat` of `version`, and returns what has changed in it since version `since`.

        None: the whole message is less, or the changes are not known; `since` is None for an engine of which nothing is
        known. `flat` must not change before this returns.
        """
        with self._lock:
            if version != self._version:
                if self._base is None or (since is not None and since > self._version):
                    self._copy(flat)
                else:
                    self._look(self._base, flat)
                self._version = version
                self._merged.clear()
            if since is None:
                return None
            if since not in self._merged:
                self._merged[since] = self._changes_since(since)
            return self._merged[since]

    @property
    def size(self) -> int:
        """The bytes of the message that is kept; 0 before there is one."""
        return 0 if self._base is None else self._base.nbytes

    def checksum(self) -> int:
        """Returns the CRC-32 of all bits of the message as it was published last."""
        with self._lock:
            assert self._base is not None
            return zlib.crc32(bits(self._base).numpy())

    def _copy(self, flat: Tensor) -> None:
        if self._base is None:
            self._base = self._looks.room(flat)
        self._base.copy_(flat)
        self._steps.clear()
        self.found = None

    def _look(self, base: Tensor, flat: Tensor) -> None:
        changes, values = self._looks.find(base, flat)
        encoded = encode(changes, self._compress)
        bits(base).numpy()[changes.places] = values  # last: what fails before leaves base and version as they are
        self.found = len(encoded)
        size = base.numel() * base.itemsize
        self._steps.append(Step(self._version, encoded))
        if len(encoded) >= size:
            self._steps.clear()
        while sum(len(step.encoded) for step in self._steps) - len(encoded) > size * HISTORY:
            self._steps.popleft()

    def _changes_since(self, version: int) -> bytes | None:
        steps = [step for step in self._steps if step.since >= version]
        if self._base is None or not steps or steps[0].since != version:
            return None
        if len(steps) == 1:
            return steps[0].encoded
        now = bits(self._base).numpy()
        changes, _ = decode(steps[0].encoded, now.size, now.itemsize)
        for step in steps[1:]:
            changes = merge(changes, decode(step.encoded, now.size, now.itemsize)[0], now)
        encoded = encode(changes, self._compress)
        return encoded if len(encoded) < now.nbytes else None


class Publications:
    """What one trainer rank keeps of the messages that it has published."""

    def __init__(self, compress: Callable[[bytes], bytes] | None):
        self._compress, self._looks = compress, Looks()
        self._kept: dict[Hashable, Kept] = {}
        self._lock = threading.Lock()
        self._least_s_per_byte = 0.0

    def kept(self, key: Hashable) -> Kept:
        """Returns what is kept of the message with the elements that `key` names; it is empty at first."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = Kept(self._compress, self._looks)
            return self._kept[key]

    @property
    def size(self) -> int:
        """The bytes of all messages that are kept."""
        with self._lock:
            return sum(kept.size for kept in self._kept.values())

    def least_s_per_byte(self, flat: Tensor) -> float:
        """Returns what Looks.least_s_per_byte does; it is measured once."""
        with self._lock:
            self._least_s_per_byte = self._least_s_per_byte or self._looks.least_s_per_byte(flat)
            return self._least_s_per_byte


class Cost(NamedTuple):
    """What the changes of one message have cost."""

    key: Hashable
    """Which message it is."""
    size: int
    """Bytes of the whole message."""
    encoded: int
    """Bytes of the changes."""


class Choice:
    """Whether one engine gets changes or whole messages: with `auto`, what takes less time by what was measured.

    A message of which the changes did not pay is sent in full for some versions, without a look at what has changed.
    After an update that failed with changes this is so for all: once, and twice as often each time that it fails again.
    Otherwise looks that take longer than an update may would fail every one.
    """

    def __init__(self, update: str):
        self._update = update
        self._second_per_byte = 0.0
        """How long a byte of whole messages is on its way to the engine; 0 before that was measured."""
        self._least_look = 0.0
        """How long a byte is looked at if nothing has changed; 0 before that was measured."""
        self._rests: dict[Hashable, int] = {}
        self._after_failure = 1

    def looks_at(self, key: Hashable) -> bool:
        """Returns whether changes of this message are asked for; called once for each version."""
        if self._update != "auto":
            return self._update == "delta"
        if rest := self._rests.pop(key, 0):
            self._rests |= {key: rest - 1} if rest > 1 else {}
            return False
        return self._second_per_byte > self._least_look

    @property
    def lacks_look(self) -> bool:
        """Whether it is to be told, by `look_takes`, how long looks take."""
        return self._update == "auto" and not self._least_look

    @property
    def lacks_link(self) -> bool:
        """Whether it chooses by measured times, but no whole version has arrived yet."""
        return self._update == "auto" and not self._second_per_byte

    def look_takes(self, second_per_byte: float) -> None:
        """Takes note of how long a byte is looked at if nothing has changed."""
        self._least_look = second_per_byte

    def failed(self, looked_at: Iterable[Hashable]) -> None:
        """Takes note that an update failed in which these messages were looked at."""
        keys = list(looked_at)
        if self._update == "auto" and keys:
            self._rests |= dict.fromkeys(keys, self._after_failure)
            self._after_failure *= 2

    def judge(self, sent: Sequence[Cost], looked_s: float) -> None:
        """Takes note of what the changes of an update have cost, all of which were found in `looked_s` seconds."""
        if sent:
            self._after_failure = 1
        look = looked_s / max(sum(cost.size for cost in sent), 1)  # one message's own time would say little
        for cost in sent:
            if cost.size * look + cost.encoded * self._second_per_byte >= cost.size * self._second_per_byte:
                self._rests[cost.key] = _REST

    def measured(self, size: int, seconds: float) -> None:
        """Takes note of how long `size` bytes of whole messages were on their way."""
        self._second_per_byte = seconds / size
