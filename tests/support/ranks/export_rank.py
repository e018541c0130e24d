"""A trainer rank that exports the parameters that the oracle gives it; started by test_transport_export.py.

python export_rank.py RANK PORT SETUP
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from areal_megatron.checkpoint import hf
from areal_megatron.models.architecture import read_config
from areal_megatron.reshard.trainer_layout import MegatronSizes
from tests.support.reshard_oracle import megatron_shard

if __name__ == "__main__":
    rank, port, exports = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    for export in exports:
        source, sizes = Path(export["source"]), MegatronSizes(**export["sizes"])
        config = read_config(source)
        parameters = megatron_shard(load_file(source / "model.safetensors"), config, sizes, rank)
        parameters = {name: tensor.to(getattr(torch, export["dtype"])) for name, tensor in parameters.items()}
        hf.export(
            parameters,
            hf_config=config,
            sizes=sizes,
            rank=rank,
            source=source,
            path=export["path"],
            shard_bytes=export["shard_bytes"],
        )
    dist.destroy_process_group()
