"""How close the residual stream of a model in float16 comes to the end of that dtype's range."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from areal_megatron.trainer.pipeline import Chunks
from areal_megatron.trainer.token_sums import TokenSums

RESIDUAL_MAX = "residual_max"
END = torch.finfo(torch.float16).max


class Residual:
    """Looks at what each layer of this rank hands on, once an update: in the layer's first forward pass.

    The loss's scale keeps gradients in range, but nothing does so for activations. Models in other dtypes are not
    looked at.
    """

    def __init__(self, chunks: Chunks):
        self._watches = chunks[0].config.params_dtype == torch.float16
        models: list[Any] = [chunk.module for chunk in chunks]
        self._layers = [layer for model in models for layer in model.decoder.layers] if self._watches else []
        self._unseen: set[int] = set()
        self._largest: list[torch.Tensor] = []
        for number, layer in enumerate(self._layers):
            layer.register_forward_hook(partial(self._look, number))

    def begin(self) -> None:
        """Has the next forward pass looked at."""
        self._unseen, self._largest = set(range(len(self._layers))), []

    def add_to(self, sums: TokenSums) -> tuple[str, ...]:
        """Adds the largest absolute value that was seen to the maxima, END if it was not finite, and returns its name,
        the same on all ranks; nothing if nobody looks. The host waits for nothing."""
        if self._largest:
            largest = torch.stack(self._largest).float().nan_to_num(END, END).amax()
            sums.add({}, {RESIDUAL_MAX: largest.clamp(max=END)})
        return (RESIDUAL_MAX,) if self._watches else ()

    @torch.no_grad()
    def _look(self, number: int, _layer: Any, _inputs: Any, output: Any) -> None:
        if number in self._unseen:
            self._unseen.remove(number)
            least, most = torch.aminmax(output[0] if isinstance(output, tuple) else output)
            self._largest.append(torch.maximum(-least, most))
