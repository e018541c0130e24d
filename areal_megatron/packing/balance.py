"""Assigns micro-batches to replicas such that all have the same to compute. Deterministic, needs numpy only."""

from __future__ import annotations

import heapq

import numpy as np

TOLERANCE = 1e-4
"""The difference between replicas, as a share of their mean cost, that makes nobody wait measurably."""
LEAST_RELIEF = TOLERANCE / 10
"""The smallest relief of a replica, as a share of the mean cost, that is worth an exchange."""
EXCHANGES = 200
"""Exchanges after which the balance is left as it is; tens are enough."""
PARTNERS = 16
"""The number of cheapest replicas with which the costliest one tries an exchange."""


class Shares:
    """n sequences in bins (micro-batches), and the bins on replicas, equally many on each.

    `sizes` are int64 [n] in tokens, at most `cap`; `costs` float64 [n], above 0; `bins` int64 [n], the bin of each
    sequence. No exchange lets a bin exceed the cap.
    """

    def __init__(self, sizes: np.ndarray, costs: np.ndarray, bins: np.ndarray, cap: int, count: int, replicas: int):
        self.sizes, self.costs, self.bins, self.cap = sizes, costs, bins.copy(), cap
        self.loads = np.bincount(bins, sizes, count).astype(np.int64)
        self.bin_costs = np.bincount(bins, costs, count)
        self.owners = deal(self.bin_costs, replicas)
        """int64 [count]: the replica of each bin"""
        self.totals = np.bincount(self.owners, self.bin_costs, replicas)
        """float64 [replicas]: the cost of each replica"""

    def level(self) -> None:
        """Relieves the costliest replica until all are within TOLERANCE or no exchange with the PARTNERS helps."""
        for _ in range(EXCHANGES):
            replicas = np.argsort(self.totals, kind="stable").tolist()
            most, mean = replicas[-1], self.totals.mean()
            if self.totals[most] - self.totals[replicas[0]] <= TOLERANCE * mean:
                return
            if not any(
                self._swap_bins(most, other) or self._swap_sequences(most, other) for other in replicas[:-1][:PARTNERS]
            ):
                return

    @property
    def imbalance(self) -> float:
        """The cost of the costliest replica beyond the mean, as a share of the mean: the time that the others wait."""
        return float(self.totals.max() / self.totals.mean() - 1)

    def microbatches(self) -> list[list[list[int]]]:
        """Returns the indices of sequences by [replica][micro-batch].

        Every replica has its costliest micro-batches first: those at the same position run at the same time, and wait
        for each other where replicas share experts.
        """
        members: list[list[int]] = [[] for _ in self.owners]
        for index, number in enumerate(self.bins.tolist()):
            members[number].append(index)
        shares: list[list[list[int]]] = [[] for _ in self.totals]
        owners = self.owners.tolist()
        for number in np.argsort(-self.bin_costs, kind="stable").tolist():
            shares[owners[number]].append(members[number])
        return shares

    def _swap_bins(self, giver: int, taker: int) -> bool:
        given, taken = np.flatnonzero(self.owners == giver), np.flatnonzero(self.owners == taker)
        moved = self.bin_costs[given][:, None] - self.bin_costs[taken]
        place = self._closest(moved, giver, taker)
        if place is None:
            return False
        self.owners[given[place[0]]], self.owners[taken[place[1]]] = taker, giver
        self._move(moved[place], giver, taker)
        return True

    def _swap_sequences(self, giver: int, taker: int) -> bool:
        """Exchanges a sequence of the giver for one of the taker, or for nothing, if both bins have the room."""
        given = np.flatnonzero(self.owners[self.bins] == giver)
        taken = np.flatnonzero(self.owners[self.bins] == taker)
        empty = np.flatnonzero(self.owners == taker)
        homes = np.concatenate((self.bins[taken], empty))
        nothing = np.zeros(len(empty), dtype=np.int64)
        moved = self.costs[given][:, None] - np.concatenate((self.costs[taken], nothing))
        tokens = self.sizes[given][:, None] - np.concatenate((self.sizes[taken], nothing))
        room = self.cap - self.loads
        fits = (tokens <= room[homes]) & (-tokens <= room[self.bins[given]][:, None])
        place = self._closest(np.where(fits, moved, 0.0), giver, taker)
        if place is None:
            return False
        source, target = self.bins[given[place[0]]], homes[place[1]]
        self.bins[given[place[0]]] = target
        if place[1] < len(taken):
            self.bins[taken[place[1]]] = source
        self.loads[source] -= tokens[place]
        self.loads[target] += tokens[place]
        self.bin_costs[source] -= moved[place]
        self.bin_costs[target] += moved[place]
        self._move(moved[place], giver, taker)
        return True

    def _closest(self, moved: np.ndarray, giver: int, taker: int) -> tuple[int, int] | None:
        """Returns the index of the move that best levels the two replicas; None if no move relieves the giver."""
        difference = self.totals[giver] - self.totals[taker]
        distance = np.abs(moved - difference / 2)
        row, column = np.unravel_index(int(distance.argmin()), moved.shape)
        relief = difference / 2 - distance[row, column]
        return (int(row), int(column)) if relief > LEAST_RELIEF * self.totals.mean() else None

    def _move(self, cost: float, giver: int, taker: int) -> None:
        self.totals[giver] -= cost
        self.totals[taker] += cost


def deal(costs: np.ndarray, replicas: int) -> np.ndarray:
    """Returns the replica of each bin, int64 [count], equally many bins on each.

    The costliest bin comes first, and each goes to the cheapest of the replicas that still lack bins.
    """
    owners, missing = [0] * len(costs), [len(costs) // replicas] * replicas
    lacking, cost_of = [(0.0, replica) for replica in range(replicas)], costs.tolist()
    for number in np.argsort(-costs, kind="stable").tolist():
        total, owner = heapq.heappop(lacking)
        owners[number] = owner
        missing[owner] -= 1
        if missing[owner]:
            heapq.heappush(lacking, (total + cost_of[number], owner))
    return np.array(owners, dtype=np.int64)
