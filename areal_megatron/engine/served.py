"""One engine of a frozen model beside the policy's: becomes vLLM's own server, which answers at /v1/completions, or
scores texts at /classify if it is a reward model's. A teacher tells log-probabilities of tokens, too (sample_route.py).

    AREAL_SERVED=judge python -m areal_megatron.engine.served --run RUN_DIR --index E

It announces `judge-E` before vLLM has loaded. As with the policy's engines every route asks for the run's secret.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from areal_megatron.config import TEACHERS, Config, ConfigError, LoraConfig, RolloutConfig
from areal_megatron.config.config_file import load
from areal_megatron.engine import adapters
from areal_megatron.engine.adapters import Named
from areal_megatron.engine.environment import ADAPTERS, SERVED_MODEL
from areal_megatron.engine.server import (
    check_shared_memory,
    cpu_arguments,
    overrides,
    own_cores,
    passed_through,
    reserve_port,
    server_environment,
    teaching_arguments,
    url,
)
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.process.shown import guard
from areal_megatron.run import gpu_settings
from areal_megatron.run.folder import from_command_line, one_line
from areal_megatron.run.network import address, socket_settings
from areal_megatron.run.process_names import served_name
from areal_megatron.run.versions import require

_MORE_TOKENS = 1024
"""What a text may be longer than prompt and answer: the model may have another template, and other tokens."""
_RUNNING = 64
"""Most requests at the same time on CPU, where the KV cache is as large as that asks for."""


def served(config: Config, name: str) -> Config:
    """Returns the config with the served model of this name in the policy's place, as an engine of its own, whose
    `longest_sequence` is what it takes."""
    own = config.served_models[name]
    rollout = RolloutConfig(
        engines=own.engines,
        tp=own.tp,
        max_new_tokens=max(longest(config, name) - 1, 1),
        max_running=min(config.rollout.max_running, _RUNNING) if config.machine.is_cpu else config.rollout.max_running,
        start_timeout_s=config.rollout.start_timeout_s,
        first_weights="model",
        vllm=own.vllm,
    )
    dtype = config.model.dtype if own.dtype == "model" else own.dtype
    model = replace(config.model, path=own.path, dtype=dtype)
    data = replace(config.data, max_prompt_tokens=1)
    return replace(config, model=model, data=data, lora=LoraConfig(), rollout=rollout)


def longest(config: Config, name: str) -> int:
    """Returns max_length of a served model, where 0 is decided. Raises ConfigError if the model takes less."""
    own = config.served_models[name]
    most = read_config(own.path).get("max_position_embeddings") or sys.maxsize
    if own.max_length > most:
        raise ConfigError(
            f"served.{name}.max_length: {own.max_length}, but {own.path} has max_position_embeddings={most}"
        )
    found = own.max_length or min(config.longest_sequence + _MORE_TOKENS, most)
    if name in config.teachers and found <= config.longest_sequence:
        raise ConfigError(
            f"served.{name}.max_length: {found}, and for ppo.penalty.kl_model it has to be above the "
            f"{config.longest_sequence} tokens of the longest prompt and answer, data.max_prompt_tokens and "
            "rollout.max_new_tokens"
        )
    return found


def command(config: Config, name: str, host: str, port: int, named: Sequence[Named] = ()) -> list[str]:
    """Returns the command line of a server; `config` is `served`, `named` the adapter that it answers with, by its own
    name."""
    words = [sys.executable, "-m", "areal_megatron.engine.serving"]
    words += ["--host", host, "--port", str(port)]
    if name in TEACHERS:
        words += ["--middleware", "areal_megatron.engine.sample_route.SampleRoute"]
    words += ["--middleware", "areal_megatron.engine.guard.TokenGuard", "--disable-uvicorn-access-log"]
    if named:
        words += adapters.served({one.name: str(Path(one.folder).absolute()) for one in named})
        model = architecture(read_config(config.model.path))
        words += adapters.slots([one.adapter for one in named], model).arguments
    else:
        words += ["--served-model-name", name]
    return words + arguments(config, name) + passed_through(config)


def arguments(config: Config, name: str) -> list[str]:
    """Returns the options of vLLM's command line that say what the engine is."""
    rollout, hf_config = config.rollout, read_config(config.model.path)
    words = ["--model", str(Path(config.model.path).absolute()), "--config-format", "hf", "--load-format", "hf"]
    words += ["--dtype", config.model.dtype, "--tensor-parallel-size", str(rollout.tp)]
    words += ["--max-model-len", str(config.longest_sequence), "--max-num-seqs", str(rollout.max_running)]
    if name == "reward":
        words += ["--runner", "pooling"]
    else:
        words += ["--generation-config", "vllm", "--hf-overrides", json.dumps(overrides(config))]
    if name in TEACHERS:
        words += teaching_arguments(config)
    return words + cpu_arguments(config, hf_config) if config.machine.is_cpu else words


@one_line()
def main() -> None:
    guard()
    run, index = from_command_line("areal_megatron.engine.served")
    config, name = load(run.config), os.environ[SERVED_MODEL]
    require("rollout", config)
    check_shared_memory()
    config, host = served(config, name), address(config.machine.host)
    cpus = own_cores()
    port, _reservation = reserve_port(host)
    run.announce(served_name(name, index), url(host, port))
    words = command(config, name, host, port, adapters.read(os.environ.get(ADAPTERS, "")))
    gpu_settings.set_defaults()
    if not config.machine.is_cpu:
        gpu_settings.check(os.environ)
    environment = socket_settings(config.machine.host) | os.environ | server_environment(config, run, cpus)
    os.execve(words[0], words, environment)


if __name__ == "__main__":
    main()
