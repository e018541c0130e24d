"""A checkpoint as megatron-core saves it by itself: what ours are compared with."""

from __future__ import annotations

from pathlib import Path

from megatron.core import dist_checkpointing

from areal_megatron.trainer import stored
from areal_megatron.trainer.cpu import cpu_passes_for_cuda
from areal_megatron.trainer.step import Trainer


def save_as_megatron_does(subject: Trainer, path: Path) -> None:
    """Model and optimizer, into an empty folder; gathers the optimizer's states of all replicas. Collective."""
    metadata, states = stored.METADATA | {"dp_cp_group": stored.replicas()}, {}
    for name, learner in subject.learners.items():
        model = stored.model_state(name, learner)
        with cpu_passes_for_cuda():
            optimizer = learner.optimizer.megatron.sharded_state_dict(model, False, metadata=metadata)
        states[name] = {"model": model, "optimizer": optimizer}
    dist_checkpointing.save(states.pop("policy") | states, str(path), content_metadata=stored.METADATA)
