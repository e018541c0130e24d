"""Corrections of weights w = π_prox/π_behav far from 1; `ppo.correction` names those to apply, each with a bound.

Weights are given and changed as their logarithms, float64, which no weight overflows. A correction changes the weight
of a token, or masks the token: its weight becomes 0, the logarithm −inf. What is masked depends on the
uncorrected weights. A masked token adds nothing to the loss, but still counts among the tokens and sequences that the
loss is divided by, as in the sources. A weight that is not a number is never masked, so that its step is skipped. To
add a correction, write a function, a line in CORRECTIONS and its name in config/fields.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from areal_megatron.ppo.advantage import Reduce
from areal_megatron.ppo.selection import first_beyond

TRUNCATED, SECOND_MOMENT, NEGATIVE = "truncate", "m2po", "negative_mask"
"""Names in `ppo.correction`. The second needs a whole mini-batch, see `within_second_moment`, and the third the current
policy and the advantages, see `far_negatives`."""

Correction = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(weights so far, uncorrected weights, sequence of each token, bound) → weights; [N] each, weights as logarithms."""


def truncated(weights: Tensor, lag: Tensor, sequences: Tensor, cap: float) -> Tensor:
    """min(weight, cap): truncated importance sampling (TIS: Yao et al., "Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training")."""
    return weights.clamp(max=math.log(cap))


def truncated_product(weights: Tensor, lag: Tensor, sequences: Tensor, cap: float) -> Tensor:
    """The weight of the whole sequence, which is the product over its tokens, up to `cap`, for each of its tokens
    (sequence-level TIS: Liu, Li et al., "When Speed Kills Stability")."""
    return sequence_sum(lag, sequences).clamp(max=math.log(cap))


def _of_token(lag: Tensor, sequences: Tensor) -> Tensor:
    return lag


def _masks(of: Callable[[Tensor, Tensor], Tensor], *, above: bool) -> Correction:
    """Returns the correction that masks where a weight is above, or below, the bound.

    of: (logarithms of the tokens' weights, sequence of each token) → logarithm of the weight that decides, [N] each.
    """

    def masked(weights: Tensor, lag: Tensor, sequences: Tensor, bound: float) -> Tensor:
        deciding = of(lag, sequences)
        return weights.masked_fill(deciding > math.log(bound) if above else deciding < math.log(bound), -math.inf)

    return masked


def sequence_sum(values: Tensor, sequences: Tensor) -> Tensor:
    """Returns, for each value, the sum over its sequence: [N]."""
    places = _numbered(sequences)
    return _sums(values, places)[places].to(values.dtype)


def sequence_products(lag: Tensor, sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the product of the weights of each sequence, up to e^±20, and whether there is such a sequence: [N] each,
    since there are at most as many as tokens."""
    places = _numbered(sequences)
    return _sums(lag, places).clamp(-20, 20).exp(), _sums(torch.ones_like(lag), places) > 0


def sequence_mean(values: Tensor, sequences: Tensor) -> Tensor:
    """Returns, for each value, the mean over its sequence: [N]."""
    places = _numbered(sequences)
    means = _sums(values, places) / _sums(torch.ones_like(values), places).clamp(min=1)
    return means[places].to(values.dtype)


CORRECTIONS: dict[str, Correction] = {
    "product_truncate": truncated_product,
    TRUNCATED: truncated,
    "mask_low": _masks(_of_token, above=False),
    "mask_high": _masks(_of_token, above=True),
    "sequence_mask_low": _masks(sequence_mean, above=False),
    "sequence_mask_high": _masks(sequence_mean, above=True),
    "product_mask_low": _masks(sequence_sum, above=False),
    "product_mask_high": _masks(sequence_sum, above=True),
}
"""In the order in which they are applied.

Masking tokens is IcePop (arXiv 2510.18855), and above a bound alone what AReaL does since boba². A sequence is masked
by the geometric mean of its weights, which does not grow with its length (Geo-Mask: Li and Liu, "When Speed Kills
Stability", part 3), or by their product (MIS: the same, part 2).
"""


def corrected(lag: Tensor, sequences: Tensor, kept: Tensor, bounds: Mapping[str, float]) -> Tensor:
    """Returns the corrected weights [N] from the weights, both as logarithms; −inf where `kept` is False.

    bounds: name → bound of each correction to apply. The sequences must be whole, so that packing changes nothing.
    """
    weights = lag
    for name, correct in CORRECTIONS.items():
        if name in bounds:
            weights = correct(weights, lag, sequences, bounds[name])
    return weights.masked_fill(~kept, -math.inf)


def far_negatives(drift: Tensor, advantages: Tensor, sequences: Tensor, bound: float) -> Tensor:
    """Returns which tokens DeepSeek-V3.2 masks, bool [N] (arXiv 2512.02556, "Off-Policy Sequence Masking").

    They have a negative advantage and are of a sequence that the current policy has left: the mean of log π_behav/π_θ
    over its tokens is above `bound`. drift: log π_θ/π_behav.
    """
    return (advantages < 0) & (-sequence_mean(drift, sequences) > bound)


def within_second_moment(lag: Tensor, threshold: float, reduce: Reduce) -> Tensor:
    """Returns which tokens M2PO keeps, bool [N] (arXiv 2510.01161).

    The tokens of a mini-batch with the largest (log π_prox/π_behav)² are masked until the mean over the others is at
    most `threshold`. Equal ones are masked together. lag: the log weights of this replica's part of the mini-batch.
    Collective.
    """
    moments = lag.float().square()
    ordered = moments.nan_to_num(torch.inf, posinf=torch.inf)
    return ~(moments >= first_beyond(ordered, lambda count, total: total <= threshold * count, reduce))


def _numbered(sequences: Tensor) -> Tensor:
    """Returns the numbers of the sequences without gaps: int64 [N]."""
    # There are then as many sequences as values at most, and nobody has to wait for their number.
    return (sequences.diff(prepend=sequences.new_full((1,), -1)) != 0).cumsum(0) - 1


def _sums(values: Tensor, places: Tensor) -> Tensor:
    # As float64, since what is rounded away in a logarithm of a product is missing in the product.
    return torch.zeros_like(values, dtype=torch.float64).index_add(0, places, values.double())
