"""The size of an engine's KV cache. On CPU it is no more than its requests need. On a GPU vLLM takes the memory it
finds, unless trainers share that GPU: then the launcher has planned it (planning/memory).

Imports neither torch nor vllm: the launcher plans with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_megatron.config import Config
from areal_megatron.config.passed_through import SPECULATIVE
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.models.table import Dimensions

CPU_BLOCK_TOKENS = 32
"""Tokens in one KV block on CPU, the fewest that vLLM's attention takes there: it reads whole blocks, and only whole
blocks of a prompt are computed once for all answers of a group. vLLM's default is 128."""
CPU_LATENT_TOKENS = 16
"""Likewise where keys and values come from latents: vLLM's kernel takes no other number."""
BATCHED_TOKENS = 8192
"""Tokens of one forward pass of an engine on a GPU with 70 GiB or more (vLLM's default; fewer on smaller GPUs)."""
SHARE = 0.25
"""The part of a machine's memory that the KV caches of all engines may take together."""
_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CPUINFO = Path("/proc/cpuinfo")


ELEMENT = {"bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of an element of the KV cache, by rollout.vllm.kv_cache_dtype."""


def bytes_per_token(config: Config, hf_config: Mapping[str, Any]) -> int:
    """Returns the bytes of a token's keys and values on one rank, or of its latent, which every rank has whole. With tp
    above kv_heads the heads are replicated.

    Of kv_cache_dtype those are counted that `ELEMENT` lists; any other as model.dtype.
    """
    d, vllm = architecture(hf_config).dimensions, config.rollout.vllm
    width, whole = _width(d, config.rollout.tp), ITEMSIZE[config.model.dtype]
    skipped = {str(layer) for layer in vllm.get("kv_cache_dtype_skip_layers") or ()}
    kept_whole = sum(str(layer) in skipped for layer in range(d.layers) if layer not in d.linear)
    element = ELEMENT.get(vllm.get("kv_cache_dtype", ""), whole)
    return width * (element * (d.full_layers - kept_whole) + whole * kept_whole) + _draft_bytes(config)


def _width(d: Dimensions, tp: int) -> int:
    """The elements that a layer keeps of a token on one rank."""
    return d.latent_and_rotated or 2 * max(d.kv_heads // tp, 1) * d.head_dim


def _draft_bytes(config: Config) -> int:
    """Bytes of a token's keys and values of a draft model, which has a cache of its own beside the policy's."""
    model, tp = draft(config)
    if not model:
        return 0
    d = architecture(read_config(model)).dimensions
    return d.layers * _width(d, tp) * ITEMSIZE[config.model.dtype]


def draft(config: Config) -> tuple[str, int]:
    """Returns the folder of the draft model of speculative_config and its tensor-parallel size; "" if it has none, or
    one that is no model of its own."""
    speculation = config.rollout.vllm.get(SPECULATIVE) or {}
    own = speculation.get("method", "draft_model") == "draft_model" and speculation.get("model")
    return own or "", speculation.get("draft_tensor_parallel_size") or config.rollout.tp


def block_tokens(config: Config, hf_config: Mapping[str, Any], on_cuda: bool) -> int:
    """Returns the tokens of a KV block."""
    d, vllm = architecture(hf_config).dimensions, config.rollout.vllm
    if not on_cuda and d.latent:
        return CPU_LATENT_TOKENS
    given = vllm.get("block_size") or (16 if on_cuda else CPU_BLOCK_TOKENS)
    if not d.linear:
        return given
    # vLLM makes blocks of keys and values as large as the state of a layer with linear attention.
    element = ELEMENT.get(vllm.get("kv_cache_dtype", ""), ITEMSIZE[config.model.dtype])
    layer = given * element * _width(d, config.rollout.tp)
    return given * -(-_state_bytes(config, hf_config, on_cuda) // layer)


def block_bytes(config: Config, hf_config: Mapping[str, Any], on_cuda: bool) -> int:
    """Returns the bytes of a KV block on one rank. In a model with two kinds of layers a block is for some layers of
    either kind."""
    d = architecture(hf_config).dimensions
    tokens = block_tokens(config, hf_config, on_cuda)
    return tokens * bytes_per_token(config, hf_config) * _together(d) // d.full_layers


def blocks_per_tokens(hf_config: Mapping[str, Any]) -> int:
    """Returns the blocks that keys and values of `block_tokens` take."""
    d = architecture(hf_config).dimensions
    return -(-d.full_layers // _together(d))


def state_blocks(config: Config, hf_config: Mapping[str, Any]) -> int:
    """Returns the blocks that the states of layers with linear attention take of one sequence, and of each token that
    is drafted for it."""
    d = architecture(hf_config).dimensions
    return -(-d.linear_layers // _together(d)) * (1 + _drafted(config))


def spare_state_blocks(config: Config, hf_config: Mapping[str, Any], on_cuda: bool) -> int:
    """Returns the blocks beside `state_blocks` of a sequence that goes from one block of tokens to the next: where
    prefixes are kept for others, its states are copied into new blocks."""
    d = architecture(hf_config).dimensions
    keeps_prefixes = on_cuda and config.rollout.vllm.get("enable_prefix_caching") is not False
    return -(-d.linear_layers // _together(d)) * keeps_prefixes


def _state_bytes(config: Config, hf_config: Mapping[str, Any], on_cuda: bool) -> int:
    """Bytes that a layer with linear attention keeps of a sequence on one rank: the inputs of its convolution, and of
    each value head a matrix."""
    model, vllm = architecture(hf_config), config.rollout.vllm
    d, auto = model.dimensions, config.model.dtype
    if (inputs := vllm.get("mamba_cache_dtype") or "auto") == "auto":
        inputs = auto
    if (matrix := vllm.get("mamba_ssm_cache_dtype") or "auto") == "auto":
        matrix = hf_config.get(model.family.state_dtype) or "auto"
    if matrix == "auto":
        matrix = "float32" if not on_cuda and _has_fast_states() else inputs
    rows = d.kernel - 1 + _drafted(config)
    size = rows * d.convolved * ITEMSIZE[inputs] + d.linear_value * d.linear_key_dim * ITEMSIZE[matrix]
    return size // config.rollout.tp


def _drafted(config: Config) -> int:
    """The tokens that are drafted at a time."""
    return (config.rollout.vllm.get(SPECULATIVE) or {}).get("num_speculative_tokens") or 0


def _has_fast_states() -> bool:
    """Whether vLLM has kernels of linear attention for this processor, which keep matrices in float32 unless another
    dtype is asked for."""
    try:
        return "avx512_bf16" in _CPUINFO.read_text(encoding="utf-8").split()
    except OSError:
        return False


def batched_tokens(config: Config) -> int:
    """Returns the tokens of one forward pass of an engine on a GPU."""
    return config.rollout.vllm.get("max_num_batched_tokens") or BATCHED_TOKENS


SIZES = ("num_gpu_blocks_override", "kv_cache_memory_bytes")
"""The options of vLLM that give the size of the KV cache, the stronger one first."""


def given_bytes(config: Config, hf_config: Mapping[str, Any], on_cuda: bool) -> int:
    """Returns the bytes of one rank's KV cache if rollout.vllm gives its size, else 0."""
    vllm = config.rollout.vllm
    if blocks := vllm.get("num_gpu_blocks_override"):
        return blocks * block_bytes(config, hf_config, on_cuda)
    return vllm.get("kv_cache_memory_bytes") or 0


def cpu_bytes(config: Config, hf_config: Mapping[str, Any], memory: int) -> int:
    """Returns the bytes of one rank's KV cache on a machine of `memory` bytes.

    It has room for rollout.max_running sequences of full length, or for what fits into SHARE, but for one at least;
    or the size that rollout.vllm gives.
    """
    if given := given_bytes(config, hf_config, on_cuda=False):
        return given
    tokens, block = block_tokens(config, hf_config, on_cuda=False), block_bytes(config, hf_config, on_cuda=False)
    answer = -(-config.longest_in_engine // tokens) * blocks_per_tokens(hf_config) + state_blocks(config, hf_config)
    within = int(SHARE * memory) // (config.rollout.engines * config.rollout.tp * block)
    return block * max(min(1 + config.rollout.max_running * answer, within), 1 + answer)  # vLLM keeps a block to itself


def _together(d: Dimensions) -> int:
    """Returns the number of layers per vLLM block: all layers if they are alike; with two kinds, the size of the
    smaller kind, or of the larger if it has less than 1.5 times as many."""
    fewer, more = sorted((d.full_layers, d.linear_layers or d.full_layers))
    return more if more < 1.5 * fewer else fewer


def machine_bytes() -> int:
    """Returns the memory of this machine, or of the container that this process is in."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(memory, int(_LIMIT.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # no such file, or `max`
        return memory
