"""Sums, maxima and quantiles over the trained tokens of a batch, on whichever ranks they were trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from areal_megatron.ppo.selection import quantile
from areal_megatron.trainer.parallel import Parallel

LEFT_OUT = -1.0
"""In place of a value of `TokenSums.values` that no quantile counts."""


@dataclass
class TokenSums:
    """Collects what micro-batches add, by name. The tensors stay on the device until the totals are asked for."""

    sums: dict[str, list[Tensor]] = field(default_factory=dict)
    maxima: dict[str, list[Tensor]] = field(default_factory=dict)
    values: dict[str, list[Tensor]] = field(default_factory=dict)
    """Values of single tokens, for quantiles: float32 [n], not negative, or LEFT_OUT: selecting those that count would
    wait for the device in every micro-batch."""

    def add(self, sums: dict[str, Tensor], maxima: dict[str, Tensor], values: dict[str, Tensor] | None = None) -> None:
        for store, new in ((self.sums, sums), (self.maxima, maxima), (self.values, values or {})):
            for name, value in new.items():
                store.setdefault(name, []).append(value.detach())

    def totals(self, parallel: Parallel, sums: Sequence[str], maxima: Sequence[str] = ()) -> dict[str, float]:
        """Returns the named sums and maxima over all ranks, the same on each; 0 for what no rank has added.

        Only ranks of the last stage add anything, and tensor-parallel ranks add the same.
        """
        total = parallel.sum_of_last_stages(_reduced(self.sums, sums, torch.sum))
        largest = parallel.max_over_ranks(_reduced(self.maxima, maxima, torch.amax))
        return dict(zip((*sums, *maxima), (*total.tolist(), *largest.tolist()), strict=True))

    def quantile(self, parallel: Parallel, name: str, share: float, count: float) -> float:
        """Returns the `share` quantile of the values `name` over all ranks (nearest rank).

        `count`: the number of these values on all ranks, above 0. What is not a number counts as infinite.
        """
        values = torch.cat(self.values.get(name, [torch.zeros(0)])).cpu().nan_to_num(torch.inf, torch.inf)
        return quantile(values[values != LEFT_OUT], share, count, parallel.sum_of_last_stages)


def _reduced(values: dict[str, list[Tensor]], names: Sequence[str], reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """float64 [names], on the CPU; 0 for names without values."""
    known = [name for name in names if name in values]
    reduced = torch.zeros(len(names), dtype=torch.float64)
    if known:  # the host waits for the batch's micro-batches, once for all names
        columns = torch.stack([reduce(torch.stack(values[name]).double()) for name in known])
        reduced[[names.index(name) for name in known]] = columns.cpu()
    return reduced


def number_of(values: Tensor) -> Tensor:
    """Returns how many values there are, on their device."""
    return values.new_full((), len(values), dtype=torch.int64)
