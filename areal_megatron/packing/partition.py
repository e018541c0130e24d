"""Assigns each trajectory of a batch to a replica, a mini-batch and a micro-batch.

Nothing is padded: a micro-batch is one row of whole sequences under a token cap. There are as few micro-batches as the
cap allows, and every replica has as much to compute as the others: `bins.py` forms the micro-batches, `balance.py`
assigns them to replicas. Needs numpy only, since the controller does it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import numpy as np

from areal_megatron.config.algorithms import are_equal
from areal_megatron.data.trajectory import BatchPart, Trajectory
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.packing.balance import Shares
from areal_megatron.packing.bins import lower_bound, pack
from areal_megatron.packing.sharing import Prefixes, bundlings, by_number

WORTH_A_MICROBATCH = 0.01
"""Imbalance above which every replica gets one micro-batch more than needed, if that is better balanced.

Full micro-batches leave nothing to exchange, and one more costs a few kernel launches.
"""
MORE = 0.001
"""The share of micro-batches that are added where sequences do not fit: thousands, one by one, would take minutes."""


def split(
    trajectories: Sequence[Trajectory],
    *,
    version: int,
    replicas: int,
    minibatches: int,
    cap: int,
    seed: int,
    flops: SequenceFlops | None = None,
    multiple: int = 1,
    share_prompts: bool = False,
    within_group: bool = False,
) -> list[BatchPart]:
    """Splits a batch into one part for each data-parallel replica; see `partition`. Groups stay together.

    The cost of a trajectory is the FLOPs that `flops` counts, or its number of tokens without it. With `share_prompts`
    the parts have bundles (`sharing.py`), else single trajectories only. `within_group`: groups whose answers all have
    the same return have no gradient.
    """
    flops = flops or SequenceFlops(token=1.0, trained=0.0, pair=0.0)
    lengths = [t.length for t in trajectories]
    costs = flops(lengths, [int(t.loss_mask.sum()) for t in trajectories])
    prefixes = Prefixes.of(trajectories, costs, flops) if share_prompts else Prefixes.none(len(trajectories))
    numbers: dict[tuple[int, int], int] = {}
    group_of = [numbers.setdefault((t.epoch, t.prompt_id), len(numbers)) for t in trajectories]
    episodes: dict[int, int] = {}
    episode_of = [episodes.setdefault(t.uid, len(episodes)) for t in trajectories]
    idle = _idle(trajectories, group_of) if within_group else None
    parts = []
    for plan in partition(lengths, replicas, minibatches, cap, seed, costs, multiple, group_of, prefixes, idle):
        mine = [index for minibatch in plan for microbatch in minibatch for index in microbatch]
        place = {index: i for i, index in enumerate(mine)}
        parts.append(
            BatchPart(
                version=version,
                trajectories=[trajectories[index] for index in mine],
                minibatches=[
                    [
                        [[place[index] for index in bundle] for bundle in prefixes.bundles(microbatch)]
                        for microbatch in minibatch
                    ]
                    for minibatch in plan
                ],
                groups=len(numbers),
                group_of=[group_of[index] for index in mine],
                episodes=len(episodes),
                episode_of=[episode_of[index] for index in mine],
            )
        )
    return parts


def _idle(trajectories: Sequence[Trajectory], group_of: Sequence[int]) -> list[bool]:
    """Returns whether each trajectory is of a group whose answers all have the same return."""
    returns: dict[int, list[float]] = defaultdict(list)
    for trajectory, group in zip(trajectories, group_of, strict=True):
        returns[group] += [value for trained, value in trajectory.answers if trained]
    idle = {group: not own or are_equal(own) for group, own in returns.items()}
    return [idle[group] for group in group_of]


def partition(
    lengths: Sequence[int],
    replicas: int,
    minibatches: int,
    cap: int,
    seed: int,
    costs: Sequence[float] | np.ndarray | None = None,
    multiple: int = 1,
    groups: Sequence[int] | np.ndarray | None = None,
    prefixes: Prefixes | None = None,
    idle: Sequence[bool] | None = None,
) -> list[list[list[list[int]]]]:
    """Returns the indices of sequences by [replica][mini-batch][micro-batch].

    1. Every sequence comes exactly once.
    2. Mini-batches hold equally many sequences (the first ones one more if they do not divide evenly). They take one
       group after the other, in an order shuffled by `seed`, so that a group is cut only where one of them ends and the
       next begins. `groups` has the group of each sequence; without it each is a group of its own.
    3. Within a mini-batch the sums of `costs` (tokens, without costs) are balanced between the replicas, and no replica
       is without a sequence.
    4. All replicas have the same number of micro-batches, a multiple of `multiple`; some may be empty if there are few
       sequences.
    5. No micro-batch exceeds `cap` tokens, unless it is a single longer sequence.
    6. Sequences that are `idle`, which have no gradient, are in no micro-batch with others, if both kinds suffice for
       all replicas. The others come first, and the costs of each kind are balanced.

    In one micro-batch, what sequences share by `prefixes` is counted once, in tokens and in costs. So the members of a
    family stay together as far as that makes the costliest replica's share less.

    Raises ValueError if a mini-batch has fewer sequences than there are replicas.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    weights = np.asarray(lengths if costs is None else costs, dtype=np.float64)
    prefixes = prefixes or Prefixes.none(len(sizes))
    order = _shuffled(np.arange(len(sizes)) if groups is None else np.asarray(groups), seed)
    plan: list[list[list[list[int]]]] = [[] for _ in range(replicas)]
    for chosen in np.array_split(order, minibatches):
        if len(chosen) < replicas:
            raise ValueError(f"a mini-batch of {len(chosen)} sequences cannot be split over {replicas} replicas")
        kinds = [chosen]
        if idle is not None:
            kinds = _apart(chosen, np.asarray(idle)[chosen], replicas)
        packed = [microbatches(sizes[kind], weights[kind], replicas, cap, multiple, prefixes[kind]) for kind in kinds]
        for replica in range(replicas):
            own = zip(kinds, packed, strict=True)
            plan[replica].append([kind[members].tolist() for kind, shares in own for members in shares[replica]])
    return plan


