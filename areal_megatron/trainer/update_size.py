"""How far an update moves the weights, relative to their size: ‖θ_after − θ_before‖ / ‖θ_before‖."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_megatron.trainer.optimizer import ModelOptimizer
from areal_megatron.trainer.parallel import Parallel

WHOLE = 2**16
"""Tensors of up to this number of elements are compared as a whole; of larger ones, every STRIDE-th element is."""
STRIDE = 61
"""A prime, since the rows of matrices are multiples of small numbers: else only some columns would be compared."""


class UpdateSize:
    """Keeps a sample of the main weights of this rank, a sixtieth of them, from its construction on."""

    def __init__(self, optimizer: ModelOptimizer):
        self._weights = [values.detach().view(-1) for values in optimizer.main_weights()]
        self._strides = [1 if values.numel() <= WHOLE else STRIDE for values in self._weights]
        self._before = [sample.clone() for sample in self._sampled()]

    def relative(self, parallel: Parallel) -> float:
        """Returns the size of the change of all ranks' weights since then. Collective; the host waits once."""
        sums = torch.zeros(2, dtype=torch.float64)
        if self._before:
            moved = torch._foreach_sub(self._sampled(), self._before)
            norms = torch.stack([torch.stack(torch._foreach_norm(each)) for each in (moved, self._before)])
            shares = [len(s) / len(w) for s, w in zip(self._before, self._weights, strict=True)]
            sums = (norms.cpu().double().square() / torch.tensor(shares, dtype=torch.float64)).sum(1)
        change, size = parallel.sum_over_ranks(sums).tolist()
        return (change / size) ** 0.5 if size else 0.0

    def _sampled(self) -> list[Tensor]:
        return [values[::stride] for values, stride in zip(self._weights, self._strides, strict=True)]
