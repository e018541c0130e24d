"""The trainer pool's state as megatron-core's distributed checkpoint (torch_dist), under any parallel sizes.

Loading unpickles what is no tensor: checkpoints are trusted input.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from areal_megatron.run import RunError
from areal_megatron.trainer.cpu import cpu_passes_for_cuda
from areal_megatron.trainer.step import Trainer

_FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",  # optimizer states in the shapes of their parameters
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
_POLL_S = 0.02


class Saving:
    """The writing of one checkpoint, by processes of their own. Every rank makes it and calls it alike.

    Parameters and optimizer states have been copied when it exists: training may go on.
    """

    def __init__(self, trainer: Trainer, path: Path):
        strategy = get_default_save_sharded_strategy("torch_dist", 1)
        if trainer.config.trainer.dp > 1:
            strategy = FullyParallelSaveStrategyWrapper(strategy, _replicas(), do_cache_distribution=False)
        self._path, self._timeout_s = path, trainer.config.machine.timeout_s
        self._queue = AsyncCallsQueue(persistent=False)
        request = dist_checkpointing.save(_state(trainer, loading=False), str(path), strategy, async_sharded_save=True,
                                          content_metadata=_FORMAT)  # fmt: skip
        self._queue.schedule_async_request(request)

    def done(self) -> bool:
        """Whether every rank has written its part. Raises RunError if one could not."""
        try:
            self._queue.maybe_finalize_async_calls(blocking=False)
        except (CheckpointingException, OSError, RuntimeError) as e:
            raise RunError(f"the checkpoint in {self._path} could not be written: {_first_line(e)}") from e
        return not self._queue.get_num_unfinalized_calls()

    def wait(self) -> bool:
        """Returns True when it is done. Raises RunError as `done`, and after machine.timeout_s."""
        deadline = time.monotonic() + self._timeout_s
        while not self.done():
            if time.monotonic() > deadline:
                self._queue.close(abort=True)
                raise RunError(f"the checkpoint in {self._path} was not written within {self._timeout_s:.0f} s")
            time.sleep(_POLL_S)
        return True


def load(trainer: Trainer, path: Path) -> None:
    """Brings the trainer to the saved state; of generators only if its sizes are those that it was saved with.

    Raises RunError if the checkpoint is not one of this model or cannot be read.
    """
    strategy = get_default_load_sharded_strategy(str(path))
    if trainer.config.trainer.dp > 1:
        strategy = FullyParallelLoadStrategyWrapper(strategy, _replicas(), do_cache_distribution=False)
    try:
        common = dist_checkpointing.load_common_state_dict(str(path))
        state = _state(trainer, loading=True)
        if common["sizes"] != state["sizes"]:
            del state["generators"]
        with cpu_passes_for_cuda():
            loaded = dist_checkpointing.load(state, str(path), strategy)
        for number, chunk in enumerate(trainer.chunks):
            chunk.module.load_state_dict(loaded["model"][number], strict=True)
        with torch.no_grad():
            trainer.optimizer.load(loaded["optimizer"], loaded["schedule"])
    except (CheckpointingException, OSError, RuntimeError, KeyError, ValueError, AssertionError) as e:
        raise RunError(f"trainer-{trainer.rank}: the checkpoint in {path} cannot be loaded into this model and these "
                       f"sizes: {_first_line(e)}") from e  # fmt: skip
    if "generators" in loaded:
        _set_generators(loaded["generators"])


def _state(trainer: Trainer, loading: bool) -> dict[str, Any]:
    metadata = _FORMAT | {"dp_cp_group": _replicas()}
    model = {number: chunk.module.sharded_state_dict(metadata=metadata) for number, chunk in enumerate(trainer.chunks)}
    return {
        "model": model,
        "optimizer": trainer.optimizer.sharded_state(model, loading, metadata),
        "schedule": trainer.optimizer.schedule_state(),
        "sizes": asdict(trainer.sizes),
        "generators": ShardedObject("generators", _generators(), (trainer.parallel.world,), (trainer.rank,)),
    }


def _generators() -> dict[str, Any]:
    """The state of this rank's random number generators."""
    states = {"cpu": torch.get_rng_state(), "tracked": get_cuda_rng_tracker().get_states()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _set_generators(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    get_cuda_rng_tracker().set_states(states["tracked"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _replicas() -> torch.distributed.ProcessGroup:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