def _apart(chosen: np.ndarray, idle: np.ndarray, replicas: int) -> list[np.ndarray]:
    """Returns the sequences of a mini-batch: the idle ones apart from the others, or all together where one kind is too
    few for the replicas."""
    if min(idle.sum(), (~idle).sum()) < replicas:
        return [chosen]
    return [chosen[~idle], chosen[idle]]


def _shuffled(groups: np.ndarray, seed: int) -> np.ndarray:
    """Returns the indices of the sequences, int64 [n], group by group in an order drawn by the seed."""
    labels, numbers = np.unique(groups, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    return np.argsort(np.argsort(order)[numbers], kind="stable")


def microbatches(
    sizes: np.ndarray, costs: np.ndarray, replicas: int, cap: int, multiple: int, prefixes: Prefixes
) -> list[list[list[int]]]:
    """Returns the indices of the sequences of one mini-batch by [replica][micro-batch]; see `partition`.

    Of the ways to bundle them, it takes the one whose costliest replica costs least, the coarsest of equal ones.
    """
    prefixes = prefixes.within(sizes, cap)
    sizes = np.minimum(sizes, cap)  # a longer sequence gets a micro-batch of its own
    best, best_bundles, least = None, None, np.inf
    for bundled in bundlings(sizes, costs, prefixes, cap):
        if bundled.costs.sum() / replicas >= least:  # those that follow cost more still
            break
        if len(bundled.sizes) >= replicas:
            shares = _balanced(bundled.sizes, bundled.costs, replicas, cap, multiple)
            if shares.totals.max() < least:
                best, best_bundles, least = shares, bundled.bundles, shares.totals.max()
    assert best is not None and best_bundles is not None  # the last bundling has every sequence in a bundle of its own
    if len(best.sizes) == len(sizes):  # each is a bundle of its own
        return best.microbatches()
    members = by_number(best_bundles)
    return [[[*chain(*(members[b] for b in microbatch))] for microbatch in share] for share in best.microbatches()]


def _balanced(sizes: np.ndarray, costs: np.ndarray, replicas: int, cap: int, multiple: int) -> Shares:
    unit = replicas * multiple
    fewest = _shares(sizes, costs, replicas, cap, aligned(lower_bound(sizes, cap), unit), unit)
    if fewest.imbalance <= WORTH_A_MICROBATCH:
        return fewest
    more = _shares(sizes, costs, replicas, cap, len(fewest.owners) + unit, unit)
    return min(fewest, more, key=lambda shares: shares.imbalance)


def _shares(sizes: np.ndarray, costs: np.ndarray, replicas: int, cap: int, count: int, unit: int) -> Shares:
    """Returns balanced shares of `count` bins, or of about as many units more as it takes to pack the sizes."""
    while (bins := pack(sizes, cap, count)) is None:
        count += aligned(max(int(MORE * count), 1), unit)
    shares = Shares(sizes, costs, bins, cap, count, replicas)
    shares.level()
    return shares


def aligned(count: int, unit: int) -> int:
    """Returns `count` rounded up to a multiple of `unit`."""
    return -(-count // unit) * unit
