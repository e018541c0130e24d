"""Who sends which box to whom: the intersections of two layouts, balanced over the senders and put into buckets.

Every rank on both sides derives the same plan from the model's config and the parallel sizes alone, so no rank tells
another what it is about to send. Pure Python: no torch, no process group.

1. `needs` cuts each destination's boxes where the sources' boxes end, and lists all sources that hold each of them.
2. `assign` chooses one source for each, so that all senders carry about the same load.
3. A `Plan` has the transfers of one engine; a rank asks it for its own, in buckets.

Boxes span layers and experts, so their number hardly grows with the model; only a rank's own buckets are made.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from areal_megatron.reshard import engine_layout, trainer_layout
from areal_megatron.reshard.boxes import Box, Layout, LayoutError, Piece, numbers

BUCKET_ELEMENTS = 4 * 2**20
"""The number of elements of the largest message between two ranks (8 MiB in bfloat16)."""
DIRECT_ELEMENTS = 2**19
"""The number of elements from which a tensor's part is a message of its own. A sender that need neither cast nor gather
such a part sends it from the parameter itself, without a copy."""
_SHARES = 32
"""Boxes with several holders are cut to at most 1/32 of a sender's fair load, so loads are balanced to within 1/32."""
_SMALLEST_CUT = 2**16
"""The number of elements below which a box is not cut for balance: the fixed cost of a message outweighs its bytes."""


