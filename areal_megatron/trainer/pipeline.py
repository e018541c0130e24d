"""Micro-batches through the pipeline stages, with Megatron's 1F1B schedules (or without one, on one stage)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from areal_megatron.trainer.adapter import dropping
from areal_megatron.trainer.batch import MicroBatch, RowPart, pack
from areal_megatron.trainer.parallel import tensor_parallel_group

Work = tuple[MicroBatch, Callable[[Tensor], Any]]
"""A micro-batch, and the function that the last stage applies to the output of the model: final hidden states
[T, 1, h], or values [T]."""

Chunks = list[DistributedDataParallel]
"""The models of this rank, one for each of its virtual pipeline stages."""


def forward_backward(chunks: Chunks, work: Sequence[Work], left_out: int = 0) -> None:
    """Computes the gradient of the mean loss over the trained tokens of all micro-batches and replicas.

    The function of each micro-batch returns the sum of the losses of its trained tokens. Every replica must pass the
    same number of micro-batches. `left_out`: this rank's trained tokens that have no gradient. They count in the mean.
    """
    with dropping():
        _run(chunks, work, forward_only=False, left_out=left_out)


@torch.no_grad()
def forward(chunks: Chunks, work: Sequence[Work]) -> list[Any]:
    """Returns the results of the functions, in order; [] on other stages than the last."""
    return _run(chunks, work, forward_only=True)[-len(work) :]


def token_count(work: Sequence[Work]) -> int:
    """The number of this rank's tokens of the micro-batches, trained or not."""
    return sum(microbatch.tokens.numel() for microbatch, _ in work)


def _run(chunks: Chunks, work: Sequence[Work], forward_only: bool, left_out: int = 0) -> list[Any]:
    # The empty ones come first: gradients are reduced in the backward pass of the last micro-batch, which must reach
    # every parameter, the output layer's too.
    work = [*_filling(chunks, len(work)), *work]
    trained = [len(microbatch.rows) for microbatch, _ in work]
    trained[0] += left_out
    return get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=[zip(work, trained, strict=True) for _ in chunks],
        model=[*chunks],
        num_microbatches=len(work),
        seq_length=work[0][0].tokens.size(1),  # Megatron asks for a length; stages send each other the true one
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
        **_communication(chunks, work),
    )


def _communication(chunks: Chunks, work: Sequence[Work]) -> dict[str, Any]:
    if chunks[0].config.pipeline_model_parallel_size == 1:
        return {}
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp", "embd", "pos_embd", "dp_cp"])
    return {"p2p_communicator": Stages(chunks, work, groups.pp), "pg_collection": groups}


class Stages(P2PCommunicator):
    """The messages between the pipeline stages, of shapes that all ranks of the replica know.

    Where lengths vary, Megatron sends the shape before each message and waits for the whole device to read it. That
    includes what is being sent to the engines: no stage would go on before all of them have received their weights.
    """

    def __init__(self, chunks: Chunks, work: Sequence[Work], group: torch.distributed.ProcessGroup):
        config = chunks[0].config
        super().__init__(group, config)
        self._rest = [1, config.hidden_size]
        sharded = config.tensor_model_parallel_size if config.sequence_parallel else 1
        rows = [microbatch.tokens.size(1) // sharded for microbatch, _ in work]
        order = get_schedule_table(len(work), len(chunks), config.microbatch_group_size_per_vp_stage)
        # A rank computes in this order, and so does the one that it receives from. Only what goes around, from the
        # last rank to the first, has a virtual stage less: the output of the model goes nowhere.
        own = [rows[number] for number, _ in order]
        around = [rows[number] for number, stage in order if stage < len(chunks) - 1]
        self._forwards = iter(around if group.rank() == 0 else own)
        self._backwards = iter(around if group.rank() == group.size() - 1 else own)

    def _communicate_shapes(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next):
        """Returns the shapes of what is received next from the stages before and after."""
        return self._next(self._forwards, recv_prev), self._next(self._backwards, recv_next)

    def _next(self, rows: Iterator[int], received: bool) -> list[int] | None:
        return [next(rows), *self._rest] if received else None


def _filling(chunks: Chunks, count: int) -> list[Work]:
    """The empty micro-batches that make `count` a multiple of the number of stages, as virtual stages require."""
    missing = -count % chunks[0].config.pipeline_model_parallel_size if len(chunks) > 1 else 0
    if not missing:
        return []
    empty = pack([], [], RowPart.of(chunks[0].config, next(chunks[0].parameters()).device))
    return [(empty, lambda hidden: 0.0 * hidden.sum())] * missing


def _forward_step(iterator, chunk):
    (microbatch, function), trained = next(iterator)
    hidden = chunk(
        microbatch.tokens, None, None, packed_seq_params=microbatch.packed, padding_mask=_unbalanced(chunk, microbatch)
    )

    def finish(hidden: Tensor, non_loss_data: bool = False) -> Any:
        result = function(hidden)
        if non_loss_data:
            return result
        return result, hidden.new_full((), trained, dtype=torch.int), None

    return hidden, finish


def _unbalanced(chunk: DistributedDataParallel, microbatch: MicroBatch) -> Tensor | None:
    """bool [1, T]: the tokens that do not count in the routers' load-balancing loss; None without that loss."""
    if not chunk.config.moe_aux_loss_coeff:
        return None
    untrained = microbatch.untrained
    if chunk.config.sequence_parallel and not chunk.module.pre_process:  # Megatron cuts it for the first stage only
        group = tensor_parallel_group()
        untrained = untrained.chunk(group.size(), dim=1)[group.rank()]
    return untrained
