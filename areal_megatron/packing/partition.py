"""Assigns each trajectory of a batch to a replica, a mini-batch and a micro-batch.

Nothing is padded: a micro-batch is one row of whole sequences under a token cap. There are as few micro-batches as the
cap allows, and every replica has as much to compute as the others: `bins.py` forms the micro-batches, `balance.py`
assigns them to replicas. Needs numpy only, since the controller does it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_megatron.data.trajectory import BatchPart, Trajectory
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.packing.balance import Shares
from areal_megatron.packing.bins import lower_bound, pack

WORTH_A_MICROBATCH = 0.01
"""Imbalance above which every replica gets one micro-batch more than needed, if that is better balanced.

Full micro-batches leave nothing to exchange, and one more costs a few kernel launches.
"""


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
) -> list[BatchPart]:
    """Splits a batch into one part for each data-parallel replica; see `partition`.

    The cost of a trajectory is the FLOPs that `flops` counts, or its number of tokens without it.
    """
    lengths, costs = [t.length for t in trajectories], None
    if flops:
        costs = flops(lengths, [int(t.loss_mask.sum()) for t in trajectories])
    numbers: dict[tuple[int, int], int] = {}
    group_of = [numbers.setdefault((t.epoch, t.prompt_id), len(numbers)) for t in trajectories]
    parts = []
    for plan in partition(lengths, replicas, minibatches, cap, seed, costs, multiple):
        mine = [index for minibatch in plan for microbatch in minibatch for index in microbatch]
        place = {index: i for i, index in enumerate(mine)}
        parts.append(
            BatchPart(
                version=version,
                trajectories=[trajectories[index] for index in mine],
                minibatches=[
                    [[place[index] for index in microbatch] for microbatch in minibatch] for minibatch in plan
                ],
                groups=len(numbers),
                group_of=[group_of[index] for index in mine],
            )
        )
    return parts


def partition(
    lengths: Sequence[int],
    replicas: int,
    minibatches: int,
    cap: int,
    seed: int,
    costs: Sequence[float] | None = None,
    multiple: int = 1,
) -> list[list[list[list[int]]]]:
    """Returns the indices of sequences by [replica][mini-batch][micro-batch].

    1. Every sequence comes exactly once.
    2. Mini-batches hold equally many sequences (the first ones one more if they do not divide evenly), drawn in an
       order shuffled by `seed`.
    3. Within a mini-batch the sums of `costs` (tokens, without costs) are balanced between the replicas, and no replica
       is without a sequence.
    4. All replicas have the same number of micro-batches, a multiple of `multiple`; some may be empty if there are few
       sequences.
    5. No micro-batch exceeds `cap` tokens, unless it is a single longer sequence.

    Raises ValueError if a mini-batch has fewer sequences than there are replicas.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    weights = np.asarray(lengths if costs is None else costs, dtype=np.float64)
    order = np.random.default_rng(seed).permutation(len(sizes))
    plan: list[list[list[list[int]]]] = [[] for _ in range(replicas)]
    for chosen in np.array_split(order, minibatches):
        if len(chosen) < replicas:
            raise ValueError(f"a mini-batch of {len(chosen)} sequences cannot be split over {replicas} replicas")
        shares = microbatches(sizes[chosen], weights[chosen], replicas, cap, multiple)
        for replica, share in enumerate(shares):
            plan[replica].append([chosen[members].tolist() for members in share])
    return plan


def microbatches(sizes: np.ndarray, costs: np.ndarray, replicas: int, cap: int, multiple: int) -> list[list[list[int]]]:
    """Returns the indices of the sequences of one mini-batch by [replica][micro-batch]; see `partition`."""
    sizes = np.minimum(sizes, cap)  # a longer sequence gets a micro-batch of its own
    unit = replicas * multiple
    fewest = _shares(sizes, costs, replicas, cap, aligned(lower_bound(sizes, cap), unit), unit)
    if fewest.imbalance <= WORTH_A_MICROBATCH:
        return fewest.microbatches()
    more = _shares(sizes, costs, replicas, cap, len(fewest.owners) + unit, unit)
    return min(fewest, more, key=lambda shares: shares.imbalance).microbatches()


def _shares(sizes: np.ndarray, costs: np.ndarray, replicas: int, cap: int, count: int, unit: int) -> Shares:
    """Returns balanced shares of `count` bins, or of as many units more as it takes to pack the sizes."""
    while (bins := pack(sizes, cap, count)) is None:
        count += unit
    shares = Shares(sizes, costs, bins, cap, count, replicas)
    shares.level()
    return shares


def aligned(count: int, unit: int) -> int:
    """Returns `count` rounded up to a multiple of `unit`."""
    return -(-count // unit) * unit
