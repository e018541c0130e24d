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
    if not on_cuda and architecture(hf_config).dimensions.latent:
        return CPU_LATENT_TOKENS
    given = config.rollout.vllm.get("block_size") or (16 if on_cuda else CPU_BLOCK_TOKENS)
    d, tp = architecture(hf_config).dimensions, config.rollout.tp
    if not d.linear:
        return given
    # vLLM makes blocks of keys and values as large as the state of a layer with linear attention.
    layer = given * bytes_per_token(config, hf_config) // d.full_layers
    element = ITEMSIZE[config.model.dtype]
    return given * -(-_state_bytes(d, tp, element, 4 if on_cuda or _has_fast_states() else element) // layer)


def _state_bytes(d: Dimensions, tp: int, element: int, of_matrix: int) -> int:
    """Bytes that a layer with linear attention keeps of a sequence on one rank: the inputs of its convolution, and of
    each value head a matrix, whose elements take `of_matrix` bytes."""
    return ((d.kernel - 1) * d.convolved * element + d.linear_value * d.linear_key_dim * of_matrix) // tp


def _has_fast_states() -> bool:
    """Whether vLLM has kernels of linear attention for this processor, which keep matrices in float32; else they are in
    the dtype of the model."""
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
        return blocks * block_tokens(config, hf_config, on_cuda) * bytes_per_token(config, hf_config)
    return vllm.get("kv_cache_memory_bytes") or 0


def cpu_bytes(config: Config, hf_config: Mapping[str, Any], memory: int) -> int:
    """Returns the bytes of one rank's KV cache on a machine of `memory` bytes.

    It has room for rollout.max_running sequences of full length, or for what fits into SHARE, but for one at least;
    or the size that rollout.vllm gives.
    """
    if given := given_bytes(config, hf_config, on_cuda=False):
        return given
    tokens = block_tokens(config, hf_config, on_cuda=False)
    d = architecture(hf_config).dimensions
    together = _together(d)
    block = tokens * bytes_per_token(config, hf_config) * together // d.full_layers
    answer = -(-config.longest_in_engine // tokens) * -(-d.full_layers // together) - (-d.linear_layers // together)
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
