"""Who sends which box to whom: the intersections of two layouts, from few and evenly loaded senders, in buckets.

Every rank on both sides derives the same plan from the model's config, the parallel sizes and the number of engines
alone, so no rank tells another what it is about to send. Pure Python: no torch, no process group.

Trainer ranks that hold the same (data-parallel replicas) have one layout between them, a `shard`.

1. `needs` cuts each destination's boxes where the shards' boxes end, and lists all shards that hold each of them.
2. `cover` chooses for each destination as few shards as have everything that it needs.
3. `assign` chooses one of those for each box, so that all carry about the same load.
4. A Planner divides what all engines take from a shard among the shard's replicas (`Stretches`).
5. A `Plan` has the transfers of one engine; a rank asks it for its own, in buckets.

Steps 1 to 3 are the same for all engines. Boxes span layers and experts, so their number hardly grows with the model;
only a rank's own buckets are made.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Any

from areal_megatron.config import Config
from areal_megatron.models.adapter import Adapter, served
from areal_megatron.models.architecture import architecture
from areal_megatron.reshard import engine_layout, trainer_layout
from areal_megatron.reshard.boxes import Box, Layout, LayoutError, Piece, numbers

BUCKET_ELEMENTS = 4 * 2**20
"""The number of elements of the largest message between two ranks on CPUs (8 MiB in bfloat16)."""
CUDA_BUCKET_ELEMENTS = 32 * 2**20
"""The same on GPUs (64 MiB in bfloat16): each message is a kernel on either side and a rendezvous of two streams, which
only large messages make up for."""
GROUP = 8
"""How many messages of a pair of ranks follow one another where changes are sent; one has the changes of all."""
_DIRECT = 8
"""A part of a tensor that has at least 1/8 of a bucket is a message of its own. A sender that need neither cast nor
gather such a part sends it from the parameter itself, without a copy."""
_SHARES = 32
"""Boxes that several senders may send are cut to at most 1/32 of a sender's fair load, so that loads are balanced to
within 1/32."""
_SMALLEST_CUT = 2**16
"""The number of elements below which a box is not cut for balance: the fixed cost of a message outweighs its bytes."""
BALANCED = 1.05
"""No engine rank takes from two replicas of a shard as long as the busiest of them sends at most 1.05 times what the
busiest sender must."""


def largest_bucket(on_cuda: bool) -> int:
    """Returns the number of elements of the largest message between two ranks of a run on CUDA, or on CPUs."""
    return CUDA_BUCKET_ELEMENTS if on_cuda else BUCKET_ELEMENTS


@dataclass(frozen=True, slots=True)
class Need:
    """One box that a destination rank needs, with the shards that hold it."""

    destination: int
    receive: Piece
    holders: Mapping[int, Piece]
    """Number of a shard → its piece, of the whole box from which this one is cut."""

    def narrow(self, box: Box) -> Need:
        if box is self.receive.box:
            return self
        return Need(self.destination, self.receive.narrow(box), self.holders)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One box from one source rank to one destination rank."""

    source: int
    send: Piece
    destination: int
    receive: Piece

    def narrow(self, box: Box) -> Transfer:
        if box is self.receive.box:
            return self
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
    dtype: str = ""
    """The dtype of the elements; "" for the one that the engines' weights have."""

    @property
    def name(self) -> str:
        """The message's name among its destination's messages."""
        return f"{self.source}:{self.number}"


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
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Canonical tensor → the dtype in which it travels, for tensors whose dtype does not follow the model's."""

    def sent_by(self, source: int) -> list[Bucket]:
        """Returns the messages of one trainer rank, in the order in which it sends them."""
        return self._buckets(transfer for transfer in self.transfers if transfer.source == source)

    def received_by(self, destination: int) -> list[Bucket]:
        """Returns the messages for one engine rank, in the order in which it receives them."""
        return self._buckets(transfer for transfer in self.transfers if transfer.destination == destination)

    def groups(self, buckets: Sequence[Bucket], in_groups: bool = True) -> list[list[int]]:
        """Returns the numbers of a rank's `buckets` in groups, for updates that send changes: up to GROUP consecutive
        messages of a pair are a group, and all ranks have the groups in one order. Without `in_groups` all are one
        group."""
        if not in_groups:
            return [list(range(len(buckets)))]
        of_pair: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for place in sorted(range(len(buckets)), key=lambda place: buckets[place].number):
            bucket = buckets[place]
            of_pair[bucket.number // GROUP, bucket.source, bucket.destination].append(place)
        turns = max(self.sources, self.destinations)

        def turn(group: tuple[int, int, int]) -> tuple[int, int, int]:
            number, source, destination = group
            return number, (destination - source) % turns, source

        return [of_pair[group] for group in sorted(of_pair, key=turn)]

    def order(self, in_groups: bool) -> str:
        """Returns what is equal on two ranks if and only if they expect the same messages in the same order; where
        changes may be sent, in the order of `groups`."""
        return f"{self.digest}-in-groups" if in_groups else self.digest

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
        buckets = []
        for pair, transfers in of_pair.items():
            for number, group in enumerate(self._groups(transfers)):
                elements = sum(transfer.send.box.size for transfer in group)
                buckets.append(Bucket(*pair, number, tuple(group), elements, self._dtype(group[0])))
        # One order for all ranks, so that no cycle of ranks waits for itself; senders start with different receivers.
        # Messages that need no packing come first: the others are packed while those are on their way.
        turns = max(self.sources, self.destinations)
        return sorted(
            buckets, key=lambda b: (len(b.transfers) > 1, b.number, (b.destination - b.source) % turns, b.source)
        )

    def _groups(self, transfers: Sequence[Transfer]) -> Iterator[list[Transfer]]:
        """The messages of a pair; all that is in a message has one dtype."""
        for dtype in sorted({self._dtype(transfer) for transfer in transfers}):
            yield from _fill((each for each in transfers if self._dtype(each) == dtype), self.bucket_elements)

    def _dtype(self, transfer: Transfer) -> str:
        return self.dtypes.get(transfer.receive.tensor, "")


@dataclass(frozen=True, slots=True)
class Part:
    """One box that a destination rank of every engine takes from a shard."""

    shard: int
    send: Piece
    destination: int
    receive: Piece
    start: int
    """Elements that the ranks of an engine take from the shard before this box."""


@dataclass(frozen=True)
class Traffic:
    """What an update of all engines makes each trainer rank do."""

    sent: tuple[int, ...]
    """Trainer rank → the elements that it sends."""
    peers: tuple[tuple[int, ...], ...]
    """Trainer rank → for each engine to which it sends, to how many of its ranks."""
    sources: int
    """The most trainer ranks from which an engine rank receives."""
    least: float
    """The elements that the busiest trainer rank sends at least, whatever the plan: boxes that are on few ranks."""

    @property
    def mean(self) -> float:
        return sum(self.sent) / len(self.sent)

    @property
    def busiest_over_mean(self) -> float:
        """The load of the busiest trainer rank over the mean of all, those that send nothing included."""
        return max(self.sent) / self.mean

    @property
    def busiest_over_least(self) -> float:
        """The load of the busiest trainer rank over what the layouts allow at best."""
        return max(self.sent) / self.least


class Planner:
    """Makes the plans of `engines` engines of equal sizes; they differ only in which replica of a shard sends.

    Engine number n takes from the same ranks as engine n − `engines`, so engines added later have plans too, and the
    plans of the others stay. With an adapter they are plans of its factors alone. Raises ConfigError if the sizes do
    not fit the model.
    """

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        trainers: trainer_layout.MegatronSizes,
        engine: engine_layout.EngineSizes,
        bucket_elements: int = BUCKET_ELEMENTS,
        engines: int = 1,
        adapter: Adapter | None = None,
    ):
        self.sources = trainer_layout.layouts(hf_config, trainers, adapter)
        self.destinations = [engine_layout.layout(hf_config, engine, rank, adapter) for rank in range(engine.ranks)]
        self._bucket_elements, self.engines = bucket_elements, engines
        self._dtypes = architecture(hf_config).dtypes
        ranks: dict[int, list[int]] = defaultdict(list)
        for rank, layout in enumerate(self.sources):
            ranks[id(layout)].append(rank)
        self._replicas = list(ranks.values())
        counts = list(map(len, self._replicas))
        wanted = needs([self.sources[own[0]] for own in self._replicas], self.destinations)
        self._parts = assign(wanted, counts)
        self._least = engines * least_load(wanted, counts)
        of_shard: dict[int, list[Part]] = defaultdict(list)
        for part in self._parts:
            of_shard[part.shard].append(part)
        self._stretches = {
            shard: Stretches(self._replicas[shard], engines, parts, BALANCED * self._least)
            for shard, parts in of_shard.items()
        }

    @classmethod
    def of(cls, config: Config, hf_config: Mapping[str, Any], trainers: trainer_layout.MegatronSizes) -> Planner:
        """Returns the planner of a run; `trainers` has what the run's config asks for."""
        engine, bucket = engine_layout.EngineSizes.of(config.rollout), largest_bucket(not config.machine.is_cpu)
        return cls(hf_config, trainers, engine, bucket, config.rollout.engines, served(config, hf_config))

    def plan(self, engine: int) -> Plan:
        """Returns the plan from all trainer ranks to the ranks of engine number `engine`."""
        transfers = []
        for part in self._parts:
            for source, box in self._stretches[part.shard].sources(engine, part):
                if box is part.receive.box:
                    transfers.append(Transfer(source, part.send, part.destination, part.receive))
                else:
                    transfers.append(
                        Transfer(source, part.send.narrow(box), part.destination, part.receive.narrow(box))
                    )
        counts = len(self.sources), len(self.destinations)
        return Plan(tuple(transfers), *counts, self._bucket_elements, self._dtypes)

    @cached_property
    def traffic(self) -> Traffic:
        """What the trainers send to all engines together."""
        sent, peers = [0] * len(self.sources), [Counter() for _ in self.sources]
        most = 0
        for engine in range(self.engines):
            pairs: Counter[tuple[int, int]] = Counter()
            for stretches in self._stretches.values():
                stretches.count(engine, pairs)
            for (source, _), elements in pairs.items():
                sent[source] += elements
                peers[source][engine] += 1
            most = max(most, *Counter(destination for _, destination in pairs).values())
        return Traffic(tuple(sent), tuple(tuple(own.values()) for own in peers), most, self._least)


