"""Who sends which box to whom: the intersection of two layouts, balanced and put into buckets.

Every rank on both sides derives the same plan from the model's config and the parallel sizes alone, so no
rank tells another what it is about to send. Pure Python: no torch, no process group.

1. `needs`: each destination box, cut where the sources' boxes end; with it, every source that holds it.
2. `assign`: one source for each, so that all senders carry about the same load.
3. `link_plan`: the transfers of a pair (source, destination) one after another, in buckets.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from areal_megatron.reshard import megatron, vllm
from areal_megatron.reshard.layout import Box, Layout, LayoutError, Piece

BUCKET_ELEMENTS = 4 * 2**20
"""Elements of the largest message between two ranks (8 MiB in bfloat16)."""
_SHARES = 32
"""Boxes with several holders are cut to at most 1/32 of a sender's fair load, so the balance is within 1/32."""
_SMALLEST_CUT = 2**16
"""Elements below which a box is not cut for balance: a message's fixed cost outweighs its bytes."""


@dataclass(frozen=True, slots=True)
class Need:
    """One box that a destination rank needs, and where each source that holds it has it."""

    destination: int
    receive: Piece
    holders: Mapping[int, Piece]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One box from one source rank to one destination rank."""

    source: int
    send: Piece
    destination: int
    receive: Piece


@dataclass(frozen=True, slots=True)
class Bucket:
    """One message: transfers of a pair, each flattened in canonical axis order, one after another."""

    source: int
    destination: int
    number: int
    """Of this pair, from 0."""
    offset: int
    """Where the message lies in the destination's staging, in elements."""
    transfers: tuple[Transfer, ...]

    @property
    def elements(self) -> int:
        return sum(transfer.send.box.size for transfer in self.transfers)


@dataclass(frozen=True)
class Plan:
    """All messages of one update of one engine, in the order in which every rank handles its own."""

    buckets: tuple[Bucket, ...]

    def sent_by(self, source: int) -> list[Bucket]:
        return [bucket for bucket in self.buckets if bucket.source == source]

    def received_by(self, destination: int) -> list[Bucket]:
        return [bucket for bucket in self.buckets if bucket.destination == destination]

    @cached_property
    def digest(self) -> str:
        """Equal on two ranks if and only if they expect the same messages."""
        text = [
            (b.source, b.destination, b.offset, [(t.send.tensor, t.send.box, t.receive.local) for t in b.transfers])
            for b in self.buckets
        ]
        return hashlib.sha256(repr(text).encode()).hexdigest()


