"""The layout of a micro-batch: one row of segments, and the part of it that each context-parallel rank has.

A segment is a stretch of tokens, each of which attends to those before it. A segment may continue a prefix, another
segment before it in the row, to all of whose tokens its own attend as well: a prompt that several answers share.
Everything is deterministic, so that each rank finds its own part without asking, and needs numpy only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from areal_megatron.models.flops import SequenceFlops
from areal_megatron.packing.bins import spread
from areal_megatron.packing.partition import aligned

WORTH_GATHERING = 0.05
"""How much longer the slowest rank may take with whole sequences than with an equal share of all: about what gathering
keys and values costs."""
LEAST_CUT = 16
"""Fewest tokens in a piece of a sequence that is cut. Kernels take 64 queries or more at a time, so smaller pieces cost
more than they should; but attention is little of what short sequences cost, and larger ones would balance it worse."""

_NONE = np.zeros(0, np.int64)


class TokenRun(NamedTuple):
    """Consecutive tokens of a segment: those from `first` to before `stop`, counted in the segment."""

    segment: int
    first: int
    stop: int


@dataclass(frozen=True)
class TokenRow:
    """The segments of a row, in their order."""

    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]
    """For each segment the number of the one that it continues, −1 if none; a prefix has none itself."""

    @classmethod
    def of(cls, lengths: Sequence[int], prefixes: Sequence[int] = ()) -> TokenRow:
        """Returns a row, by default of segments that continue none."""
        return cls(tuple(lengths), tuple(prefixes) or (-1,) * len(lengths))

    @cached_property
    def starts(self) -> list[int]:
        """The place of each segment's first token in the row."""
        return np.cumsum((0, *self.lengths)).tolist()

    def before(self, segment: int) -> int:
        """The number of tokens of the prefix that `segment` continues."""
        prefix = self.prefixes[segment]
        return self.lengths[prefix] if prefix >= 0 else 0

    def pairs(self, run: TokenRun) -> int:
        """The number of (query, key) pairs in the attention of a run."""
        own = (run.stop * (run.stop + 1) - run.first * (run.first + 1)) // 2
        return own + (run.stop - run.first) * self.before(run.segment)


@dataclass(frozen=True)
class Division:
    """The runs of each context-parallel rank, and the equal length of their rows, in tokens."""

    runs: tuple[tuple[TokenRun, ...], ...]
    length: int
    cut: bool
    """Whether ranks need keys of others; if not, all that a token attends to is on its rank."""


def divide(row: TokenRow, ranks: int, multiple: int, flops: SequenceFlops | None = None) -> Division:
    """Divides a row over context-parallel ranks; their rows have the same length, a multiple of `multiple`.

    Where it costs little balance, by the FLOPs of `flops`, every sequence goes whole to one rank, with the others of
    its prefix. Otherwise all ranks get the same tokens and the same attention: of each sequence a piece of its first
    half and the mirrored one of its second. Sequences too short for that are dealt whole as far as there is room.
    """
    if ranks == 1:
        runs = tuple(TokenRun(segment, 0, tokens) for segment, tokens in enumerate(row.lengths))
        return Division((runs,), _length(sum(row.lengths), multiple), cut=False)
    flops = flops or SequenceFlops(token=1.0, trained=0.0, pair=0.0)
    return _whole(row, ranks, multiple, flops) or _cut(row, ranks, multiple)


def _length(tokens: int, multiple: int) -> int:
    """The length of a rank's row of `tokens` tokens: `multiple` at least, even if there are none."""
    return aligned(max(tokens, 1), multiple)


