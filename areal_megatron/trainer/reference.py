"""A second, frozen set of weights for the trainer's model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Reference:
    """A copy of a rank's parameters as they are at construction, in their dtype and on their device."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]):
        self._parameters = list(parameters)
        self._weights = [parameter.data.clone() for parameter in self._parameters]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the model computes with the frozen weights.

        The live weights keep their storage, so that publishing, checkpoints and the optimizer may use it meanwhile.
        """
        live = [parameter.data for parameter in self._parameters]
        try:
            self._bind(self._weights)
            yield
        finally:
            self._bind(live)

    def _bind(self, values: Iterable[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value
