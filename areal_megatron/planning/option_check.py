"""Has vLLM and megatron-core check what a config passes through to them, before anything starts, and looks for the
kernels that it names.

A launcher imports neither: the Python of each pool does it, in a process that takes as long as it takes to import the
library, about ten seconds; none is started for a config that passes nothing through and names no kernel.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from areal_megatron.config import Config, ConfigError, config_file, passed_through
from areal_megatron.config.passed_through import MEGATRON, SPECULATIVE, VLLM
from areal_megatron.engine import kv_cache
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.run import versions
from areal_megatron.run.extras import EXTRAS

_MODULES = {"rollout": "areal_megatron.engine.vllm_options", "trainer": "areal_megatron.trainer.check_fields"}
_LIMIT_S = 300.0


def check_for_device(config: Config) -> None:
    """Checks beyond the config's loader: options that depend on the device, which must be decided, and on the models.
    Raises ConfigError."""

    def require(condition: bool, key: str, problem: str) -> None:
        if not condition:
            raise ConfigError(f"{key}: {problem}")

    vllm, megatron = config.rollout.vllm, config.trainer.megatron
    if config.has_engines:
        passed_through.check_vllm(vllm, config.machine.is_cpu, config.shares_gpus, require)
        passed_through.check_speculation(vllm, config.engines_start_empty, require)
        _check_draft(config)
        for name, model in config.served_models.items():
            passed_through.check_served(name, model.vllm, config.machine.is_cpu, require)
    if megatron:
        experts = bool(architecture(read_config(config.model.path)).dimensions.experts)
        passed_through.check_modules(megatron, experts, require)


def _check_draft(config: Config) -> None:
    model, _ = kv_cache.draft(config)
    if not model:
        return
    try:
        if not Path(model).is_dir():
            raise ConfigError(f"model.path: there is no folder {model}")
        architecture(read_config(model))
    except ConfigError as e:
        raise ConfigError(str(e).replace("model.path", f"{VLLM}.{SPECULATIVE}", 1)) from None


def uncounted(config: Config) -> list[str]:
    """Returns a line for each option that changes how much memory a run takes, and that the plan counts nothing of."""
    vllm, megatron = config.rollout.vllm, config.trainer.megatron
    found = [f"{MEGATRON}.{name}" for name in passed_through.OFFLOADING if megatron.get(name)]
    if config.has_engines:
        dtype, method = vllm.get("kv_cache_dtype", "auto"), (vllm.get(SPECULATIVE) or {}).get("method", "draft_model")
        found += [f"{VLLM}.kv_cache_dtype={dtype}"] * (dtype not in ("auto", *kv_cache.ELEMENT))
        counted = ("ngram", "ngram_gpu", "suffix", "draft_model")
        found += [f"{VLLM}.{SPECULATIVE} with method={method}"] * (method not in counted)
    return [f"{option}: changes how much memory is needed; the plan counts as if it were not there" for option in found]


def check_options(config: Config, python: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns a line for each pool whose options cannot be checked here; its processes check them when they start.

    `python` says how Python is called for a pool, if not as this one is. machine.device must be decided. Raises
    ConfigError, which names the key, for an option that is refused.
    """
    unchecked, kernels = [], _named_kernels(config)
    if kernels and "trainer" not in python and versions.is_for_cpu():
        unchecked = [
            f"{key}: cannot be checked before the processes start: packages here are for CPUs" for key in kernels
        ]
        kernels = []
    trainers = ", ".join([MEGATRON] * bool(config.trainer.megatron) + kernels)
    engines = {}
    if config.has_engines:
        served = {f"served.{name}.vllm": model.vllm for name, model in config.served_models.items() if model.vllm}
        given = served | ({VLLM: config.rollout.vllm} if config.rollout.vllm or not served else {})
        engines = {("rollout", ", ".join(sorted(given))): any(given.values())}
    for (pool, key), given in ({("trainer", trainers): bool(trainers)} | engines).items():
        if given and (why := _check(pool, python.get(pool), config)):
            unchecked.append(f"{key}: cannot be checked before the processes start: {why}")
    return unchecked


def without_kernels(config: Config) -> list[str]:
    """Returns a line if trainers with the packages of this interpreter are slow for want of a kernel; machine.device
    must be decided."""
    has_nets = architecture(read_config(config.model.path)).dimensions.linear
    if config.machine.is_cpu or not has_nets or versions.is_for_cpu() or versions.has_fla():
        return []
    return [
        "model.path: the model has gated delta nets, and trainers without fla-core compute them many times slower: pip "
        f"install {EXTRAS['fla'][0]}"
    ]


def _named_kernels(config: Config) -> list[str]:
    """Returns the keys that name a kernel of a package of its own."""
    trainer = config.trainer
    named = {"attention": trainer.attention in ("fa3", "fa4"), "expert_dispatch": trainer.expert_dispatch == "flex"}
    return [f"trainer.{key}" for key, is_named in named.items() if is_named]


def _check(pool: str, python: Sequence[str] | None, config: Config) -> str:
    """Returns why it cannot be checked here; "" if it has been."""
    if python is None and (missing := versions.missing_library(pool)):
        return f"{missing} is not installed here"
    command, sent = [*(python or [sys.executable]), "-m", _MODULES[pool]], config_file.text(config)
    try:
        done = subprocess.run(
            command, input=sent, capture_output=True, text=True, timeout=_LIMIT_S, encoding="utf-8", errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"{e}"
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    if done.returncode == 2 and said[-1].startswith("error: "):
        raise ConfigError(said[-1].removeprefix("error: "))
    return "" if done.returncode == 0 else f"{' '.join(command)}: {said[-1]}"
