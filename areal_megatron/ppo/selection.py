"""Order statistics of values that are spread over replicas, exact, without bringing the values together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from areal_megatron.ppo.advantage import Reduce

_BINS = 256


def first_beyond(values: Tensor, within: Callable[[Tensor, Tensor], Tensor], reduce: Reduce) -> float:
    """The smallest of the values for which, of all values up to and including it, `within` is False; inf if there is
    none.

    values: float32 [n], not negative. within: (count, sum), float64 [k] each → bool [k]; once False, it must be so for
    all larger values. Radix selection: non-negative floats are ordered as their bits are, and four times 256 counts and
    sums, by eight bits each, are reduced whatever n is.
    """
    keys = values.contiguous().view(torch.int32)
    chosen, prefix, below = torch.ones_like(keys, dtype=torch.bool), 0, torch.zeros(2, 1, dtype=torch.float64)
    for shift in (24, 16, 8, 0):
        digits = (keys[chosen] >> shift) & (_BINS - 1)
        counts, sums = (torch.bincount(digits, weights, _BINS) for weights in (None, values[chosen].double()))
        held = reduce(torch.stack([counts.double(), sums]).cpu())
        upto = below + held.cumsum(1)
        beyond = ~within(*upto)
        if shift < 24:  # it is among these, even where their sum in this order is rounded otherwise
            beyond[held[0].nonzero()[-1]] = True
        if not beyond.any():
            return float("inf")
        digit = int(beyond.nonzero()[0])
        below = upto[:, digit - 1 : digit] if digit else below
        prefix = prefix << 8 | digit
        chosen = keys >> shift == prefix
    return torch.tensor(prefix, dtype=torch.int32).view(torch.float32).item()


def quantile(values: Tensor, share: float, count: float, reduce: Reduce) -> float:
    """The smallest of all replicas' values, `count` together, that at least that share of them do not exceed.

    values: float32 [n], not negative; `count` above 0.
    """
    return first_beyond(values, lambda upto, _: upto < share * count, reduce)
