"""The part of a checkpoint that one trainer rank stores: its own part of every parameter and optimizer state.

The parts of all ranks together are the tensors that megatron-core's dist_checkpointing reads (torch_dist, optimizer
in the format fully_reshardable), each element once. The distributed optimizer gives each rank a run of elements of a
parameter; such runs are stored as the boxes that they are, so that nothing has to be gathered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch import Tensor

from areal_megatron.checkpoint import torch_dist
from areal_megatron.checkpoint.torch_dist import ADAPTER
from areal_megatron.checkpoint.torch_dist_file import Stored
from areal_megatron.models.pattern import name_at, numbers
from areal_megatron.reshard.boxes import Box, Layout, boxes
from areal_megatron.trainer.learner import Learner
from areal_megatron.trainer.model import named_parameters
from areal_megatron.trainer.optimizer import ModelOptimizer, Own
from areal_megatron.trainer.parallel import replicas
from areal_megatron.trainer.pipeline import Chunks
from areal_megatron.trainer.trainer import Trainer

METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",  # optimizer states in the shapes of their parameters
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""How megatron-core names and shapes what is in a checkpoint."""
GENERATORS = "generators"


def prefix(name: str) -> str:
    """Returns the prefix of a learner's names in a checkpoint; none for the policy, as if megatron-core had saved it
    alone."""
    return "" if name == "policy" else f"{name}."


def model_state(name: str, learner: Learner) -> dict[int, Any]:
    """Returns megatron-core's sharded state of this rank's part of the model of that name, by virtual stage. With
    adapters it has their factors alone, by name."""
    if learner.adapters:
        return {0: _factors(learner.chunks, learner.adapters)}
    metadata = METADATA | {"dp_cp_group": replicas()}
    return {
        number: cast(GPTModel, chunk.module).sharded_state_dict(prefix=prefix(name), metadata=metadata)
        for number, chunk in enumerate(learner.chunks)
    }


def load_model(name: str, learner: Learner, state: dict[int, Any]) -> None:
    """Puts loaded tensors into the model; `state` is what model_state returns, with the tensors loaded and no objects.

    Raises KeyError if a tensor of the model is missing.
    """
    if learner.adapters:
        for key, values in learner.factors().items():
            values.copy_(state[0][key])
        return
    for number, chunk in enumerate(learner.chunks):
        loaded = {key.removeprefix(prefix(name)): value for key, value in state[number].items()}
        wrong = chunk.module.load_state_dict(loaded, strict=False)
        if other := [key for key in wrong.missing_keys if not key.endswith("_extra_state")] + wrong.unexpected_keys:
            raise KeyError(f"{', '.join(other)} of model {name}")


def _factors(chunks: Chunks, adapters: Layout) -> dict[str, ShardedTensorFactory]:
    """The factors of adapters, in the parts that are in tensors of their own in a checkpoint: one for each of PEFT's,
    with the layers as its first axis."""
    pieces: dict[str, list[tuple[Box, str, Box]]] = defaultdict(list)
    for piece in adapters.pieces:
        for single in piece.box.singles(numbers(piece.tensor)):
            own, named = piece.narrow(single).local, numbers(piece.parameter)
            region = Box(own.start[named:], own.stop[named:])
            pieces[name_at(piece.parameter, own.start[:named])].append((region, piece.tensor, single))
    found, tp = {}, parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in named_parameters(chunks):
        if name in pieces:
            cut = getattr(parameter, "tensor_model_parallel", False)
            of_all = getattr(parameter, "allreduce", True)
            replica = replicas().rank() if of_all else parallel_state.get_expert_data_parallel_rank()
            build = partial(_build, pieces[name], adapters.canonical)
            merge = partial(_merge, pieces[name], parameter.shape)
            found[name] = ShardedTensorFactory(ADAPTER, parameter, build, merge, (0, 0 if cut else tp, replica))
    return found


def _build(
    pieces: list[tuple[Box, str, Box]],
    shapes: Mapping[str, tuple[int, ...]],
    key: str,
    data: Tensor,
    replica: int | tuple[int, ...],
    _: slice | None,
) -> dict[str, ShardedTensor]:
    return {
        str(number): ShardedTensor(
            f"{key}.{torch_dist.factor_name(tensor)}",
            part := data[region.slices].view(box.shape),
            data.dtype,
            tuple(part.shape),
            shapes[tensor],
            box.start,
            axis_fragmentations=None,  # a rank may have more heads of queries than of keys
            replica_id=replica,
        )
        for number, (region, tensor, box) in enumerate(pieces)
    }


