"""Micro-batches through the pipeline stages, with Megatron's 1F1B schedule (or without one, on one stage)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from areal_megatron.trainer.batch import MicroBatch

Work = tuple[MicroBatch, Callable[[Tensor], Any]]
"""A micro-batch, and what the last stage makes of its final hidden states [T, 1, h]."""


def forward_backward(model: DistributedDataParallel, work: Sequence[Work]) -> None:
    """Gradients of the summed losses over the number of trained tokens, both of all micro-batches and replicas.

    The function of each micro-batch gives the sum of the losses of its trained tokens. Every replica must
    call with the same number of micro-batches.
    """
    _run(model, work, forward_only=False)


@torch.no_grad()
def forward(model: DistributedDataParallel, work: Sequence[Work]) -> list[Any]:
    """What the functions return, in order; [] on other stages than the last."""
    return _run(model, work, forward_only=True)


def _run(model: DistributedDataParallel, work: Sequence[Work], forward_only: bool) -> list[Any]:
    return get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=iter(work),
        model=[model],
        num_microbatches=len(work),
        seq_length=work[0][0].tokens.size(1),  # a bound that Megatron asks for; stages send each other the true one
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _forward_step(iterator, model):
    microbatch, function = next(iterator)
    hidden = model(microbatch.tokens, None, None, packed_seq_params=microbatch.packed)

    def finish(hidden: Tensor, non_loss_data: bool = False) -> Any:
        result = function(hidden)
        if non_loss_data:
            return result
        return result, torch.tensor(len(microbatch.rows), dtype=torch.int, device=hidden.device), None

    return hidden, finish