@dataclass(frozen=True, slots=True)
class Need:
    """One box that a destination rank needs, with the sources that hold it."""

    destination: int
    receive: Piece
    holders: Mapping[int, Piece]
    """Source rank → its piece, of the whole box from which this one is cut."""

    def narrow(self, box: Box) -> Need:
        return Need(self.destination, self.receive.narrow(box), self.holders)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One box from one source rank to one destination rank."""

    source: int
    send: Piece
    destination: int
    receive: Piece

    def narrow(self, box: Box) -> Transfer:
        return Transfer(self.source, self.send.narrow(box), self.destination, self.receive.narrow(box))


@dataclass(frozen=True, slots=True)
class Bucket:
    """One message: transfers of a pair of ranks, each flattened in canonical axis order, one after another."""

    source: int
    destination: int
    number: int
    """Counts the messages of this pair, from 0."""
    transfers: tuple[Transfer, ...]
    elements: int


@dataclass(frozen=True)
class Plan:
    """The transfers of an update of one engine, in the order of the model.

    Example:
        plan = Planner(hf_config, MegatronSizes(tp=2, pp=2), EngineSizes(tp=4)).plan(engine=0)
        for bucket in plan.sent_by(3):  # trainer rank 3's messages, in the order in which it sends them
            print(bucket.destination, bucket.number, bucket.elements, [t.send.tensor for t in bucket.transfers])
    """

    transfers: tuple[Transfer, ...]
    sources: int
    destinations: int
    bucket_elements: int

    def sent_by(self, source: int) -> list[Bucket]:
        """Returns the messages of one trainer rank, in the order in which it sends them."""
        return self._buckets(transfer for transfer in self.transfers if transfer.source == source)

    def received_by(self, destination: int) -> list[Bucket]:
        """Returns the messages for one engine rank, in the order in which it receives them."""
        return self._buckets(transfer for transfer in self.transfers if transfer.destination == destination)

    @cached_property
    def digest(self) -> str:
        """A hash that is equal on two ranks if and only if they expect the same messages."""
        text = [
            (t.source, t.destination, t.receive.tensor, t.receive.box, t.receive.parameter, t.receive.local)
            for t in self.transfers
        ]
        return hashlib.sha256(repr((self.bucket_elements, text)).encode()).hexdigest()

    def _buckets(self, own: Iterable[Transfer]) -> list[Bucket]:
        of_pair: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        for transfer in own:
            of_pair[transfer.source, transfer.destination].append(transfer)
        buckets = [
            Bucket(*pair, number, tuple(group), sum(transfer.send.box.size for transfer in group))
            for pair, transfers in of_pair.items()
            for number, group in enumerate(_fill(transfers, self.bucket_elements))
        ]
        # One order for all ranks, so that no cycle of ranks waits for itself; senders start with different receivers.
        # Messages that need no packing come first: the others are packed while those are on their way.
        turns = max(self.sources, self.destinations)
        return sorted(
            buckets, key=lambda b: (len(b.transfers) > 1, b.number, (b.destination - b.source) % turns, b.source)
        )


class Planner:
    """Makes the plans of engines of equal sizes; they differ only in which of a box's holders sends it.

    Raises ConfigError if the sizes do not fit the model.
    """

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        trainers: trainer_layout.MegatronSizes,
        engine: engine_layout.EngineSizes,
        bucket_elements: int = BUCKET_ELEMENTS,
    ):
        self.sources = trainer_layout.layouts(hf_config, trainers)
        self.destinations = [engine_layout.layout(hf_config, engine, rank) for rank in range(engine.ranks)]
        self._bucket_elements = bucket_elements
        total = sum(layout.size for layout in self.destinations)
        cut = max(total // (len(self.sources) * _SHARES), _SMALLEST_CUT)
        self._wanted = [
            need.narrow(box)
            for need in needs(self.sources, self.destinations)
            for box in need.receive.box.cut(cut if len(need.holders) > 1 else total)
        ]

    def plan(self, engine: int) -> Plan:
        """Returns the plan from all trainer ranks to the ranks of engine number `engine`."""
        transfers = assign(self._wanted, len(self.sources), engine)
        return Plan(tuple(transfers), len(self.sources), len(self.destinations), self._bucket_elements)


def needs(sources: Sequence[Layout], destinations: Sequence[Layout]) -> list[Need]:
    """Returns every box of every destination, cut where the sources' boxes end, in the order of the model.

    Raises LayoutError unless the sources' boxes tile every canonical tensor; two of them must be equal or disjoint.
    """
    held = _holdings(sources)
    result = []
    for rank, layout in enumerate(destinations):
        for piece in layout.pieces:
            for box, holders in held.get(piece.tensor, {}).items():
                if common := box.intersection(piece.box):
                    result.append(Need(rank, piece.narrow(common), holders))
    wanted = sum(layout.size for layout in destinations)
    found = sum(need.receive.box.size for need in result)
    if found != wanted:
        raise LayoutError(f"the sources hold {found} of the {wanted} elements that the destinations need")
    return result


def assign(wanted: Sequence[Need], sources: int, engine: int) -> list[Transfer]:
    """Returns a transfer for each need; every rank chooses the same sources.

    Needs are taken one by one and given to their least loaded holder: those with the fewest holders first, since the
    others can make up for their imbalance, and among those the largest first. `engine` decides ties, so that several
    engines do not all load the same source.
    """
    load = [0] * sources
    chosen = [0] * len(wanted)
    for i in sorted(range(len(wanted)), key=lambda i: (len(wanted[i].holders), -wanted[i].receive.box.size, i)):
        chosen[i] = min(wanted[i].holders, key=lambda source: (load[source], (source + engine) % sources))
        load[chosen[i]] += wanted[i].receive.box.size
    return [
        Transfer(source, need.holders[source].narrow(need.receive.box), need.destination, need.receive)
        for source, need in zip(chosen, wanted, strict=True)
    ]


def _holdings(sources: Sequence[Layout]) -> dict[str, dict[Box, dict[int, Piece]]]:
    """Returns canonical tensor → its boxes → the ranks that hold the box → the first piece where each has it."""
    held: dict[str, dict[Box, dict[int, Piece]]] = defaultdict(lambda: defaultdict(dict))
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, layout in enumerate(sources):
        shapes |= layout.canonical
        for piece in layout.pieces:
            held[piece.tensor][piece.box].setdefault(rank, piece)
    for tensor, boxes in held.items():
        covered = sum(box.size for box in boxes)
        if covered != prod(shapes[tensor]):
            raise LayoutError(
                f"{tensor} of shape {list(shapes[tensor])}: the sources' boxes hold {covered} elements "
                f"instead of {prod(shapes[tensor])}"
            )
    return held


def _fill(transfers: Iterable[Transfer], elements: int) -> Iterator[list[Transfer]]:
    """Yields a pair's transfers in groups of at most `elements`: large tensors first and alone, the others together."""
    small = []
    for transfer in transfers:
        box = transfer.receive.box
        tensor = prod(box.shape[numbers(transfer.receive.tensor) :])
        if tensor >= min(DIRECT_ELEMENTS, elements):
            for part in box.cut(tensor):
                yield from ([transfer.narrow(cut)] for cut in part.cut(elements))
        else:
            small.append(transfer)
    group: list[Transfer] = []
    size = 0
    for transfer in small:
        for part in transfer.receive.box.cut(elements):
            if group and size + part.size > elements:
                yield group
                group, size = [], 0
            group.append(transfer.narrow(part))
            size += part.size
    if group:
        yield group
