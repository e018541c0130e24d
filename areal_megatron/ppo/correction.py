"""Corrections of weights π_prox/π_behav far from 1; `ppo.correction` names those to apply, each with a threshold.

A correction changes the weight of a token, or masks the token: its weight becomes 0. A masked token adds nothing to the
loss, but still counts among the tokens and sequences that the loss is divided by, as in the sources. A weight that is
not a number is never masked, so that its step is skipped. To add a correction, write a function, a line in CORRECTIONS
and its name in config.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from areal_megatron.ppo.advantage import Reduce
from areal_megatron.ppo.selection import first_beyond

TRUNCATED, SECOND_MOMENT = "truncate", "m2po"
"""Names in `ppo.correction`. The second needs a whole mini-batch, see `within_second_moment`."""


def truncated(weights: Tensor, lag: Tensor, sequences: Tensor, cap: float) -> Tensor:
    """min(weight, cap): truncated importance sampling (AReaL caps at 5)."""
    return weights.clamp(max=cap)


def icepop(weights: Tensor, lag: Tensor, sequences: Tensor, bound: float) -> Tensor:
    """Masks tokens whose weight is outside [1/bound, bound] (IcePop, arXiv 2510.18855; there from α to β)."""
    return weights.masked_fill(lag.abs() > math.log(bound), 0)


def sequence_mask(weights: Tensor, lag: Tensor, sequences: Tensor, bound: float) -> Tensor:
    """Masks sequences whose geometric mean of weights is outside [1/bound, bound].

    Unlike the product of the weights it does not grow with the length (Geo-Mask: Li and Liu, "When Speed Kills
    Stability", part 3).
    """
    return weights.masked_fill(sequence_mean(lag, sequences).abs() > math.log(bound), 0)


CORRECTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    TRUNCATED: truncated,
    "icepop": icepop,
    "sequence_mask": sequence_mask,
}
"""(weights so far, logarithms of the uncorrected weights, sequence of each token, threshold) → weights, [N] each."""


def corrected(lag: Tensor, sequences: Tensor, kept: Tensor, thresholds: Mapping[str, float]) -> Tensor:
    """Returns the corrected weights [N] from the logarithms of the weights; 0 where `kept` is False.

    The sequences must be whole, so that packing changes nothing.
    """
    weights = lag.exp()
    for name, correct in CORRECTIONS.items():
        if name in thresholds:
            weights = correct(weights, lag, sequences, thresholds[name])
    return weights.masked_fill(~kept, 0)


def within_second_moment(lag: Tensor, threshold: float, reduce: Reduce) -> Tensor:
    """Returns which tokens M2PO keeps, bool [N] (arXiv 2510.01161).

    The tokens of a mini-batch with the largest (log π_prox/π_behav)² are masked until the mean over the others is at
    most `threshold`. Equal ones are masked together. lag: the log weights of this replica's part of the mini-batch.
    Collective.
    """
    moments = lag.float().square()
    ordered = moments.nan_to_num(torch.inf, posinf=torch.inf)
    return ~(moments >= first_beyond(ordered, lambda count, total: total <= threshold * count, reduce))


def sequence_mean(values: Tensor, sequences: Tensor) -> Tensor:
    """Returns, for each value, the mean over its sequence: [N]."""
    # Numbered without gaps there are as many sequences as values at most, and nobody has to wait for their number.
    begins = sequences.diff(prepend=sequences.new_full((1,), -1)) != 0
    sequences = begins.cumsum(0) - 1
    total = torch.zeros_like(values).index_add(0, sequences, values)
    lengths = torch.zeros_like(values).index_add(0, sequences, torch.ones_like(values))
    return (total / lengths.clamp(min=1))[sequences]
