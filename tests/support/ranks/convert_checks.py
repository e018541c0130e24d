"""Trainer ranks that save and load distributed checkpoints for the tests of areal_megatron.programs.convert."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from areal_megatron.config import OptimizerConfig
from areal_megatron.packing.partition import split
from areal_megatron.trainer.trainer import Trainer
from tests.support.plain_results import beside_model, once, plain_logits
from tests.support.ranks.export_checks import mbridges_export
from tests.support.ranks.trainer_checks import check_logits, make_config, make_trajectories, open_trainer
from tests.support.tiny_models import load_oracle


def state(trainer: Trainer) -> dict:
    """Returns megatron-core's sharded state of a rank's part of the model, by virtual stage."""
    return {f"model{number}": chunk.module.sharded_state_dict() for number, chunk in enumerate(trainer.policy.chunks)}


def check_saved(folder: Path, rank: int, cases: dict[str, list], mbridge: bool) -> None:
    """Loads a Hugging Face folder, makes an update with learning rate 0, and saves a whole checkpoint.

    cases: run folder → model, layout, dtype. With `mbridge`, saves the export of mbridge too, as RUN.safetensors.
    """
    from areal_megatron.trainer import checkpoint

    for run, (model, trainer, dtype) in cases.items():
        config = make_config(folder, model, trainer, dtype=dtype, optimizer=OptimizerConfig(lr=0.0, warmup_steps=0))
        with open_trainer(folder, rank, config, run) as subject:
            parts = split(
                make_trajectories(4, 0), version=0, replicas=config.trainer.dp, minibatches=2, cap=128, seed=0
            )
            assert subject.train_batch(parts[subject.parallel.replica]).applied
            target = folder / run / "checkpoint" / "trainer"
            saver = checkpoint.Saver(subject)
            saver.begin(target)
            saver.wait()
            if mbridge and (exported := mbridges_export(config, subject)) and rank == 0:
                save_file(
                    {name: tensor.contiguous() for name, tensor in exported.items()}, f"{folder / run}.safetensors"
                )
            dist.barrier()  # rank 0 waits for the files of the others


def check_loaded(folder: Path, rank: int, cases: dict[str, list]) -> None:
    """Loads a converted checkpoint into a model of zeros, and compares its logits with those of Hugging Face.

    cases: run folder → model, layout, checkpoint folder.
    """
    from megatron.core import dist_checkpointing

    for run, (model, trainer, checkpoint) in cases.items():
        with open_trainer(folder, rank, make_config(folder, model, trainer), run) as subject, torch.no_grad():
            for value in subject.parameters().values():
                value.zero_()
            loaded = dist_checkpointing.load(state(subject), str(Path(checkpoint) / "trainer"))
            for number, chunk in enumerate(subject.policy.chunks):
                chunk.module.load_state_dict(loaded[f"model{number}"])
            compute = partial(_logits, folder / model)
            check_logits(subject, once(subject, beside_model(subject, "logits"), compute))


def _logits(folder: Path) -> dict:
    return plain_logits(load_oracle(folder))
