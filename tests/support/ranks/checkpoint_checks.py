"""What trainer ranks check about checkpoints; test_checkpoint.py starts them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from areal_megatron.config import Config, CriticConfig, PenaltyConfig, PPOConfig
from areal_megatron.packing.partition import split
from areal_megatron.run import RunError
from areal_megatron.trainer import checkpoint, checkpoint_tensors
from areal_megatron.trainer.cpu import cpu_passes_for_cuda
from areal_megatron.trainer.trainer import Trainer
from tests.support.ranks.trainer_checks import make_config, make_trajectories, open_trainer
from tools.bench.checkpoint_peers import save_as_megatron_does

UPDATES = 4
CRITIC = CriticConfig(lr=2e-3, gae_lambda=0.9, clip=0.5)
PENALTY = PenaltyConfig(entropy=0.3, kl=0.2, kl_form="k3")
REPORTED = ("loss", "grad_norm", "lr", "ratio_mean", "entropy")
OF_CRITIC = ("value_loss", "value_grad_norm", "explained_variance")


def check_all(folder: Path, rank: int, model: str, saved: dict | None, resumed: dict[str, dict], critic: bool) -> None:
    """What these ranks have to do in turn: to train without a stop under the layout `saved`, and to go on under others.

    resumed: run folder → layout. Starting ranks takes longer than any of it.
    """
    ppo = PPOConfig(minibatches=2, penalty=PENALTY, critic=CRITIC if critic else CriticConfig())
    if saved is not None:
        check_straight(folder, rank, make_config(folder, model, saved, ppo=ppo))
    for run, layout in resumed.items():
        check_resumed(folder, rank, make_config(folder, model, layout, ppo=ppo), run, exact=layout == saved)


def check_straight(folder: Path, rank: int, config: Config) -> None:
    """Trains UPDATES updates, saving after half of them, and writes down losses and parameters."""
    with open_trainer(folder, rank, config, "straight") as subject:
        saver = checkpoint.Saver(subject)
        metrics = update(subject, 0, 1, saver)
        saver.begin(folder / "early")  # the second checkpoint is laid out as the first and holds what came later
        metrics += update(subject, 1, UPDATES // 2, saver)
        save_as_megatron_does(subject, make_folder(subject, folder / "peer"))
        saver.begin(folder / "checkpoint")
        metrics += update(subject, UPDATES // 2, UPDATES, saver)
        saver.wait()
        keep(subject, folder / "straight", metrics)
        dist.barrier()  # rank 0 has waited for the others
        same_tensors(folder / "checkpoint", folder / "peer")
        check_failure(subject, saver, folder / "failed")
        if subject.critic:
            check_without_critic(subject, folder / "checkpoint", make_folder(subject, folder / "plain"))


def check_failure(subject: Trainer, saver: checkpoint.Saver, path: Path) -> None:
    """One rank cannot write its file: rank 0 says whose it was, and nothing describes the others'."""
    if subject.is_first:
        (path / "__1_0.distcp").mkdir(parents=True)
    dist.barrier()
    saver.begin(path)
    if subject.rank < 2:
        with pytest.raises(RunError, match=f"{path} could not be written by trainer-1: Is a directory"):
            saver.wait()
    else:
        saver.wait()
    dist.barrier()
    assert not (path / ".metadata").exists() and not (path / "metadata.json").exists()


def check_without_critic(subject: Trainer, saved: Path, path: Path) -> None:
    """A checkpoint of a run that had no critic is refused before anything is loaded."""
    if subject.is_first:
        common = torch.load(saved / "common.pt", weights_only=False)
        assert common.pop("critic")["schedule"] == common["schedule"]
        torch.save(common, path / "common.pt")
        shutil.copy(saved / "metadata.json", path)
    dist.barrier()
    with pytest.raises(
        RunError, match=f"trainer-{subject.rank}: .*{path}.* has no critic: resume it without ppo.critic"
    ):
        checkpoint.load(subject, path)


def same_tensors(found: Path, expected: Path) -> None:
    """Both hold the same, bit for bit, but for the generators, which megatron-core leaves to its user."""
    with cpu_passes_for_cuda():
        found, expected = (dist_checkpointing.load_plain_tensors(str(path)) for path in (found, expected))
    expected = {name: values for name, values in expected.items() if torch.is_tensor(values)}
    for name, values in expected.items():
        assert torch.equal(found.pop(name), values), name
    assert {name for name, values in found.items() if torch.is_tensor(values)} == {
        f"{checkpoint_tensors.GENERATORS}.{name}" for name in checkpoint_tensors.generators()
    }
    assert len(expected) > 30


def check_resumed(folder: Path, rank: int, config: Config, run: str, exact: bool) -> None:
    """Goes on from there, under the same or another layout: the second half is what it was."""
    with open_trainer(folder, rank, config, run) as subject:
        checkpoint.load(subject, folder / "checkpoint")
        metrics = update(subject, UPDATES // 2, UPDATES)
        expected = json.loads((folder / "straight" / "metrics.json").read_text())[UPDATES // 2 :]
        if exact:
            assert metrics == expected, f"{metrics}\n{expected}"
            before = torch.load(folder / "straight" / f"parameters-{rank}.pt", weights_only=True)
            for name, value in held(subject).items():
                assert torch.equal(value, before[name]), name
            return
        for found, wanted in zip(metrics, expected, strict=True):
            for key, value in wanted.items():
                assert abs(found[key] - value) <= 1e-6 * max(1.0, abs(value)), (key, found[key], value)


def update(subject: Trainer, first: int, last: int, saver: checkpoint.Saver | None = None) -> list[dict[str, float]]:
    """Updates `first` … `last` − 1 on recorded trajectories; what is the same under every layout."""
    metrics = []
    for version in range(first, last):
        part = split(
            make_trajectories(12, version, seed=20 + version),
            version=version,
            minibatches=2,
            cap=128,
            seed=version,
            replicas=subject.config.trainer.dp,
        )[subject.replica]
        result = subject.train_batch(part, before_step=saver.wait_until_read if saver else lambda: None)
        assert result.applied
        metrics.append({key: result.metrics[key] for key in (*REPORTED, *(OF_CRITIC if subject.critic else ()))})
    return metrics


def held(subject: Trainer) -> dict[str, torch.Tensor]:
    return {
        f"{learner}: {name}": values
        for learner, of in subject.learners.items()
        for name, values in of.parameters().items()
    }


def make_folder(subject: Trainer, path: Path) -> Path:
    if subject.is_first:
        path.mkdir()
    dist.barrier()
    return path


def keep(subject: Trainer, folder: Path, metrics: list[dict[str, float]]) -> None:
    torch.save(held(subject), folder / f"parameters-{subject.rank}.pt")
    if subject.is_first:
        (folder / "metrics.json").write_text(json.dumps(metrics))
