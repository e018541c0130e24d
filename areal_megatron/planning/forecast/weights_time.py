"""How long weights take to reach engines, and a checkpoint to be set aside: from the resharder's own plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_megatron.config import Config
from areal_megatron.models.adapter import served
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.planning.forecast.accelerators import Accelerator
from areal_megatron.planning.memory.traffic import weight_traffic
from areal_megatron.planning.memory.trainer import checkpoint_bytes
from areal_megatron.reshard.engine_layout import EngineSizes, layout


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
        """Returns them for whole weights, or adapters, though trainers may send less (docs/resharding.md): that changes
        what the network does beside the run, and hardly the run. Raises ConfigError where the sizes do not fit the
        model."""
        element, sizes = ITEMSIZE[config.model.dtype], EngineSizes.of(config.rollout)
        adapter = served(config, hf_config)
        shard = max(layout(hf_config, sizes, rank, adapter).size for rank in range(sizes.ranks))
        traffic = weight_traffic(config, hf_config)
        assert traffic is not None  # of a run with engines
        sent = max(traffic.sent)
        saved = checkpoint_bytes(config, hf_config) / config.trainer_ranks
        return cls.of_bytes(config, gpu, sent * element, shard * element, saved)

    @classmethod
    def of_bytes(cls, config: Config, gpu: Accelerator, sent: float, shard: float, saved: float) -> WeightsTime:
        """Returns them where the busiest trainer rank sends `sent` bytes and copies `saved` for a checkpoint, and the
        fullest engine rank holds `shard`."""
        share = gpu.efficiencies
        rate = gpu.host * share.host / 2 if config.link == "host" else gpu.network * share.links
        transfer = max(sent, shard) / rate
        commit = share.pause_s + 2 * shard / (gpu.memory * share.memory)
        if config.reshard.staging == "streamed":
            commit += transfer
        return cls(transfer, commit, saved / (gpu.host * share.host))
