"""What trainer ranks check about checkpoints; test_checkpoint.py starts them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from trainer_checks import make_config, make_trajectories, open_trainer

from areal_megatron.data.packing import split
from areal_megatron.trainer import checkpoint
from areal_megatron.trainer.step import Trainer

UPDATES = 4


def check_all(folder: Path, rank: int, model: str, saved: dict | None, resumed: dict[str, dict]) -> None:
    """What these ranks have to do in turn: to train without a stop under the layout `saved`, and to go on under others.

    resumed: run folder → layout. Starting ranks takes longer than any of it.
    """
    if saved is not None:
        check_straight(folder, rank, model, saved)
    for run, layout in resumed.items():
        check_resumed(folder, rank, model, layout, run, exact=layout == saved)


def check_straight(folder: Path, rank: int, model: str, layout: dict) -> None:
    """Trains UPDATES updates, saving after half of them, and writes down losses and parameters."""
    config = make_config(folder, model, layout)
    with open_trainer(folder, rank, config, "straight") as subject:
        metrics = update(subject, 0, UPDATES // 2)
        saving = checkpoint.Saving(subject, make_folder(subject, folder / "checkpoint"))
        metrics += update(subject, UPDATES // 2, UPDATES)
        saving.wait()
        keep(subject, folder / "straight", metrics)


def check_resumed(folder: Path, rank: int, model: str, layout: dict, run: str, exact: bool) -> None:
    """Goes on from there, under the same or another layout: the second half is what it was."""
    config = make_config(folder, model, layout)
    with open_trainer(folder, rank, config, run) as subject:
        checkpoint.load(subject, folder / "checkpoint")
        metrics = update(subject, UPDATES // 2, UPDATES)
        expected = json.loads((folder / "straight" / "metrics.json").read_text())[UPDATES // 2 :]
        if exact:
            assert metrics == expected, f"{metrics}\n{expected}"
            before = torch.load(folder / "straight" / f"parameters-{rank}.pt", weights_only=True)
            for name, value in subject.parameters().items():
                assert torch.equal(value, before[name]), name
            return
        for found, wanted in zip(metrics, expected, strict=True):
            for key, value in wanted.items():
                assert abs(found[key] - value) <= 1e-6 * max(1.0, abs(value)), (key, found[key], value)


def update(subject: Trainer, first: int, last: int) -> list[dict[str, float]]:
    """Updates `first` … `last` − 1 on recorded trajectories; what is the same under every layout."""
    metrics = []
    for version in range(first, last):
        part = split(make_trajectories(12, version, seed=20 + version), version=version, minibatches=2, cap=128,
                     seed=version, replicas=subject.config.trainer.dp)[subject.replica]  # fmt: skip
        result = subject.train_batch(part)
        assert result.applied
        metrics.append({key: result.metrics[key] for key in ("loss", "grad_norm", "lr", "ratio_mean", "entropy")})
    return metrics


def make_folder(subject: Trainer, path: Path) -> Path:
    if subject.is_first:
        path.mkdir()
    torch.distributed.barrier()
    return path


def keep(subject: Trainer, folder: Path, metrics: list[dict[str, float]]) -> None:
    torch.save(subject.parameters(), folder / f"parameters-{subject.rank}.pt")
    if subject.is_first:
        (folder / "metrics.json").write_text(json.dumps(metrics))
