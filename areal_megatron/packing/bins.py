"""Bin packing: puts sizes into a given number of bins, none of which may exceed a cap.

Sizes are int64 [n], each between 1 and the cap. Everything is deterministic and needs numpy only.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import numpy as np

EXCHANGES = 400
"""Exchanges after which `repair` gives up; where it succeeds, it takes at most as many as there are bins."""
PAIRED = 128
"""The number of sizes, the largest ones that still fit a bin, for which `fill` looks for a second one to fill it up."""
HUGE = 2**62


def lower_bound(sizes: np.ndarray, cap: int) -> int:
    """Returns the lower bound L2 on the number of bins (Martello and Toth, Knapsack Problems, 1990, Section 8.3).

    Sizes above cap / 2 need a bin each. For each threshold t, those above cap − t leave no room for a size of t or
    more, so the sizes from t to cap / 2 must fit into what the other large ones leave and into bins of their own.
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
    """Returns the bin of each size, int64 [n], such that none of `count` bins exceeds `cap`; None if it finds none.

    Bins are about equally full if there is enough room for that, and none is empty unless there are fewer sizes than
    bins. Bin packing is NP-hard: None does not prove that there is no packing.
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
    """Returns by how much the bins exceed the cap, summed over them."""
    return int(np.maximum(_loads(sizes, bins, count) - cap, 0).sum())


def spread(weights: np.ndarray, count: int) -> np.ndarray:
    """Returns the bin of each weight, int64 [n]: largest first, into the lightest of `count` bins."""
    bins = [0] * len(weights)
    loads = [(0, number) for number in range(count)]
    for index, weight in _descending(weights):
        load, number = loads[0]
        bins[index] = number
        heapq.heapreplace(loads, (load + weight, number))
    return np.array(bins, dtype=np.int64)


def best_fit(sizes: np.ndarray, cap: int, count: int) -> np.ndarray:
    """Returns the bin of each size by best fit decreasing, int64 [n]: largest first, where the least room suffices.

    Sizes that fit into no bin go, in the end, where the most room is left, so bins may exceed the cap.
    """
    bins = [0] * len(sizes)
    rooms = [(cap, number) for number in range(count)]
    unplaced = []
    for index, size in _descending(sizes):
        place = bisect_left(rooms, (size, -1))
        if place == count:
            unplaced.append((index, size))
            continue
        room, number = rooms.pop(place)
        bins[index] = number
        insort(rooms, (room - size, number))
    for index, size in unplaced:
        room, number = rooms.pop()
        bins[index] = number
        insort(rooms, (room - size, number))
    return np.array(bins, dtype=np.int64)


def fill(sizes: np.ndarray, cap: int, count: int) -> np.ndarray:
    """Returns the bin of each size, int64 [n], with one bin after the other filled as full as possible.

    A bin takes the largest size left, then others that fit, again largest first; the last two are the pair that fills
    it best. Sizes left after the last bin go where the most room is, so bins may exceed the cap.
    """
    order = np.concatenate(([-1], np.argsort(sizes, kind="stable")))
    left = np.concatenate(([0], sizes[order[1:]]))  # size 0 lets a pair consist of one size
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
    """Fills one bin from the ascending sizes `left`; returns the room that remains and the indices of those taken.

    The search ends early once at most `accepted` room remains.
    """
    end = len(left) - 1
    taken, room = [end], cap - int(left[end])
    least, best = room, taken
    while least > accepted:
        end = int(left[:end].searchsorted(room, side="right"))  # the sizes before `end` are free and fit
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
    """Returns the bins `start`, changed so that none exceeds the cap; None if that fails.

    Each step exchanges a size of the fullest bin for a smaller one of another bin, or for nothing, whichever reduces
    the total excess most. Where no exchange reduces it, the best one moves the excess to another bin.
    """
    n, loads = len(sizes), _loads(sizes, start, count)
    # one offer of 0 in each bin, to give to the bin without taking from it
    offers = np.concatenate((sizes, np.zeros(count, dtype=np.int64)))
    bins = np.concatenate((start, np.arange(count)))
    left = least = excess(sizes, start, cap, count)
    stuck = np.zeros(count, dtype=bool)
    for _ in range(EXCHANGES):
        if not left:
            break
        fullest = int(loads.argmax())
        exchange = _best_exchange(offers, bins, fullest, loads, cap, stuck)
        if exchange is None:
            break
        given, taken, gain = exchange
        stuck[fullest] |= gain <= 0
        other, moved = int(bins[taken]), offers[given] - offers[taken]
        bins[given] = other
        if taken < n:
            bins[taken] = fullest
        loads[fullest] -= moved
        loads[other] += moved
        left -= gain
        if left < least:
            least = left
            stuck[:] = False
    return None if left else bins[:n]


def _best_exchange(
    offers: np.ndarray, bins: np.ndarray, fullest: int, loads: np.ndarray, cap: int, stuck: np.ndarray
) -> tuple[int, int, int] | None:
    """Returns the offer of the fullest bin to give, the smaller one to take for it from a bin that is not stuck, and
    the reduction of the total excess; None if there is no such pair.

    The reduction grows with the tokens moved up to min(over, room), and never beyond. So for each offer to take, only
    the two sizes to give that are next to this point, below and above, can be the best.
    """
    over, room = loads[fullest] - cap, np.maximum(cap - loads, 0)
    own = np.flatnonzero((bins == fullest) & (offers > 0))
    own = own[np.argsort(offers[own], kind="stable")]
    given = np.concatenate(([-HUGE], offers[own], [HUGE]))
    closed = stuck.copy()
    closed[fullest] = True

    place = np.searchsorted(given, offers + np.minimum(over, room)[bins], side="right")
    below, above = given[place - 1] - offers, given[place] - offers
    from_below = np.where(below > 0, below, -HUGE)
    from_above = np.minimum(above, over) - np.maximum(above - room[bins], 0)
    gains = np.where(closed[bins], -HUGE, np.maximum(from_below, from_above))
    taken = int(gains.argmax())
    if gains[taken] <= -cap:
        return None
    index = place[taken] - (1 if from_above[taken] >= from_below[taken] else 2)
    return int(own[index]), taken, int(gains[taken])


def fill_empty(bins: np.ndarray, count: int) -> None:
    """Moves a member of the bin with the most into each empty bin, in place, while a bin has several."""
    members = np.bincount(bins, minlength=count)
    for empty in np.flatnonzero(members == 0):
        most = int(members.argmax())
        if members[most] < 2:
            return
        bins[np.flatnonzero(bins == most)[-1]] = empty
        members[most] -= 1
        members[empty] = 1


def _loads(sizes: np.ndarray, bins: np.ndarray, count: int) -> np.ndarray:
    return np.bincount(bins, sizes, count).astype(np.int64)


def _descending(weights: np.ndarray) -> list[tuple[int, int]]:
    """Returns (index, weight), largest first, equal ones in their original order."""
    order = np.argsort(-weights, kind="stable")
    return list(zip(order.tolist(), weights[order].tolist(), strict=True))
