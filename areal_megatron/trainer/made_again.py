"""A tensor that is freed once it has been used, and made again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from torch import Tensor


def made_again(make: Callable[..., Tensor], inputs: tuple[Any, ...], use: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns use(make(*inputs)), where the backward pass makes again what `use` is given and keeps for it."""
    again = CheckpointWithoutOutput()
    output = use(again.checkpoint(make, *inputs))
    again.discard_output_and_register_recompute(output)
    return output
