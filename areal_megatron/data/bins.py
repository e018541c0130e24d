"""Bin packing: which sizes go together so that a given number of bins suffices under a cap.

Sizes are int64 [n] between 1 and the cap. Everything is deterministic and needs numpy only.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

EXCHANGES = 400
"""After which `repair` gives up: two to three times as many as it took wherever it succeeded."""
PAIR_EXCHANGES = 16
"""Of them, how many may move pairs too, each of which costs ten others."""
NEIGHBOURS = 6
"""Pairs tried of a size with others of its bin: enough of them for any difference, and linear in n."""
PAIRED = 128
"""Of the sizes that fit a bin, how many of the largest are tried with a second one to fill it up."""
PASSES = 4
"""How often the excess is passed on by single sizes before pairs are tried."""
HUGE = 2**62


def lower_bound(sizes: np.ndarray, cap: int) -> int:
    """No packing has fewer bins: the bound L2 of Martello and Toth (Knapsack Problems, 1990, Section 8.3).

    Sizes above cap / 2 need a bin each. For each threshold t, those above cap − t leave room for no size of t or
    more, so the sizes from t to cap / 2 share what the other large ones leave and bins of their own.
    """
    if not len(sizes):
        return 0
    ordered = np.sort(sizes)
    before = np.concatenate(([0], np.cumsum(ordered)))
    half = int(np.searchsorted(ordered, cap // 2, side="right"))
    thresholds = np.concatenate(([0], ordered[:half]))
    closed = np.maximum(np.searchsorted(ordered, cap - thresholds, side="right"), half)
    small = before[half] - before[np.searchsorted(ordered, thresholds)]
    room = (closed - half) * cap - (before[closed] - before[half])
    return len(ordered) - half + max(0, int((-((room - small) // cap)).max()))


def pack(sizes: np.ndarray, cap: int, count: int) -> np.ndarray | None:
    """int64 [n]: the bin of each size, of `count` bins none of which exceeds `cap`; None if that was not found.

    Bins are about equally full if there is room enough for that. No bin is empty if there are as many sizes.
    Bin packing is NP-hard: None does not prove that there is no such packing.
    """
    starts = []
    for start in (lambda: spread(sizes, count), lambda: best_fit(sizes, cap, count), lambda: fill(sizes, cap, count)):
        starts.append(start())
        if not excess(sizes, starts[-1], cap, count):
            break
    bins = repair(sizes, min(starts, key=lambda start: excess(sizes, start, cap, count)), cap, count)
    if bins is not None:
        fill_empty(bins, count)
    return bins


def excess(sizes: np.ndarray, bins: np.ndarray, cap: int, count: int) -> int:
    """What all bins together hold above the cap."""
    return int(np.maximum(_loads(sizes, bins, count) - cap, 0).sum())


def spread(weights: np.ndarray, count: int) -> np.ndarray:
    """int64 [n]: the bin of each, of `count` bins of about the same sum; the largest first, to the lightest bin."""
    bins = np.empty(len(weights), dtype=np.int64)
    loads = [(0, number) for number in range(count)]
    for index, weight in _descending(weights):
        load, bins[index] = loads[0]
        heapq.heapreplace(loads, (load + weight, int(bins[index])))
    return bins


def best_fit(sizes: np.ndarray, cap: int, count: int) -> np.ndarray:
    """int64 [n]: the bin of each, the largest first into the bin with the least room that is enough.

    What fits nowhere once all bins are open goes where the most room is, so that bins may be over the cap.
    """
    bins = np.empty(len(sizes), dtype=np.int64)
    rooms = [(cap, number) for number in range(count)]
    unplaced = []
    for index, size in _descending(sizes):
        place = bisect_left(rooms, (size, -1))
        if place == count:
            unplaced.append((index, size))
            continue
        room, bins[index] = rooms.pop(place)
        insort(rooms, (room - size, int(bins[index])))
    for index, size in unplaced:
        room, bins[index] = rooms.pop()
        insort(rooms, (room - size, int(bins[index])))
    return bins


def fill(sizes: np.ndarray, cap: int, count: int) -> np.ndarray:
    """int64 [n]: the bin of each, one bin after the other as full as it gets: the largest that is left, and with it
    others that fit, again the largest first, the last two of them the pair that leaves the least room.

    What is left after the last bin goes where the most room is, so that bins may be over the cap.
    """
    order = np.concatenate(([-1], np.argsort(sizes, kind="stable")))
    left = np.concatenate(([0], sizes[order[1:]]))  # the 0 is nothing, which completes a pair as well
    bins, loads = np.empty(len(sizes), dtype=np.int64), np.zeros(count, dtype=np.int64)
    spare, end = count * cap - int(sizes.sum()), len(left)
    for number in range(count):
        if end == 1:
            break
        room, members = _fullest(left[:end], cap, accepted=max(0, spare // (count - number)))
        bins[order[members]] = number
        loads[number] = cap - room
        spare -= room
        for member in members:  # in descending order
            end -= 1
            left[member:end] = left[member + 1 : end + 1]
            order[member:end] = order[member + 1 : end + 1]
    for place in range(end - 1, 0, -1):
        bins[order[place]] = loads.argmin()
        loads[bins[order[place]]] += left[place]
    return bins


def _fullest(left: np.ndarray, cap: int, accepted: int) -> tuple[int, list[int]]:
    """Room left in a bin, and which of the ascending sizes `left` share it; `accepted` room is little enough."""
    end = len(left) - 1
    taken, room = [end], cap - int(left[end])
    least, best = room, taken
    while least > accepted:
        end = int(left[:end].searchsorted(room, side="right"))  # those before it are free and fit
        if end == 1:
            break
        first = max(1, end - PAIRED)
        rest = room - left[first:end]
        smaller = np.minimum(left[:end].searchsorted(rest, side="right"), np.arange(first, end)) - 1
        rest -= left[smaller]
        place = int(rest.argmin())
        if rest[place] < least:
            least, best = int(rest[place]), [*taken, first + place, int(smaller[place])]
        end -= 1
        taken, room = [*taken, end], room - int(left[end])
    return least, [member for member in best if member]


def repair(sizes: np.ndarray, start: np.ndarray, cap: int, count: int) -> np.ndarray | None:
    """The bins `start`, changed until none is over the cap; None if that did not succeed.

    Each step exchanges a set of the fullest bin for a smaller one of another bin: what takes most off the excess of
    all bins. Where nothing takes any off, the excess is passed on to a bin that may have more luck.
    """
    single, loads = _Sets.single(sizes, start, count), _loads(sizes, start, count)
    left = least = excess(sizes, start, cap, count)
    stuck, passes, pair_exchanges = np.zeros(count, dtype=bool), 0, 0
    for _ in range(EXCHANGES):
        if not left:
            break
        sets, fullest = single, int(loads.argmax())
        exchange = _best_exchange(sets, fullest, loads, cap, stuck)
        passes += exchange.gain <= 0
        if exchange.gain <= 0 and (passes > PASSES or exchange.gain < -cap // 64):
            passes, pair_exchanges = 0, pair_exchanges + 1
            sets = single.with_pairs(len(sizes))
            exchange = _best_exchange(sets, fullest, loads, cap, stuck)
            if exchange.gain == -HUGE or pair_exchanges > PAIR_EXCHANGES:
                break
        stuck[fullest] |= exchange.gain <= 0
        other, moved = int(sets.bins[exchange.taken]), sets.sizes[exchange.given] - sets.sizes[exchange.taken]
        for chosen, target in ((exchange.given, other), (exchange.taken, fullest)):
            members = sets.members[:, chosen]
            single.bins[members[members >= 0]] = target
        loads[fullest] -= moved
        loads[other] += moved
        left -= exchange.gain
        if left < least:
            least = left
            stuck[:] = False
    return None if left else single.bins[: len(sizes)].copy()


def fill_empty(bins: np.ndarray, count: int) -> None:
    """Moves one member each of bins that have several into the empty ones, as long as there are both."""
    members = np.bincount(bins, minlength=count)
    for empty in np.flatnonzero(members == 0):
        most = int(members.argmax())
        if members[most] < 2:
            return
        bins[np.flatnonzero(bins == most)[-1]] = empty
        members[most] -= 1
        members[empty] = 1


class _Sets(NamedTuple):
    """What bins can give: one of their members, nothing, or two members."""

    members: np.ndarray
    """int64 [2, N], −1 for none"""
    sizes: np.ndarray
    bins: np.ndarray

    @classmethod
    def single(cls, sizes: np.ndarray, bins: np.ndarray, count: int) -> _Sets:
        """The n sizes, then nothing from each bin."""
        n = len(sizes)
        first = np.concatenate((np.arange(n), np.full(count, -1)))
        return cls(
            members=np.stack((first, np.full(n + count, -1))),
            sizes=np.concatenate((sizes, np.zeros(count, dtype=np.int64))),
            bins=np.concatenate((bins, np.arange(count))),
        )

    def with_pairs(self, n: int) -> _Sets:
        """These and pairs of the n single ones."""
        order = np.argsort(self.bins[:n], kind="stable")
        members, ordered = [self.members], self.bins[order]
        for distance in range(1, min(NEIGHBOURS, n - 1) + 1):
            same = np.flatnonzero(ordered[:-distance] == ordered[distance:])
            members.append(np.stack((order[same], order[same + distance])))
        pairs = np.concatenate(members[1:], axis=1) if len(members) > 1 else np.zeros((2, 0), dtype=np.int64)
        return _Sets(
            members=np.concatenate((self.members, pairs), axis=1),
            sizes=np.concatenate((self.sizes, self.sizes[pairs].sum(0))),
            bins=np.concatenate((self.bins, self.bins[pairs[0]])),
        )


class _Exchange(NamedTuple):
    given: int
    """Set of the fullest bin."""
    taken: int
    """Set of another bin, smaller than `given`."""
    gain: int
    """Tokens that the exchange takes off the excess of all bins; −HUGE if there is none."""


def _best_exchange(sets: _Sets, fullest: int, loads: np.ndarray, cap: int, barred: np.ndarray) -> _Exchange:
    """The one that gains most, with a bin that is not barred.

    The gain rises with the tokens moved up to min(over, room) and never afterwards, so that of the sets that may be
    given for another one only the two next to that can be best.
    """
    over, room = loads[fullest] - cap, np.maximum(cap - loads, 0)
    own = np.flatnonzero((sets.bins == fullest) & (sets.sizes > 0))
    own = own[np.argsort(sets.sizes[own], kind="stable")]
    offered = np.concatenate(([-HUGE], sets.sizes[own], [HUGE]))
    closed = barred.copy()
    closed[fullest] = True

    place = np.searchsorted(offered, sets.sizes + np.minimum(over, room)[sets.bins], side="right")
    below, above = offered[place - 1] - sets.sizes, offered[place] - sets.sizes
    from_above = np.minimum(above, over) - np.maximum(above - room[sets.bins], 0)
    from_below = np.where(below > 0, below, -HUGE)
    gains = np.where(closed[sets.bins], -HUGE, np.maximum(from_below, from_above))
    taken = int(gains.argmax())
    if gains[taken] <= -cap:
        return _Exchange(-1, -1, -HUGE)
    given = own[place[taken] - (1 if from_above[taken] >= from_below[taken] else 2)]
    return _Exchange(int(given), taken, int(gains[taken]))


def _loads(sizes: np.ndarray, bins: np.ndarray, count: int) -> np.ndarray:
    return np.bincount(bins, sizes, count).astype(np.int64)


def _descending(weights: np.ndarray) -> list[tuple[int, int]]:
    """(index, weight), the largest first, equal ones in their order."""
    order = np.argsort(-weights, kind="stable")
    return list(zip(order.tolist(), weights[order].tolist(), strict=True))
