"""Who sends weights to whom in a run: the counts of the resharder's plan, on which communicators and buffers depend."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from areal_megatron.config import Config
from areal_megatron.models.adapter import Adapter, served
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.plan import Planner, Traffic
from areal_megatron.reshard.trainer_layout import MegatronSizes


def weight_traffic(config: Config, hf_config: Mapping[str, Any]) -> Traffic | None:
    """Returns what an update of all engines makes each trainer rank do; None without engines.

    Raises ConfigError where the sizes do not fit the model.
    """
    if not config.has_engines:
        return None
    sizes = MegatronSizes.of(config.trainer), EngineSizes.of(config.rollout)
    return _traffic(json.dumps(dict(hf_config)), *sizes, config.rollout.engines, served(config, hf_config))


@lru_cache(maxsize=4)
def _traffic(
    hf_config: str, trainers: MegatronSizes, engine: EngineSizes, engines: int, adapter: Adapter | None
) -> Traffic:
    return Planner(json.loads(hf_config), trainers, engine, engines=engines, adapter=adapter).traffic