def _whole(row: TokenRow, ranks: int, multiple: int, flops: SequenceFlops) -> Division | None:
    """Returns the division in which no sequence is cut, or None if it is not balanced enough."""
    lengths = np.array(row.lengths, dtype=np.int64)
    costs = flops(lengths, 0, np.array([row.before(segment) for segment in range(len(lengths))], dtype=np.int64))
    # A segment goes where its prefix goes.
    roots = np.array([segment if prefix < 0 else prefix for segment, prefix in enumerate(row.prefixes)], dtype=np.int64)
    owners = spread(np.bincount(roots, costs, len(lengths)), ranks)[roots]
    tokens = np.bincount(owners, lengths, ranks).astype(np.int64)
    length = _length(int(tokens.max()), multiple)
    # All ranks compute rows of this length, whatever they hold.
    slowest = (np.bincount(owners, costs, ranks) + flops.token * (length - tokens)).max()
    if slowest > (1 + WORTH_GATHERING) * costs.sum() / ranks and length > multiple:
        return None
    runs = (np.flatnonzero(owners == rank).tolist() for rank in range(ranks))
    return Division(tuple(tuple(TokenRun(s, 0, row.lengths[s]) for s in own) for own in runs), length, cut=False)


def _cut(row: TokenRow, ranks: int, multiple: int) -> Division:
    length = _length(-(-sum(row.lengths) // ranks), multiple)
    room, pairs, shares = [length] * ranks, [0] * ranks, [[] for _ in range(ranks)]

    def give(rank: int, run: TokenRun) -> None:
        if run.first < run.stop:
            shares[rank].append(run)
            room[rank] -= run.stop - run.first
            pairs[rank] += row.pairs(run)

    longest_first = sorted(range(len(row.lengths)), key=lambda segment: -row.lengths[segment])
    for segment in longest_first:
        tokens = row.lengths[segment]
        if tokens >= 2 * ranks * LEAST_CUT:
            for rank, pieces in enumerate(_mirrored(tokens, room)):
                for first, stop in pieces:
                    give(rank, TokenRun(segment, first, stop))
            continue
        first = 0
        while first < tokens:
            # to the rank with the least attention of those that can take all of it, else to the one with the most room
            rank = max(range(ranks), key=lambda r: (min(room[r], tokens - first), -pairs[r], room[r]))
            stop = min(tokens, first + room[rank])
            give(rank, TokenRun(segment, first, stop))
            first = stop
    return Division(tuple(_joined(share) for share in shares), length, cut=True)


def _mirrored(tokens: int, room: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Returns the pieces (first, stop) of a sequence for each rank: one of the first half, one of the second.

    Every rank gets the same number of tokens, or one more if it has more room than others.
    """
    ranks = len(room)
    equal, rest = divmod(tokens, ranks)
    more = set(sorted(range(ranks), key=lambda rank: -room[rank])[:rest])
    sizes = [equal + (rank in more) for rank in range(ranks)]
    front = np.cumsum([0, *(size // 2 for size in sizes)]).tolist()
    back = tokens - np.cumsum([0, *(size - size // 2 for size in sizes)])
    return [[(front[rank], front[rank + 1]), (int(back[rank + 1]), int(back[rank]))] for rank in range(ranks)]


def _joined(runs: Sequence[TokenRun]) -> tuple[TokenRun, ...]:
    """Returns the runs in the order of the row, with adjacent ones made one."""
    joined: list[TokenRun] = []
    for run in sorted(runs):
        if joined and joined[-1].segment == run.segment and joined[-1].stop == run.first:
            joined[-1] = joined[-1]._replace(stop=run.stop)
        else:
            joined.append(run)
    return tuple(joined)


class Past(NamedTuple):
    """Keys that come before some of a rank's runs: all tokens of these runs attend to all of them."""

    keys: np.ndarray
    """int64: their places among the keys that the rank has"""
    runs: tuple[int, ...]
    """The numbers of the runs."""
    queries: np.ndarray
    """int64: the places of the runs' tokens on the rank"""


class View:
    """What one context-parallel rank has of a row."""

    def __init__(self, row: TokenRow, division: Division, rank: int):
        self.cut, self.length = division.cut, division.length
        self.runs = division.runs[rank]
        sizes = [run.stop - run.first for run in self.runs]
        self.filler = self.length - sum(sizes)
        """The number of tokens that fill the rank's row at its end; they attend to each other."""
        self.sizes = (*sizes, self.filler) if self.filler else tuple(sizes)
        """The number of tokens of each run, and of the filler, in the order of the rank's row."""
        self.first_key = rank * self.length if self.cut else 0
        """The place of the rank's own first token among its keys; if sequences are cut, these are all ranks' keys."""
        self.tokens = _tokens(row, self.runs, self.filler)
        """int64 [length]: the place in the row of each token of the rank, −1 for filler"""
        self.place = np.full(sum(row.lengths), -1, np.int64)
        """int64 [tokens of the row]: the place of each token on this rank, −1 for others' tokens"""
        own = self.tokens >= 0
        self.place[self.tokens[own]] = np.flatnonzero(own)
        self.positions = np.concatenate(
            [_NONE]
            + [np.arange(run.first, run.stop) + row.before(run.segment) for run in self.runs]
            + [np.arange(self.filler)]
        )
        """int64 [length]: the place of each token in its sequence, prefix included"""
        self.gathered = self._gathered(row, division) if self.cut else self.place
        """int64 [tokens of the row]: the place of each token among the keys; −1 for what is not among them"""
        self.pasts = tuple(self._pasts(row, division))
        number = {run.segment: at for at, run in enumerate(self.runs)}
        parents = (*(number.get(row.prefixes[run.segment], -1) for run in self.runs), *[-1] * bool(self.filler))
        self.whole_runs = (row.lengths, row.prefixes) if self.cut else (self.sizes, parents)
        """The runs that whole sequences are made of: the rank's own, or all of the row if sequences are cut. For each
        its number of tokens, and the number of the run that it continues, −1 if none."""

    @cached_property
    def key_places(self) -> np.ndarray:
        """int64: for each run, filler included, the places of the keys that its last token attends to, in order."""
        first = self.first_key + np.cumsum((0, *self.sizes))
        keys = ((self._before(run), np.arange(size) + first[run]) for run, size in enumerate(self.sizes))
        return np.concatenate([_NONE, *chain(*keys)])

    @cached_property
    def key_counts(self) -> tuple[int, ...]:
        """The number of keys of each run, in `key_places`."""
        return tuple(len(self._before(run)) + size for run, size in enumerate(self.sizes))

    def _before(self, run: int) -> np.ndarray:
        """The keys of the past of a run, int64."""
        return self._past_of.get(run, _NONE)

    @cached_property
    def _past_of(self) -> dict[int, np.ndarray]:
        return {run: past.keys for past in self.pasts for run in past.runs}

    def _gathered(self, row: TokenRow, division: Division) -> np.ndarray:
        places = np.empty_like(self.place)
        for rank, runs in enumerate(division.runs):
            held = _tokens(row, runs, 0)
            places[held] = rank * self.length + np.arange(len(held))
        return places

    def _pasts(self, row: TokenRow, division: Division) -> Iterator[Past]:
        begins = np.cumsum((0, *self.sizes))
        members: dict[tuple[int, int, int], list[int]] = {}
        for number, run in enumerate(self.runs):
            prefix = row.prefixes[run.segment]
            if prefix >= 0 or run.first:
                own = run.segment if run.first else -1
                members.setdefault((prefix, own, run.first), []).append(number)
        if not members:
            return
        key_of = self.gathered
        for (prefix, segment, first), runs in members.items():
            before = [(prefix, row.lengths[prefix])] if prefix >= 0 else []
            before += [(segment, first)] if segment >= 0 else []
            keys = np.concatenate([key_of[row.starts[s] : row.starts[s] + n] for s, n in before])
            yield Past(keys, tuple(runs), np.concatenate([np.arange(begins[r], begins[r + 1]) for r in runs]))


def whole_sequences(lengths: Sequence[int]) -> View:
    """Returns the view of a rank that has a whole row of sequences."""
    row = TokenRow.of(lengths)
    return View(row, divide(row, 1, 1), 0)


def _tokens(row: TokenRow, runs: Sequence[TokenRun], filler: int) -> np.ndarray:
    held = [np.arange(row.starts[run.segment] + run.first, row.starts[run.segment] + run.stop) for run in runs]
    return np.concatenate([_NONE, *held, np.full(filler, -1, np.int64)])