def _merge(pieces: list[tuple[Box, str, Box]], shape: torch.Size, parts: dict[str, Tensor]) -> Tensor:
    whole = next(iter(parts.values())).new_empty(shape)
    for number, (region, _, _) in enumerate(pieces):
        whole[region.slices] = parts[str(number)].view(region.shape)
    return whole


def stored_tensors(model: dict[int, Any], optimizer: ModelOptimizer) -> Iterator[Stored]:
    """Yields this rank's part of each parameter, buffer and optimizer state; `model` is its model_state."""
    own = optimizer.own()
    for sharded in nested_values(model):
        if not isinstance(sharded, ShardedTensor | ShardedTensorFactory):
            continue
        part, replica = own.get(_data(sharded)), sharded.replica_id
        assert isinstance(replica, tuple)  # of the stage, the tensor-parallel rank and the replica
        if part is None:  # no parameter: ranks of other replicas hold the same
            if is_main_replica(replica):
                part = Own(0, _data(sharded).numel(), {})
        elif not is_main_replica(replica[:-1]):  # what replicas hold, the optimizer divides
            part = None
        if part is not None:
            yield from _parts(sharded, part)


def stored_objects(model: dict[int, Any]) -> dict[str, Any]:
    """Returns what the model's modules keep besides tensors, by megatron-core's names; the same at every version."""
    return {
        sharded.unique_key: sharded.data
        for sharded in nested_values(model)
        if isinstance(sharded, ShardedObject) and is_main_replica(sharded.replica_id)
    }


def _parts(sharded: ShardedTensor | ShardedTensorFactory, own: Own) -> Iterator[Stored]:
    flat = _data(sharded).detach().view(-1)
    pieces: Iterable[ShardedTensor] = (
        nested_values(sharded.build()) if isinstance(sharded, ShardedTensorFactory) else [sharded]
    )
    for piece in pieces:
        data = _data(piece)
        if not data.is_contiguous():
            raise ValueError(f"{piece.key}: megatron-core stores it in another order than the one in memory")
        first = int(data.storage_offset() - flat.storage_offset())
        at, end = max(own.start, first), min(own.stop, first + data.numel())
        ahead = piece.prepend_axis_num
        for box in boxes(tuple(piece.local_shape), at - first, end - first):
            run = slice(at, at + box.size)
            where = Box((0,) * ahead + box.start, (1,) * ahead + box.stop).shifted(piece.global_offset)
            yield Stored(piece.key, tuple(piece.global_shape), where, flat[run])
            run = slice(at - own.start, at - own.start + box.size)
            for state, values in own.states.items():
                yield Stored(f"optimizer.state.{state}.{piece.key}", tuple(piece.global_shape), where, values[run])
            at += box.size


def _data(sharded: ShardedTensor | ShardedTensorFactory) -> Tensor:
    assert sharded.data is not None  # as in every state of a model until Megatron takes it out
    return sharded.data


def generators() -> dict[str, Tensor]:
    """Returns the states of this rank's random number generators, uint8 [bytes] each."""
    states = {"cpu": torch.get_rng_state()}
    states |= {f"tracked.{name}": state for name, state in _tracker().get_states().items()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_generators(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    tracked = {name.removeprefix("tracked."): state for name, state in states.items() if name.startswith("tracked.")}
    _tracker().set_states(tracked)
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _tracker() -> CudaRNGStatesTracker:
    """Megatron's generators, of layers under tensor parallelism."""
    tracker = get_cuda_rng_tracker()
    assert tracker is not None  # it makes one
    return tracker


def generator_state(trainer: Trainer) -> dict[str, ShardedTensor]:
    """Returns the generators as megatron-core loads them: one row a rank."""
    return {
        name: ShardedTensor.from_rank_offsets(
            f"{GENERATORS}.{name}", state, (0, trainer.parallel.rank, trainer.parallel.world), prepend_axis_num=1
        )
        for name, state in generators().items()
    }


def stored_generators(trainer: Trainer, states: dict[str, Tensor]) -> Iterator[Stored]:
    for name, state in states.items():
        row = Box((trainer.parallel.rank, 0), (trainer.parallel.rank + 1, len(state)))
        yield Stored(f"{GENERATORS}.{name}", (trainer.parallel.world, len(state)), row, state)
