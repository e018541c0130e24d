"""One engine of a reward model: becomes vLLM's own server, which scores texts at /classify.

    python -m areal_megatron.engine.reward_server --run RUN_DIR --index E

It announces `reward-E` before vLLM has loaded. As with the policy's engines every route asks for the run's secret.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from areal_megatron.config import Config, LoraConfig, RolloutConfig
from areal_megatron.config.config_file import load
from areal_megatron.engine import kv_cache
from areal_megatron.engine.server import check_shared_memory, own_cores, reserve_port, server_environment, url
from areal_megatron.models.architecture import read_config
from areal_megatron.process.shown import guard
from areal_megatron.run import gpu_settings
from areal_megatron.run.folder import from_command_line, one_line, reward_engine_name
from areal_megatron.run.network import address, socket_settings
from areal_megatron.run.versions import require

SERVED_MODEL = "reward"
_MORE_TOKENS = 1024
"""What a text may be longer than prompt and answer: the reward model may have another template, and other tokens."""
_RUNNING = 64
"""Most texts that are scored at the same time on CPU, where the KV cache is as large as that asks for."""


def served(config: Config) -> Config:
    """Returns the config with the reward model in the policy's place, as an engine of its own."""
    longest = config.longest_sequence + _MORE_TOKENS
    most = read_config(config.reward.model).get("max_position_embeddings") or longest
    rollout = RolloutConfig(
        engines=config.reward.model_engines,
        tp=config.reward.model_tp,
        max_new_tokens=max(min(longest, most) - config.data.max_prompt_tokens, 1),
        max_running=min(config.rollout.max_running, _RUNNING) if config.machine.is_cpu else config.rollout.max_running,
        start_timeout_s=config.rollout.start_timeout_s,
        first_weights="model",
    )
    model = replace(config.model, path=config.reward.model)
    return replace(config, model=model, lora=LoraConfig(), rollout=rollout)


def command(config: Config, host: str, port: int) -> list[str]:
    """Returns vLLM's command line; `config` is `served`."""
    rollout = config.rollout
    words = [sys.executable, "-m", "areal_megatron.engine.serving"]
    words += ["--model", str(Path(config.model.path).absolute()), "--served-model-name", SERVED_MODEL]
    words += ["--host", host, "--port", str(port), "--runner", "pooling"]
    words += ["--middleware", "areal_megatron.engine.guard.TokenGuard", "--disable-uvicorn-access-log"]
    words += ["--config-format", "hf", "--load-format", "hf"]
    words += ["--dtype", config.model.dtype, "--tensor-parallel-size", str(rollout.tp)]
    words += ["--max-model-len", str(config.longest_sequence), "--max-num-seqs", str(rollout.max_running)]
    if config.machine.is_cpu:
        size = kv_cache.cpu_bytes(config, read_config(config.model.path), kv_cache.machine_bytes())
        words += ["--enforce-eager", "--kv-cache-memory-bytes", str(size)]
        words += ["--block-size", str(kv_cache.CPU_BLOCK_TOKENS)]
        if rollout.tp == 1:
            words += ["--distributed-executor-backend", "uni"]
    return words


@one_line()
def main() -> None:
    guard()
    run, index = from_command_line("areal_megatron.engine.reward_server")
    config = load(run.config)
    require("rollout", config)
    check_shared_memory()
    config, host = served(config), address(config.machine.host)
    cpus = own_cores(config)
    port, _reservation = reserve_port(host)
    run.announce(reward_engine_name(index), url(host, port))
    words = command(config, host, port)
    gpu_settings.set_defaults()
    if not config.machine.is_cpu:
        gpu_settings.check(os.environ)
    environment = socket_settings(config.machine.host) | os.environ | server_environment(config, run, cpus)
    os.execve(words[0], words, environment)


if __name__ == "__main__":
    main()
