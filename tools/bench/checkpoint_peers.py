"""A save by megatron-core itself, with which our checkpoints are compared."""

from __future__ import annotations

from pathlib import Path

from megatron.core import dist_checkpointing

from areal_megatron.trainer import checkpoint_tensors
from areal_megatron.trainer.cpu import cpu_passes_for_cuda
from areal_megatron.trainer.trainer import Trainer


def save_as_megatron_does(subject: Trainer, path: Path) -> None:
    """Saves model and optimizer into an empty folder; gathers the optimizer's states of all replicas. Collective."""
    metadata, states = checkpoint_tensors.METADATA | {"dp_cp_group": checkpoint_tensors.replicas()}, {}
    for name, learner in subject.learners.items():
        model = checkpoint_tensors.model_state(name, learner)
        with cpu_passes_for_cuda():
            optimizer = learner.optimizer.megatron.sharded_state_dict(model, False, metadata=metadata)
        states[name] = {"model": model, "optimizer": optimizer}
    dist_checkpointing.save(states.pop("policy") | states, str(path), content_metadata=checkpoint_tensors.METADATA)
