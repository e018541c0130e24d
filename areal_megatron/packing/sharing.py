"""Bundles: answers to one prompt that lie in one micro-batch, where the prompt is computed once for all of them.

A bundle is the prompt without its last token, the prefix, followed by its answers. Each begins with its own copy of the
last prompt token, so the token before every trained one belongs to one answer alone. A prompt of one token leaves
nothing to share. Everything is deterministic and needs numpy only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_megatron.data.trajectory import Trajectory
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.packing.bins import pack

LEAST_SAVING = 0.05
"""The share of its answers' FLOPs that a prefix must have to be shared: bundles are coarser than answers, and balance
the replicas less well."""
MERGING = 150
"""What it costs a token to attend to its prefix apart from its own answer, and to merge the two, in keys that it could
attend to instead: measured on a CPU with the demo's model, where sharing prefixes of 5 tokens pays with answers of 10
tokens and not with answers of 24."""


@dataclass(frozen=True)
class Prefixes:
    """What n trajectories can share with others.

    Trajectories of one family have a prefix in common. A trajectory that shares nothing is a family of its own, with
    a prefix of 0 tokens.
    """

    families: np.ndarray
    """int64 [n]: the number of the family of each."""
    tokens: np.ndarray
    """int64 [n]: the tokens of the prefix."""
    costs: np.ndarray
    """float64 [n]: what it costs to compute the prefix."""

    @classmethod
    def none(cls, count: int) -> Prefixes:
        """Returns the prefixes of `count` sequences that share nothing."""
        return cls(np.arange(count), np.zeros(count, np.int64), np.zeros(count))

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], costs: np.ndarray, flops: SequenceFlops) -> Prefixes:
        """Returns the prefixes of a batch's trajectories. `costs`, float64 [n], are the costs of the trajectories
        alone.

        A prefix is shared by trajectories of one group with equal prompts, since a workflow may give each its own, and
        with equal routes in the prefix, since a router's replayed choices are part of what is computed.
        """
        tokens = np.array([max(len(t.prompt) - 1, 0) for t in trajectories], dtype=np.int64)
        saved = flops(tokens, 0)
        families = _families(trajectories)
        count = families.max(initial=-1) + 1
        answers = np.bincount(families, minlength=count)
        lengths = np.array([t.length for t in trajectories], dtype=np.int64)
        least = np.maximum(LEAST_SAVING * costs, MERGING * flops.pair * lengths)
        worth = np.bincount(families, saved, count) >= np.bincount(families, least, count)
        shared = ((answers > 1) & worth)[families]
        return cls(families, tokens, saved)._where(shared)

    def __getitem__(self, chosen: np.ndarray) -> Prefixes:
        return Prefixes(self.families[chosen], self.tokens[chosen], self.costs[chosen])

    def within(self, lengths: np.ndarray, cap: int) -> Prefixes:
        """Returns the prefixes where sequences of more than `cap` tokens, which get a row of their own, share none."""
        return self._where(lengths <= cap)

    def bundles(self, members: Sequence[int]) -> list[list[int]]:
        """Returns the members of a micro-batch by bundle, bundles and members in the order in which they come."""
        families = self.families[np.array(members, dtype=np.int64)]
        return [[members[i] for i in bundle] for bundle in by_number(families)]

    def _where(self, shared: np.ndarray) -> Prefixes:
        alone = self.families.max(initial=-1) + 1 + np.arange(len(shared))
        return Prefixes(
            np.where(shared, self.families, alone), np.where(shared, self.tokens, 0), np.where(shared, self.costs, 0.0)
        )


@dataclass(frozen=True)
class Bundled:
    """Sequences that are tied into bundles."""

    bundles: np.ndarray
    """int64 [n]: the bundle of each sequence."""
    sizes: np.ndarray
    """int64 [bundles]: tokens, with the prefix once."""
    costs: np.ndarray
    """float64 [bundles]: what a bundle costs, with the prefix once."""


def bundlings(sizes: np.ndarray, costs: np.ndarray, prefixes: Prefixes, cap: int) -> Iterator[Bundled]:
    """Yields ways to tie n sequences into bundles of at most `cap` tokens; no sequence may have more.

    The first has as few bundles as the cap allows. Each of the others cuts the costliest bundles of the one before, at
    first one of them, then twice as many each time, until there are only single sequences: the finer the bundles, the
    better they can be balanced, and the more they cost in total.
    """
    if np.bincount(prefixes.families).max(initial=0) <= 1:  # there is nobody to share with
        yield Bundled(np.arange(len(sizes)), sizes, costs)
        return
    sizes, costs = sizes - prefixes.tokens, costs - prefixes.costs  # of each answer without the prefix
    families = [np.array(members) for members in by_number(prefixes.families) if len(members) > 1]
    most = np.array([len(members) for members in families])
    answers = np.array([costs[members].sum() for members in families])
    shared = np.array([prefixes.costs[members[0]] for members in families])
    parts, part_of = np.zeros(len(families), np.int64), np.zeros(len(sizes), np.int64)
    wanted, cuts = parts + 1, 1
    while (wanted > parts).any():
        for family in np.flatnonzero(wanted > parts):
            members = families[family]
            room = cap - int(prefixes.tokens[members[0]])
            part_of[members] = _divided(sizes[members], room, int(wanted[family]))
            parts[family] = part_of[members].max() + 1
        yield _bundled(sizes, costs, prefixes, part_of)
        wanted = parts.copy()
        for _ in range(cuts):
            dearest = np.where(wanted < most, answers / wanted + shared, 0.0)
            if not dearest.any():
                break
            wanted[dearest.argmax()] += 1
        cuts *= 2


def _divided(sizes: np.ndarray, room: int, parts: int) -> np.ndarray:
    """Returns the part of each size, int64 [n]: `parts` of them, or more if it takes more to leave each in the room."""
    parts = max(parts, -(-int(sizes.sum()) // room))
    while parts < len(sizes):
        if (found := pack(sizes, room, parts)) is not None:
            return found
        parts += 1
    return np.arange(len(sizes))


def _bundled(sizes: np.ndarray, costs: np.ndarray, prefixes: Prefixes, part_of: np.ndarray) -> Bundled:
    bundles = _numbered(prefixes.families * (part_of.max(initial=0) + 1) + part_of)
    _, first = np.unique(bundles, return_index=True)
    return Bundled(
        bundles,
        np.bincount(bundles, sizes).astype(np.int64) + prefixes.tokens[first],
        np.bincount(bundles, costs) + prefixes.costs[first],
    )


def by_number(numbers: np.ndarray) -> list[list[int]]:
    """Returns the indices of each of the numbers in int64 [n], in the order in which the numbers come first."""
    found: dict[int, list[int]] = {}
    for index, number in enumerate(numbers.tolist()):
        found.setdefault(number, []).append(index)
    return list(found.values())


def _families(trajectories: Sequence[Trajectory]) -> np.ndarray:
    """Returns int64 [n]: equal numbers for trajectories of one group with equal prompts, and equal routes there."""
    # The length of routes is the experts of a token times the tokens. What divides all lengths is a multiple of the
    # former, in a batch the number itself; as a multiple it only asks for more than the prefix to be equal.
    columns = int(np.gcd.reduce([len(t.routes) for t in trajectories])) if trajectories else 0
    found: dict[Any, list[tuple[int, np.ndarray]]] = {}
    families = np.arange(len(trajectories))
    for index, t in enumerate(trajectories):
        routes = t.routes[: max(len(t.prompt) - 1, 0) * columns]
        alike = found.setdefault((t.epoch, t.prompt_id, t.prompt.tobytes()), [])
        families[index] = next((family for family, own in alike if np.array_equal(own, routes)), index)
        if families[index] == index:
            alike.append((index, routes))
    return families


def _numbered(keys: np.ndarray) -> np.ndarray:
    """Returns int64 [n]: the keys, numbered from 0 in the order in which they come first."""
    _, first, places = np.unique(keys, return_index=True, return_inverse=True)
    numbers = np.empty(len(first), dtype=np.int64)
    numbers[np.argsort(first)] = np.arange(len(first))
    return numbers[places]