def link_plan(
    hf_config: Mapping[str, Any],
    sizes: megatron.MegatronSizes,
    engine_tp: int,
    engine: int,
    bucket_elements: int = BUCKET_ELEMENTS,
) -> Plan:
    """From all trainer ranks to the engine_tp ranks of engine number `engine`.

    Raises ConfigError where the sizes do not fit the model.
    """
    sources = megatron.layouts(hf_config, sizes)
    destinations = [vllm.layout(hf_config, engine_tp, rank) for rank in range(engine_tp)]
    total = sum(piece.box.size for layout in destinations for piece in layout.pieces)
    cut = max(total // (len(sources) * _SHARES), _SMALLEST_CUT)
    wanted = [
        part
        for need in needs(sources, destinations)
        for part in _chop(need, min(bucket_elements, cut) if len(need.holders) > 1 else bucket_elements)
    ]
    return Plan(tuple(_buckets(assign(wanted, len(sources), engine), bucket_elements, len(sources), engine_tp)))


def needs(sources: Sequence[Layout], destinations: Sequence[Layout]) -> list[Need]:
    """Every box of every destination, cut where the sources' boxes end, in the order of the model.

    Raises LayoutError unless the sources' boxes tile every canonical tensor: they must be equal or disjoint.
    """
    held = _holdings(sources)
    result = []
    for rank, layout in enumerate(destinations):
        for piece in layout.pieces:
            for box, holders in held.get(piece.tensor, {}).items():
                if common := box.intersection(piece.box):
                    narrowed = {source: part.narrow(common) for source, part in holders.items()}
                    result.append(Need(rank, piece.narrow(common), narrowed))
    wanted = sum(piece.box.size for layout in destinations for piece in layout.pieces)
    found = sum(need.receive.box.size for need in result)
    if found != wanted:
        raise LayoutError(f"the sources hold {found} of the {wanted} elements that the destinations need")
    return result


def assign(wanted: Sequence[Need], sources: int, engine: int) -> list[Transfer]:
    """A source for each need, the same on every rank: largest first, to the least loaded holder.

    Needs with few holders come first, since the others can make up for their imbalance. `engine` says
    which source wins a tie, so that several engines do not all load the same one.
    """
    load = [0] * sources
    chosen = [0] * len(wanted)
    for i in sorted(range(len(wanted)), key=lambda i: (len(wanted[i].holders), -wanted[i].receive.box.size, i)):
        chosen[i] = min(wanted[i].holders, key=lambda source: (load[source], (source + engine) % sources))
        load[chosen[i]] += wanted[i].receive.box.size
    return [
        Transfer(source, need.holders[source], need.destination, need.receive)
        for source, need in zip(chosen, wanted, strict=True)
    ]


def _holdings(sources: Sequence[Layout]) -> dict[str, dict[Box, dict[int, Piece]]]:
    """Canonical tensor → its boxes → the ranks that hold the box (the first place where a rank has it)."""
    held: dict[str, dict[Box, dict[int, Piece]]] = defaultdict(lambda: defaultdict(dict))
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, layout in enumerate(sources):
        shapes |= layout.tensors
        for piece in layout.pieces:
            held[piece.tensor][piece.box].setdefault(rank, piece)
    for tensor, boxes in held.items():
        covered = sum(box.size for box in boxes)
        if covered != prod(shapes[tensor]):
            raise LayoutError(f"{tensor} of shape {list(shapes[tensor])}: the sources' boxes hold {covered} elements "
                              f"instead of {prod(shapes[tensor])}")  # fmt: skip
    return held


def _chop(need: Need, elements: int) -> Iterator[Need]:
    """The need in parts of at most `elements`, cut along its first axes."""
    for box in _cut(need.receive.box, elements):
        holders = {source: piece.narrow(box) for source, piece in need.holders.items()}
        yield Need(need.destination, need.receive.narrow(box), holders)


def _cut(box: Box, elements: int, axis: int = 0) -> Iterator[Box]:
    if box.size <= elements:
        yield box
        return
    per_index = box.size // box.shape[axis]
    step = max(elements // per_index, 1)
    for start in range(box.start[axis], box.stop[axis], step):
        stop = min(start + step, box.stop[axis])
        part = Box(
            (*box.start[:axis], start, *box.start[axis + 1 :]),
            (*box.stop[:axis], stop, *box.stop[axis + 1 :]),
        )
        yield from _cut(part, elements, axis + 1)


def _buckets(transfers: Iterable[Transfer], elements: int, sources: int, destinations: int) -> list[Bucket]:
    of_pair: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        of_pair[transfer.source, transfer.destination].append(transfer)
    filled = [0] * destinations
    result = []
    for (source, destination), own in sorted(of_pair.items()):
        for number, group in enumerate(_fill(own, elements)):
            bucket = Bucket(source, destination, number, filled[destination], tuple(group))
            filled[destination] += bucket.elements
            result.append(bucket)
    # One order for all ranks: nobody waits in a circle; senders start with different receivers.
    return sorted(result, key=lambda b: (b.number, (b.destination - b.source) % max(sources, destinations), b.source))


def _fill(transfers: Iterable[Transfer], elements: int) -> Iterator[list[Transfer]]:
    group: list[Transfer] = []
    size = 0
    for transfer in transfers:
        if group and size + transfer.send.box.size > elements:
            yield group
            group, size = [], 0
        group.append(transfer)
        size += transfer.send.box.size
    if group:
        yield group
