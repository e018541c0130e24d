"""What everything of a config's run takes on GPUs of a kind, as the simulator needs it."""

from __future__ import annotations

from areal_megatron.config import Config
from areal_megatron.model_check import trained_config
from areal_megatron.planning.forecast.accelerators import Accelerator
from areal_megatron.planning.forecast.engine_time import EngineTime
from areal_megatron.planning.forecast.simulator import Times
from areal_megatron.planning.forecast.trainer_time import TrainerTime
from areal_megatron.planning.forecast.weights_time import WeightsTime
from areal_megatron.planning.memory import plan_memory
from areal_megatron.planning.memory.engine import kv_tokens


def times_of(config: Config, gpu: Accelerator, node_gpus: int = 8, gib: float = 0) -> tuple[Config, Times]:
    """Returns the config with trainer.recompute decided, and the times of its run on these GPUs, with `gib` GiB of
    memory each (0: the GPU's own). Raises ConfigError for a run that does not fit."""
    config.machine.device = "cuda"
    hf_config = trained_config(config)
    memory = plan_memory(config, hf_config, gib or gpu.gib)
    config = memory.recompute.apply(config)
    assert memory.engine is not None  # of a run with engines
    return config, Times(
        EngineTime(config, hf_config, gpu, node_gpus),
        TrainerTime(config, hf_config, gpu, node_gpus),
        WeightsTime.of(config, hf_config, gpu),
        kv_tokens(config, hf_config, memory.engine.of("KV cache"), on_cuda=True),
        gpu.efficiencies.reward_s,
        gpu.efficiencies.alone,
    )
