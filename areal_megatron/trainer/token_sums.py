"""Sums, maxima and quantiles over the trained tokens of a batch, wherever they were trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from areal_megatron.ppo.selection import quantile
from areal_megatron.trainer.parallel import Parallel


@dataclass
class TokenSums:
    """Values stay on the device until the totals are asked for."""

    sums: dict[str, list[Tensor]] = field(default_factory=dict)
    maxima: dict[str, list[Tensor]] = field(default_factory=dict)
    values: dict[str, list[Tensor]] = field(default_factory=dict)
    """float32 [n] each, not negative: every single one is kept."""

    def add(self, sums: dict[str, Tensor], maxima: dict[str, Tensor], values: dict[str, Tensor] | None = None) -> None:
        for store, new in ((self.sums, sums), (self.maxima, maxima), (self.values, values or {})):
            for name, value in new.items():
                store.setdefault(name, []).append(value.detach())

    def totals(self, parallel: Parallel, sums: Sequence[str], maxima: Sequence[str] = ()) -> dict[str, float]:
        """The named sums and maxima over all ranks, the same on each; 0 for what no rank has added.

        Only the last stage adds anything, and its tensor-parallel ranks all the same.
        """
        total = parallel.sum_of_last_stages(_reduced(self.sums, sums, torch.sum))
        largest = parallel.max_over_ranks(_reduced(self.maxima, maxima, torch.amax))
        return dict(zip((*sums, *maxima), (*total.tolist(), *largest.tolist()), strict=True))

    def quantile(self, parallel: Parallel, name: str, share: float, count: float) -> float:
        """Of the named values over all ranks, `count` together and more than 0: the least that `share` do not
        exceed."""
        values = torch.cat(self.values.get(name, [torch.zeros(0)]))
        return quantile(values, share, count, parallel.sum_of_last_stages)


def _reduced(values: dict[str, list[Tensor]], names: Sequence[str], reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """float64 [names], on the CPU"""
    zero = torch.zeros(())
    columns = [reduce(torch.stack(values.get(name, [zero])).double()).cpu() for name in names]
    return torch.stack(columns) if columns else torch.zeros(0, dtype=torch.float64)
