"""What megatron-core reads off a parameter, of which torch's own type knows nothing."""

from __future__ import annotations

import torch


def mark(parameter: torch.nn.Parameter, **marks: bool) -> None:
    """Sets marks of a parameter.

    sequence_parallel: each rank sees only a part of the tokens, so that Megatron must sum the gradient over tp.
    allreduce: False where the gradient belongs to the experts' groups.
    """
    for name, value in marks.items():
        setattr(parameter, name, value)
