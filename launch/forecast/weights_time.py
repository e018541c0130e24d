"""How long weights take to reach engines, and a checkpoint to be set aside: from the resharder's own plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_megatron.config import Config
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.reshard.engine_layout import EngineSizes, layout
from launch.forecast.accelerators import Accelerator
from launch.memory.traffic import weight_traffic
from launch.memory.trainer import checkpoint_bytes


@dataclass(frozen=True)
class WeightsTime:
    """Times of an update of all engines at once, and of a checkpoint, in seconds."""

    transfer: float
    """From the last optimizer step until every engine has everything."""
    commit: float
    """The pause of an engine; with reshard.staging=streamed it lasts as long as the transfer."""
    checkpoint: float
    """The trainers' pause, in which a checkpoint is copied to the memory of the hosts."""

    @classmethod
    def of(cls, config: Config, hf_config: Mapping[str, Any], gpu: Accelerator) -> WeightsTime:
        """Returns them for whole weights, though trainers may send less (docs/resharding.md): that changes what the
        network does beside the run, and hardly the run. Raises ConfigError where the sizes do not fit the model."""
        element, share = ITEMSIZE[config.model.dtype], gpu.efficiencies
        sizes = EngineSizes.of(config.rollout)
        shards = (layout(hf_config, sizes, rank).size for rank in range(sizes.ranks))
        shard = element * max(shards)
        through_host = config.link == "host"
        rate = gpu.host * share.host / 2 if through_host else gpu.network * share.links
        sent = max(weight_traffic(config, hf_config).sent) * element
        transfer = max(sent, shard) / rate
        commit = share.pause_s + 2 * shard / (gpu.memory * share.memory)
        if config.reshard.staging == "streamed":
            commit += transfer
        saved = checkpoint_bytes(config, hf_config) / config.trainer_ranks
        return cls(transfer, commit, saved / (gpu.host * share.host))
