"""The size of an engine's KV cache. On CPU it is no more than its requests need. On a GPU vLLM takes the memory it
finds, unless trainers share that GPU: then the launcher has planned it (launch/memory).

Imports neither torch nor vllm: the launcher plans with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_megatron.config import Config
from areal_megatron.models.architecture import architecture
from areal_megatron.models.dtypes import ITEMSIZE

CPU_BLOCK_TOKENS = 32
"""Tokens in one KV block on CPU, the fewest that vLLM's attention takes there: it reads whole blocks, and only whole
blocks of a prompt are computed once for all answers of a group. vLLM's default is 128."""
BATCHED_TOKENS = 8192
"""Tokens of one forward pass of an engine on a GPU with 70 GiB or more (vLLM's default; fewer on smaller GPUs)."""
SHARE = 0.25
"""The part of a machine's memory that the KV caches of all engines may take together."""
_LIMIT = Path("/sys/fs/cgroup/memory.max")


def bytes_per_token(config: Config, hf_config: Mapping[str, Any]) -> int:
    """Returns the bytes of a token's keys and values on one rank. With tp above kv_heads the heads are replicated."""
    d = architecture(hf_config).dimensions
    heads = max(d.kv_heads // config.rollout.tp, 1)
    return 2 * d.layers * heads * d.head_dim * ITEMSIZE[config.model.dtype]


def cpu_bytes(config: Config, hf_config: Mapping[str, Any], memory: int) -> int:
    """Returns the bytes of one rank's KV cache on a machine of `memory` bytes.

    It has room for rollout.max_running sequences of full length, or for what fits into SHARE, but for one at least.
    """
    block = CPU_BLOCK_TOKENS * bytes_per_token(config, hf_config)
    answer = -(-config.longest_sequence // CPU_BLOCK_TOKENS)
    within = int(SHARE * memory) // (config.rollout.engines * config.rollout.tp * block)
    return block * max(min(1 + config.rollout.max_running * answer, within), 1 + answer)  # vLLM keeps a block to itself


def machine_bytes() -> int:
    """Returns the memory of this machine, or of the container that this process is in."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(memory, int(_LIMIT.read_text()))
    except (OSError, ValueError):  # no such file, or `max`
        return memory
