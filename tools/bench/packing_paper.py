"""Algorithm 1 of the AReaL paper (arXiv 2505.24298), with which packing.py compares ours."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


def partition(
    lengths: Sequence[int], replicas: int, minibatches: int, cap: int, seed: int
) -> list[list[list[list[int]]]]:
    """Returns indices of sequences by [replica][mini-batch][micro-batch]: balanced by tokens, then Algorithm 1.

    Gives the guarantees of `areal_megatron.packing.partition.partition`. Every replica has as many micro-batches as
    the one that needs most.
    """
    sizes = np.asarray(lengths)
    order = np.random.default_rng(seed).permutation(len(sizes))
    plan: list[list[list[list[int]]]] = [[] for _ in range(replicas)]
    for chosen in np.array_split(order, minibatches):
        if len(chosen) < replicas:
            raise ValueError(f"a mini-batch of {len(chosen)} sequences cannot be split over {replicas} replicas")
        shares = [chosen[share] for share in balance(sizes[chosen], replicas)]
        least = max(len(allocate(sizes[share], cap)) for share in shares)
        packed = [allocate(sizes[share], cap, least) for share in shares]
        count = max(map(len, packed))
        for replica, (share, bins) in enumerate(zip(shares, packed, strict=True)):
            microbatches = [share[members].tolist() for members in bins]
            plan[replica].append(microbatches + [[] for _ in range(count - len(bins))])
    return plan


def balance(sizes: np.ndarray, parts: int) -> list[list[int]]:
    """Returns indices in `parts` groups of about the same sum: the longest first, each to the lightest group."""
    groups: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    for index in np.argsort(-sizes, kind="stable").tolist():
        load, part = heapq.heappop(loads)
        groups[part].append(index)
        heapq.heappush(loads, (load + int(sizes[index]), part))
    return groups


def allocate(sizes: np.ndarray, cap: int, least: int = 1) -> list[list[int]]:
    """Returns indices in micro-batches of at most `cap` tokens, at least `least` of them if there are enough.

    Longest first; a new micro-batch is opened while there are fewer than `least` or none has room, otherwise
    the sequence joins the one with the fewest sequences among those with room.
    """
    bins: list[list[int]] = []
    room, count = np.empty(len(sizes), dtype=np.int64), np.empty(len(sizes), dtype=np.int64)
    for index in np.argsort(-sizes, kind="stable").tolist():
        opened, size = len(bins), int(sizes[index])
        open_to = np.flatnonzero(room[:opened] >= size)
        if opened < least or not len(open_to):
            bins.append([index])
            room[opened], count[opened] = cap - size, 1
        else:
            best = int(open_to[np.argmin(count[open_to])])
            bins[best].append(index)
            room[best] -= size
            count[best] += 1
    return bins
