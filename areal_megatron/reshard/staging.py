"""Where what an engine rank has received of an update waits for its commit; one class for each way.

- `Full`: a second copy of the rank's shard. The engine generates while each message is received into a place of its own
  there; the commit copies them into the live parameters, and a failed update leaves those complete. Changes wait in the
  place of their message: as places and new values or, where that is not less, as the whole message.
- `Streamed`: room for one layer. The engine is paused, and what arrives is written into the live parameters at once, so
  a failed update leaves a mixture of versions.
- `WaitingRoom`: the room of `Streamed`, for an update of which few changes are expected. The engine generates, and all
  that arrives waits in the room, one after another: changes, and the whole messages among them.

The room is reserved once, as `Full` or `Streamed` asks for it. Changes are based on the live parameters, which stay as
they are until then.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from areal_megatron.models.adapter import Adapter
from areal_megatron.reshard.boxes import LayoutError
from areal_megatron.reshard.carriers.base import LinkError
from areal_megatron.reshard.carriers.streams import Listener
from areal_megatron.reshard.changes import bits
from areal_megatron.reshard.copies import Copies, bind, pack, unpack
from areal_megatron.reshard.edits import Edit, Places, Room, move
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.messages import Publication
from areal_megatron.reshard.plan import Bucket, largest_bucket

_EDITED = 1 / 16
"""Changes are written one by one at a commit if they take up to so much of their message's place; above, copying the
whole message is as fast."""
_ALIGNED = 16
"""Messages of any dtype begin at multiples of this many bytes."""
_NO_ROOM = "more changes came than there is room for; next time the engine is paused meanwhile"


@dataclass
class Live:
    """What the live parameters of an engine rank are."""

    publication: Publication | None = None
    """The version that they all have; None: unknown, or a mixture."""
    turn: int = 0
    """Counts updates: at each of them all elements of another message are checked, if it comes as changes."""


@dataclass(frozen=True)
class Arrival:
    """One message of every update of an Inlet."""

    bucket: Bucket
    place: Tensor
    """The part of the staging that receives it."""
    copies: Copies
    """What copies it from there into the live parameters."""
    live: Places
    """Where its elements are in the live parameters."""

    def pack_changed(self, places: np.ndarray, later: np.ndarray) -> None:
        """Puts the message together in its place: from the live parameters, but `later` at `places`."""
        pack(self.copies)
        bits(self.place)[torch.from_numpy(places).to(self.place.device)] = torch.from_numpy(later).to(self.place.device)


class Staging(ABC):
    """What has been received of one update. `stop` is called before live parameters change ahead of the commit; it
    raises if the update was abandoned."""

    def __init__(self, shard: Shard, stop: Callable[[], None]):
        self._shard, self._stop = shard, stop
        self._whole: list[Copies] = []
        """What copies the messages into the live parameters that wait as a whole."""
        self._edits: list[Edit] = []

    def placed(self, arrival: Arrival) -> Arrival:
        """Returns the arrival with the place in which the whole message is to be received. Raises LinkError."""
        return arrival

    def placed_to_check(self, arrival: Arrival) -> Arrival | None:
        """Returns the arrival with a place in which the message may be put together; None if there is none."""
        return arrival

    def take_whole(self, arrival: Arrival) -> None:
        """Takes a message that is in its place."""
        self._whole.append(arrival.copies)

    @abstractmethod
    def take_changes(self, arrival: Arrival, edits: list[Edit], places: np.ndarray, later: np.ndarray) -> None:
        """Takes changes of a message: as edits of the live parameters, and as the bits `later` at `places` of the
        message. Raises LinkError if there is no room for them."""

    def commit(self) -> None:
        """Copies what waits into the live parameters."""
        for copies in self._whole:
            unpack(copies)
        for edit in self._edits:
            edit.write()


class Full(Staging):
    """A second copy of the shard."""

    @staticmethod
    def of_update(few_changes: bool) -> type[Staging]:
        """Returns the staging of an update of which few changes are expected, or of another."""
        return Full

    @staticmethod
    def reserve(parameters: Mapping[str, Tensor], room: float = 0.0) -> Tensor:
        """Returns the room for these parameters: bytes on their device."""
        return _bytes_beside(parameters, sum(parameter.nbytes for parameter in parameters.values()))

    @staticmethod
    def starts(sizes: Sequence[int], itemsizes: Sequence[int], order: Sequence[int], room: int) -> list[int]:
        """Returns where messages of these `sizes` begin in the room, all in bytes; they arrive in `order`."""
        starts, offset = [0] * len(sizes), 0
        # the widest elements first, so that all begin at multiples of their size
        for number in sorted(range(len(sizes)), key=lambda n: -itemsizes[n]):
            starts[number] = offset
            offset += sizes[number]
        return starts

    def take_changes(self, arrival: Arrival, edits: list[Edit], places: np.ndarray, later: np.ndarray) -> None:
        start, size = int(arrival.place.storage_offset()) * arrival.place.itemsize, int(arrival.place.nbytes)
        moved = move(edits, Room(self._shard.staging, start, start + int(size * _EDITED)))
        if moved is not None:
            self._edits += moved
        else:
            arrival.pack_changed(places, later)
            self.take_whole(arrival)


class Streamed(Staging):
    """Room for one layer, and for two messages, in which these take turns."""

    @staticmethod
    def of_update(few_changes: bool) -> type[Staging]:
        return WaitingRoom if few_changes else Streamed

    @staticmethod
    def reserve(parameters: Mapping[str, Tensor], room: float = 0.0) -> Tensor:
        """Returns at least the share `room` of the parameters' bytes."""
        first = next(iter(parameters.values()))
        layers: dict[str, int] = defaultdict(int)
        for name, parameter in parameters.items():
            layers[re.sub(r"(layers\.\d+\.).*", r"\1", name)] += parameter.nbytes
        size = sum(layers.values())
        buckets = 2 * largest_bucket(first.device.type != "cpu") * first.itemsize
        return _bytes_beside(parameters, min(size, max(*layers.values(), buckets, int(size * room))))

    @staticmethod
    def starts(sizes: Sequence[int], itemsizes: Sequence[int], order: Sequence[int], room: int) -> list[int]:
        """Raises LayoutError if the room is less than a message."""
        largest = -(-max(sizes, default=1) // _ALIGNED) * _ALIGNED
        places = room // largest
        if sizes and not places:
            raise LayoutError(f"staging of {room} bytes has no room for a message of {largest} bytes")
        turns = {number: turn for turn, number in enumerate(order)}
        return [turns[number] % places * largest for number in range(len(sizes))]

    def take_whole(self, arrival: Arrival) -> None:
        self._begin_to_write()
        unpack(arrival.copies)

    def take_changes(self, arrival: Arrival, edits: list[Edit], places: np.ndarray, later: np.ndarray) -> None:
        self._begin_to_write()
        for edit in edits:
            edit.write()

    def _begin_to_write(self) -> None:
        self._stop()
        self._shard.live.publication = None


class WaitingRoom(Staging):
    """The room of `Streamed`, given out from the front."""

    def __init__(self, shard: Shard, stop: Callable[[], None]):
        super().__init__(shard, stop)
        self._room = Room(shard.staging, 0, shard.staging.nbytes)

    def placed(self, arrival: Arrival) -> Arrival:
        place = self._room.place(arrival.place.numel(), arrival.place.dtype)
        if place is None:
            raise LinkError(_NO_ROOM)
        return self._shard.moved(arrival, place)

    def placed_to_check(self, arrival: Arrival) -> Arrival | None:
        place = self._room.rest(arrival.place.numel(), arrival.place.dtype)
        return None if place is None else self._shard.moved(arrival, place)

    def take_changes(self, arrival: Arrival, edits: list[Edit], places: np.ndarray, later: np.ndarray) -> None:
        moved = move(edits, self._room)
        if moved is None:
            raise LinkError(_NO_ROOM)
        self._edits += moved


def _bytes_beside(parameters: Mapping[str, Tensor], size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=next(iter(parameters.values())).device)


@dataclass(frozen=True)
class Shard:
    """The parameters of engine rank `rank`, and staging for what it receives."""

    parameters: Mapping[str, Tensor]
    """The live parameters by vLLM's names."""
    staging: Tensor
    """What `kind.reserve` returns."""
    sizes: EngineSizes
    rank: int
    kind: type[Full] | type[Streamed] = Full
    repack: Callable[[], None] = lambda: None
    """Called at the end of a commit: updates what vLLM has derived from the parameters."""
    live: Live = field(default_factory=Live)
    site: Listener | None = None
    """Where trainers of another site reach the rank."""
    adapter: Adapter | None = None
    """The adapter of which the parameters are."""

    def arrivals(self, buckets: Sequence[Bucket], order: Sequence[int], dtype: torch.dtype) -> list[Arrival]:
        """Returns the arrivals of the messages that the rank receives in `order`; `dtype` is of those that have none of
        their own. Raises LayoutError if there is no room for them."""
        dtypes = [getattr(torch, bucket.dtype) if bucket.dtype else dtype for bucket in buckets]
        itemsizes = [dtype.itemsize for dtype in dtypes]
        sizes = [bucket.elements * itemsize for bucket, itemsize in zip(buckets, itemsizes, strict=True)]
        starts = self.kind.starts(sizes, itemsizes, order, self.staging.nbytes)
        arrivals = []
        for bucket, dtype, start, size in zip(buckets, dtypes, starts, sizes, strict=True):
            place = self.staging[start : start + size].view(dtype)
            received = [transfer.receive for transfer in bucket.transfers]
            copies, live = bind(received, self.parameters, place), Places(received, self.parameters, dtype)
            arrivals.append(Arrival(bucket, place, copies, live))
        return arrivals

    def moved(self, arrival: Arrival, place: Tensor) -> Arrival:
        """Returns the arrival with another place."""
        received = (transfer.receive for transfer in arrival.bucket.transfers)
        return replace(arrival, place=place, copies=bind(received, self.parameters, place))
