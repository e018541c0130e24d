"""Exports beside those of mbridge, which shares no code with them."""

from pathlib import Path

import torch
from reshard_peers import bridge_of
from safetensors.torch import load_file
from trainer_checks import make_config, open_trainer

from areal_megatron.config import Config
from areal_megatron.reshard import hf
from areal_megatron.trainer.step import Trainer


def mbridges_export(config: Config, trainer: Trainer) -> dict[str, torch.Tensor]:
    """Of a dense model: mbridge knows no experts outside TransformerEngine's grouped ones. Every rank calls it."""
    return dict(bridge_of(config).export_weights([chunk.module for chunk in trainer.chunks]))


def check_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Bit for bit, but for the rows of padding that mbridge leaves."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name][: len(tensor)]), name


def check_mbridge(folder: Path, rank: int, model: str, layout: dict) -> None:
    config = make_config(folder, model, layout)
    with open_trainer(folder, rank, config) as trainer, torch.no_grad():
        hf.export(parameters=trainer.parameters(), hf_config=trainer.hf_config, sizes=trainer.sizes, rank=rank,
                  source=config.model.path, path=folder / "exported", group=trainer.parallel.control)  # fmt: skip
        theirs = mbridges_export(config, trainer)
        if rank == 0:
            check_same(load_file(folder / "exported" / "model.safetensors"), theirs)
