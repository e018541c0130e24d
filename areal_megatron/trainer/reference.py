"""A second, frozen set of weights for the trainer's model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Reference:
    """The weights that a rank's parameters have when this is made: a copy of them, in their dtype, on their device."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]):
        self._parameters = list(parameters)
        self._weights = [parameter.data.clone() for parameter in self._parameters]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the model computes with the frozen weights. The live ones stay where they are, so that whoever
        holds their storage (publishing, checkpoints, the optimizer) may go on."""
        live = [parameter.data for parameter in self._parameters]
        try:
            self._bind(self._weights)
            yield
        finally:
            self._bind(live)

    def _bind(self, values: Iterable[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value
