"""Short causal convolutions over packed rows, one filter for each channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal_megatron.trainer.copies import to_device


@dataclass(frozen=True)
class Earlier:
    """Where each of a row's T tokens finds the one that is a number of places before it in its sequence."""

    absent: Tensor
    """bool [T, 1]: the tokens for which it is not so many places before them in the row."""
    after: Tensor | None
    """int64: the tokens that find it at the end of the prefix that they continue; None if no run continues one."""
    found: Tensor | None
    """int64: what these find."""

    @classmethod
    def of(cls, sizes: Sequence[int], parents: Sequence[int], back: int, device: torch.device | str) -> Earlier:
        """`sizes`: the tokens of each run; `parents`: the number of the run that it continues, −1 if none."""
        starts = np.cumsum((0, *sizes))
        absent = np.concatenate([np.arange(size) < back for size in sizes])[:, None]
        pairs = [
            (starts[run] + place, starts[parent + 1] + place - back)
            for run, (size, parent) in enumerate(zip(sizes, parents, strict=True))
            if parent >= 0
            for place in range(max(back - sizes[parent], 0), min(back, size))
        ]
        if not pairs:
            return cls(to_device(absent, device), None, None)
        after, found = np.array(pairs, np.int64).T.copy()
        return cls(to_device(absent, device), to_device(after, device), to_device(found, device))


def convolved(x: Tensor, weight: Tensor, earlier: Callable[[int], Earlier]) -> Tensor:
    """Returns float32 [T, channels]: x [T, channels] of each token and of those before it in its sequence, times
    `weight`, [channels, tokens], whose last column is for the token itself."""
    weight = weight.float()
    out = x * weight[:, -1]
    for back in range(1, weight.size(1)):
        own, steps = weight[:, -1 - back], earlier(back)
        out = out + F.pad(x, (0, 0, back, 0))[: len(x)].masked_fill(steps.absent, 0) * own
        if steps.after is not None:
            out = out.index_add(0, steps.after, x.index_select(0, steps.found) * own)
    return out
