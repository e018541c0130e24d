"""Exports of trainer ranks: of what the oracle gives them, and beside those of mbridge, which shares no code with this
project."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from areal_megatron.checkpoint import hf
from areal_megatron.config import Config
from areal_megatron.models.architecture import read_config
from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.trainer.trainer import Trainer
from tests.support.ranks.trainer_checks import make_config, open_trainer
from tests.support.reshard_oracle import megatron_shard
from tools.bench.reshard_peers import bridge_of


def mbridges_export(config: Config, trainer: Trainer) -> dict[str, torch.Tensor]:
    """Returns mbridge's export of a dense model, with the vocabulary padded as in the trainer. Collective.

    The only experts that mbridge knows are TransformerEngine's grouped ones.
    """
    bridge = bridge_of(config)
    output = "model.embed_tokens.weight" if trainer.hf_config.get("tie_word_embeddings", False) else "lm_head.weight"
    # A bridge of a tied model writes this into its class, for the bridges of all models after it.
    bridge._DIRECT_MAPPING = bridge._DIRECT_MAPPING | {"output_layer.weight": output}
    return dict(bridge.export_weights([chunk.module for chunk in trainer.policy.chunks]))


def export_shards(folder: Path, rank: int, exports: list[dict]) -> None:
    """Makes one export after another of the parameters that the oracle gives the two ranks."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    for export in exports:
        source, sizes = Path(export["source"]), MegatronSizes(**export["sizes"])
        config = read_config(source)
        parameters = megatron_shard(load_file(source / "model.safetensors"), config, sizes, rank)
        hf.export(
            {name: tensor.to(getattr(torch, export["dtype"])) for name, tensor in parameters.items()},
            hf_config=config,
            sizes=sizes,
            rank=rank,
            source=source,
            path=export["path"],
            shard_bytes=export["shard_bytes"],
        )
    dist.destroy_process_group()


def check_mbridge(folder: Path, rank: int, model: str, layout: dict) -> None:
    config = make_config(folder, model, layout)
    with open_trainer(folder, rank, config) as trainer, torch.no_grad():
        hf.export(
            parameters=trainer.parameters(),
            hf_config=trainer.hf_config,
            sizes=trainer.sizes,
            rank=rank,
            source=config.model.path,
            path=folder / "exported",
            group=trainer.parallel.control,
        )
        theirs = mbridges_export(config, trainer)
        if rank == 0:
            ours = load_file(folder / "exported" / "model.safetensors")
            assert ours.keys() == theirs.keys()
            for name, tensor in ours.items():
                assert torch.equal(tensor, theirs[name][: len(tensor)]), name
