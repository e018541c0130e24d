"""Exact order statistics of values that are spread over replicas, without gathering the values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from areal_megatron.ppo.advantage import Reduce

_BINS = 256


def first_beyond(values: Tensor, within: Callable[[Tensor, Tensor], Tensor], reduce: Reduce) -> float:
    """Returns the smallest value v of all replicas for which `within` is False, or inf if there is none.

    values: float32 [n], not negative. within: (count, sum) of the values up to v, float64 [k] each → bool [k]; if it is
    False for v, it must be False for all larger values.

    This is a radix selection: non-negative floats are ordered as their bits are. For each of four groups of eight bits
    256 counts and sums are reduced, whatever n is.
    """
    # The host has to know each group's result before the next one, and replicas add theirs up on their hosts: it waits
    # for the device once and does the rest itself.
    keys = (values.cpu() + 0.0).contiguous().view(torch.int32)  # −0 becomes 0: its bits are above all others
    chosen, prefix, below = torch.ones_like(keys, dtype=torch.bool), 0, torch.zeros(2, 1, dtype=torch.float64)
    for shift in (24, 16, 8, 0):
        digits = (keys[chosen] >> shift) & (_BINS - 1)
        weights = keys[chosen].view(torch.float32).double()
        counts, sums = torch.bincount(digits, None, _BINS), torch.bincount(digits, weights, _BINS)
        held = reduce(torch.stack([counts.double(), sums]))
        upto = below + held.cumsum(1)
        beyond = ~within(*upto)
        if shift < 24:  # one of these is beyond, even if their sum is rounded differently in this order
            beyond[held[0].nonzero()[-1]] = True
        if not beyond.any():
            return float("inf")
        digit = int(beyond.nonzero()[0])
        below = upto[:, digit - 1 : digit] if digit else below
        prefix = prefix << 8 | digit
        chosen = keys >> shift == prefix
    return torch.tensor(prefix, dtype=torch.int32).view(torch.float32).item()


def quantile(values: Tensor, share: float, count: float, reduce: Reduce) -> float:
    """Returns the `share` quantile of all replicas' values (nearest rank).

    values: float32 [n], not negative; count: their number on all replicas, above 0.
    """
    return first_beyond(values, lambda upto, _: upto < share * count, reduce)