class Stretches:
    """How the replicas of a shard divide what all engines take from it.

    What the engines take, one engine after another, is a line, and each replica sends an equal stretch of it. So as few
    engines as can be take from two replicas, and as few replicas as can be send to two engines. Stretches end between
    two engine ranks; only where a replica would send more than `limit` elements then, they end inside what one engine
    rank takes.
    """

    def __init__(self, ranks: Sequence[int], engines: int, parts: Sequence[Part], limit: float):
        self._ranks, self._engines, self._parts = ranks, engines, parts
        self._demand = sum(part.receive.box.size for part in parts)
        """Elements that one engine takes."""
        self._sizes: Counter[int] = Counter()
        """Engine rank → the elements that it takes."""
        for part in parts:
            self._sizes[part.destination] += part.receive.box.size
        self._middles: dict[int, int] = {}
        """Engine rank → twice the place of the middle of what it takes; places are counted as Part.start."""
        start = 0
        for destination, size in self._sizes.items():
            self._middles[destination] = 2 * start + size
            start += size
        self._cut = max(self._demand * engines // (len(ranks) * _SHARES), _SMALLEST_CUT)
        self._whole = len(ranks) == 1
        """Whether an engine rank takes everything from one replica."""
        if not self._whole:
            load: Counter[int] = Counter()
            for engine in range(engines):
                for destination, middle in self._middles.items():
                    load[self._rank(engine, middle)] += self._sizes[destination]
            self._whole = max(load.values()) <= limit

    def sources(self, engine: int, part: Part) -> Iterator[tuple[int, Box]]:
        """Yields who sends which box of a part to engine number `engine`."""
        box = part.receive.box
        if self._whole:
            yield self._rank(engine, self._middles[part.destination]), box
            return
        start = 2 * part.start
        first, last = self._rank(engine, start), self._rank(engine, start + 2 * box.size - 1)
        if first == last:
            yield first, box
            return
        for piece in box.cut(self._cut):
            yield self._rank(engine, start + piece.size), piece
            start += 2 * piece.size

    def count(self, engine: int, pairs: Counter[tuple[int, int]]) -> None:
        """Adds to `pairs` the elements that each (trainer rank, engine rank) of engine number `engine` exchange."""
        if self._whole:
            for destination, middle in self._middles.items():
                pairs[self._rank(engine, middle), destination] += self._sizes[destination]
            return
        for part in self._parts:
            for source, box in self.sources(engine, part):
                pairs[source, part.destination] += box.size

    def _rank(self, engine: int, place: int) -> int:
        """Returns who sends what is at half of `place`."""
        along = 2 * self._demand * (engine % self._engines) + place
        return self._ranks[along * len(self._ranks) // (2 * self._demand * self._engines)]


def needs(shards: Sequence[Layout], destinations: Sequence[Layout]) -> list[Need]:
    """Returns every box of every destination, cut where the shards' boxes end, in the order of the model.

    Raises LayoutError unless the shards' boxes tile every canonical tensor; two of them must be equal or disjoint.
    """
    held = _holdings(shards)
    result = []
    for rank, layout in enumerate(destinations):
        for piece in layout.pieces:
            for box, holders in held.get(piece.tensor, {}).items():
                if common := box.intersection(piece.box):
                    result.append(Need(rank, piece.narrow(common), holders))
    wanted = sum(layout.size for layout in destinations)
    found = sum(need.receive.box.size for need in result)
    if found != wanted:
        raise LayoutError(f"the trainers hold {found} of the {wanted} elements that the engine's ranks need")
    return result


def cover(wanted: Sequence[Need], replicas: Sequence[int]) -> dict[int, set[int]]:
    """Returns destination → the shards from which it takes: as few as hold all that it needs.

    What one shard alone holds decides first. Then the shard that holds most of what is left is taken, and of several
    the one with the least load so far. In general that need not give the smallest number. Here it does: a shard is one
    tensor-parallel part and one expert-parallel part of a stage, and the parts that occur together are all pairs of
    some of the one kind and some of the other.
    """
    load = [0.0] * len(replicas)
    chosen: dict[int, set[int]] = {}
    needed: dict[int, Counter[frozenset[int]]] = {}
    for destination, own in groupby(wanted, key=lambda need: need.destination):
        elements = needed[destination] = Counter()
        for need in own:
            elements[frozenset(need.holders)] += need.receive.box.size
        chosen[destination] = {shard for holders in elements if len(holders) == 1 for shard in holders}
        for holders in list(elements):
            if taken := holders & chosen[destination]:
                size = elements.pop(holders)
                for shard in taken:
                    load[shard] += size / len(taken) / replicas[shard]
    for destination, elements in needed.items():
        # what is on more shards than something else that is needed comes with that
        left = [holders for holders in elements if not any(other < holders for other in elements)]
        holds = Counter(shard for holders in left for shard in holders)
        while left:
            best = min(holds, key=lambda shard: (-holds[shard], load[shard], shard))
            chosen[destination].add(best)
            for holders in left:
                if best in holders:
                    holds.subtract(holders)
                    load[best] += elements[holders] / replicas[best]
            left = [holders for holders in left if best not in holders]
    return chosen


def assign(wanted: Sequence[Need], replicas: Sequence[int]) -> list[Part]:
    """Returns from which shard each need is met, in the order of `wanted`; shard n is on replicas[n] ranks.

    Needs held by several shards of the destination's `cover` are cut, and given one by one to the shard with the least
    loaded replicas: the fewest holders first, since the others can make up for their imbalance, and among equals the
    largest first.
    """
    covers = cover(wanted, replicas)
    cut = max(sum(need.receive.box.size for need in wanted) // (len(replicas) * _SHARES), _SMALLEST_CUT)
    pieces: list[tuple[Need, list[int]]] = []
    for need in wanted:
        candidates = [shard for shard in need.holders if shard in covers[need.destination]]
        if len(candidates) == 1:
            pieces.append((need, candidates))
        else:
            pieces += [(need.narrow(box), candidates) for box in need.receive.box.cut(cut)]
    load = [0.0] * len(replicas)
    chosen = [0] * len(pieces)
    for i in sorted(range(len(pieces)), key=lambda i: (len(pieces[i][1]), -pieces[i][0].receive.box.size, i)):
        need, candidates = pieces[i]
        chosen[i] = min(candidates, key=lambda shard: (load[shard], shard))
        load[chosen[i]] += need.receive.box.size / replicas[chosen[i]]
    taken = [0] * len(replicas)
    parts = []
    for (need, _), shard in zip(pieces, chosen, strict=True):
        box = need.receive.box
        parts.append(Part(shard, need.holders[shard].narrow(box), need.destination, need.receive, taken[shard]))
        taken[shard] += box.size
    return parts


def least_load(wanted: Sequence[Need], replicas: Sequence[int]) -> float:
    """Returns a lower bound, in elements, on the busiest sender's load for one engine under any assignment: data held
    only by a set of shards, divided by the ranks of the set, maximised over the sets that hold some box."""
    elements: Counter[frozenset[int]] = Counter()
    for need in wanted:
        elements[frozenset(need.holders)] += need.receive.box.size
    every = frozenset(range(len(replicas)))
    return max(
        sum(size for holders, size in elements.items() if holders <= shards) / sum(replicas[n] for n in shards)
        for shards in {*elements, every}
    )


def _holdings(shards: Sequence[Layout]) -> dict[str, dict[Box, dict[int, Piece]]]:
    """Returns canonical tensor → its boxes → the shards that hold the box → the first piece where each has it."""
    held: dict[str, dict[Box, dict[int, Piece]]] = defaultdict(lambda: defaultdict(dict))
    shapes: dict[str, tuple[int, ...]] = {}
    for shard, layout in enumerate(shards):
        shapes |= layout.canonical
        for piece in layout.pieces:
            held[piece.tensor][piece.box].setdefault(shard, piece)
    for tensor, boxes in held.items():
        covered = sum(box.size for box in boxes)
        if covered != prod(shapes[tensor]):
            raise LayoutError(
                f"{tensor} of shape {list(shapes[tensor])}: the trainers' boxes hold {covered} elements "
                f"instead of {prod(shapes[tensor])}"
            )
    return held


def _fill(transfers: Iterable[Transfer], elements: int) -> Iterator[list[Transfer]]:
    """Yields a pair's transfers in groups of at most `elements`: large tensors first and alone, the others together."""
    small = []
    for transfer in transfers:
        box = transfer.receive.box
        tensor = prod(box.shape[numbers(transfer.receive.tensor) :])
        if tensor >= elements // _DIRECT:
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
