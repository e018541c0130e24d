"""What a rank of an engine holds that serves a frozen model beside the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from areal_megatron.config import Config, ConfigError
from areal_megatron.engine.kv_cache import machine_bytes
from areal_megatron.engine.served import served
from areal_megatron.models.architecture import read_config
from areal_megatron.planning.memory.engine import engine_memory, kv_tokens
from areal_megatron.planning.memory.parts import GIB, RankMemory


def served_memory(config: Config, gpu_gib: float) -> dict[str, RankMemory]:
    """Returns the memory of a rank of each served model's engines, by name. `gpu_gib`: a GPU's memory in GiB; 0 if it
    is unknown, and nothing is checked.

    Raises ConfigError where the KV cache on a GPU would not hold the longest question with its answer. What is
    quantized is counted as it would be without, and not refused.
    """
    available = int(gpu_gib * GIB) if config.machine.device == "cuda" else machine_bytes()
    return {name: _of(name, config, available) for name, model in config.served_models.items() if model.engines}


def _of(name: str, config: Config, available: int) -> RankMemory:
    own, on_cuda = served(config, name), config.machine.device == "cuda"
    described = read_config(own.model.path)
    found = replace(engine_memory(own, described, available, on_cuda, frozen=True), holder=f"served.{name} rank")
    if on_cuda and available and not _is_quantized(own, described):
        left, longest = found.of("KV cache"), own.longest_sequence
        tokens = kv_tokens(own, described, left, on_cuda, running=1)
        if tokens < longest:
            used = ", ".join(f"{part.name} {part.bytes / GIB:,.2f}" for part in found.parts if part.name != "KV cache")
            raise ConfigError(
                f"served.{name}.tp: a rank has {left / GIB:,.2f} GiB left for its KV cache on a GPU of "
                f"{available / GIB:g} ({used}): {tokens:,} tokens, a question with its answer may have {longest:,}: "
                f"raise it, or lower served.{name}.max_length"
            )
    return found


def _is_quantized(own: Config, described: Mapping[str, Any]) -> bool:
    return bool(own.rollout.vllm.get("quantization") or described.get("quantization_config"))
