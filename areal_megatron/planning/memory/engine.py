"""What a rank of an engine holds, in bytes: pure formulas over vLLM's layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from areal_megatron.config import Config
from areal_megatron.engine import adapters, kv_cache
from areal_megatron.engine.kv_cache import batched_tokens
from areal_megatron.models.adapter import Adapter, served
from areal_megatron.models.architecture import architecture
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.models.logits import BYTES, SCORED_TOKENS
from areal_megatron.models.pattern import numbers, taken_numbers
from areal_megatron.planning.memory.parts import COMMUNICATOR, CONTEXT, MemoryPart, RankMemory, communicator_bytes
from areal_megatron.planning.memory.traffic import weight_traffic
from areal_megatron.reshard import engine_layout
from areal_megatron.reshard.boxes import Layout
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.plan import largest_bucket
from areal_megatron.reshard.session import ROOM

UTILIZATION = 0.92
"""The share of a GPU's memory that vLLM takes (its default gpu_memory_utilization)."""
GENERATIONS = 2
"""Communicators of a link that an engine rank may have at a time: NCCL may still be ending the one of a generation that
failed while the next one is made."""


def engine_memory(
    config: Config, hf_config: Mapping[str, Any], available: int, on_cuda: bool, taken: int = 0, frozen: bool = False
) -> RankMemory:
    """Returns the memory of the fullest rank of an engine; a `frozen` one's weights are never updated.

    On CUDA the KV cache is what is left of the `available` bytes of a GPU (0: unknown), of which a trainer rank has
    `taken` some; it may be negative. On CPU it is what the requests need on a machine with that many bytes. Raises
    ConfigError where the sizes do not fit the model.
    """
    sizes, element, adapter = EngineSizes.of(config.rollout), ITEMSIZE[config.model.dtype], served(config, hf_config)
    layout, received = _fullest(hf_config, sizes), _fullest(hf_config, sizes, adapter)
    staged = 0 if frozen else _staging(received, element, config, on_cuda)
    described = f"{_elements(layout) / 1e9:,.2f} billion in {config.model.dtype}"
    parts = [
        MemoryPart("weights", sum(_sizes(layout, element).values()), described),
        MemoryPart("staging", staged, f"reshard.staging={config.reshard.staging}"),
    ]
    if adapter:
        beside = sum(bool(model.adapter) for model in config.lodgers.values())  # taken to be as large as the policy's
        together = [adapter] * (config.lora.adapters + beside)
        slots = adapters.slots(together, architecture(hf_config), config.is_driven)
        size = slots.count * _elements(_fullest(hf_config, sizes, slots.each)) + _elements(received)
        note = f"as received, and in {slots.count} slot{'s' * (slots.count > 1)} of rank {slots.each.rank}"
        parts.append(MemoryPart("adapters", element * size, note))
    if on_cuda:
        tokens = batched_tokens(config)
        traffic = None if frozen else weight_traffic(config, hf_config)
        peers = traffic.sources if traffic else 0
        own, linked = COMMUNICATOR * (sizes.ranks > 1), config.link == "device" and not frozen
        note = f"a communicator with {peers} of the trainers, and the one that takes its place; an allowance"
        parts += [
            MemoryPart("draft model", _draft_weights(config), "its files, over its tensor-parallel ranks"),
            MemoryPart("a forward pass", _forward(config, hf_config), f"{tokens:,} tokens, an estimate"),
            MemoryPart("CUDA, graphs and NCCL", 2 * CONTEXT + own, "an allowance"),
            MemoryPart("link", communicator_bytes([peers] * GENERATIONS * linked), note),
        ]
        left = int(utilization(config) * available) - taken - sum(part.bytes for part in parts)
        size = kv_cache.given_bytes(config, hf_config, on_cuda=True) or left
    else:
        size = kv_cache.cpu_bytes(config, hf_config, available)
    if available:
        parts.append(MemoryPart("KV cache", size, _kv_note(config, hf_config, size, on_cuda)))
    return RankMemory("engine rank", tuple(part for part in parts if part.bytes))


def _fullest(hf_config: Mapping[str, Any], sizes: EngineSizes, adapter: Adapter | None = None) -> Layout:
    layouts = (engine_layout.layout(hf_config, sizes, rank, adapter) for rank in range(sizes.ranks))
    return max(layouts, key=_elements)


def given_size(config: Config) -> str:
    """Returns the option of vLLM that gives the size of the KV cache; "" if none does."""
    return next((name for name in kv_cache.SIZES if config.rollout.vllm.get(name)), "")


def utilization(config: Config) -> float:
    """Returns the share of a GPU's memory that an engine may take."""
    return config.rollout.vllm.get("gpu_memory_utilization") or UTILIZATION


def kv_tokens(
    config: Config, hf_config: Mapping[str, Any], size: int, on_cuda: bool, running: int | None = None
) -> int:
    """Returns how many tokens' keys and values fit into `size` bytes of a rank, in whole blocks, beside the states of
    linear attention of `running` answers (None: of rollout.max_running)."""
    running = config.rollout.max_running if running is None else running
    blocks = max(size, 0) // kv_cache.block_bytes(config, hf_config, on_cuda)
    blocks -= running * kv_cache.state_blocks(config, hf_config)
    blocks -= kv_cache.spare_state_blocks(config, hf_config, on_cuda)
    return max(blocks, 0) // kv_cache.blocks_per_tokens(hf_config) * kv_cache.block_tokens(config, hf_config, on_cuda)


def state_tokens(config: Config, hf_config: Mapping[str, Any]) -> float:
    """Returns how many tokens of a GPU's KV cache the states of linear attention of one more answer take."""
    tokens = kv_cache.block_tokens(config, hf_config, on_cuda=True) / kv_cache.blocks_per_tokens(hf_config)
    return kv_cache.state_blocks(config, hf_config) * tokens


def crowded(config: Config, hf_config: Mapping[str, Any], size: int, on_cuda: bool) -> str:
    """Returns a line on a KV cache of `size` bytes of a rank that holds fewer than rollout.max_running answers even
    while they have an eighth of their longest; else "". That is what they have on average, half written, if a whole
    one takes a quarter of its limit."""
    running, longest = config.rollout.max_running, config.longest_sequence
    tokens, eighth = kv_tokens(config, hf_config, size, on_cuda), max(longest // 8, 1)
    if tokens >= running * eighth:
        return ""
    streamed = ", reshard.staging=streamed" if on_cuda and config.reshard.staging != "streamed" else ""
    return (
        f"rollout.max_running: {running}, but the KV cache of an engine holds {tokens / longest:,.1f} answers of "
        f"{longest:,} tokens, {tokens // eighth:,} of {eighth:,}: others wait, or are begun again; take a smaller "
        f"number, a larger rollout.tp{streamed} or shorter answers"
    )


def _kv_note(config: Config, hf_config: Mapping[str, Any], size: int, on_cuda: bool) -> str:
    tokens, longest = kv_tokens(config, hf_config, size, on_cuda), config.longest_sequence
    beside = " beside states" if architecture(hf_config).dimensions.linear else ""
    return (
        f"{tokens:,} tokens{beside}: {tokens / longest:,.1f} answers of {longest:,} at a time, "
        f"or rollout.max_running={config.rollout.max_running} of {tokens // config.rollout.max_running:,}"
    )


def _staging(layout: Layout, element: int, config: Config, on_cuda: bool) -> int:
    """The bytes that reshard/staging.py reserves: a second copy of the shard, or, if `streamed`, room for its largest
    layer, for two buckets and for changes."""
    sizes = _sizes(layout, element)
    everything = sum(sizes.values())
    if config.reshard.staging != "streamed":
        return everything
    changes = int(everything * ROOM) if config.may_send_changes() else 0
    units: Counter[int | str] = Counter()
    for name, size in sizes.items():
        if not numbers(name):
            units[name] += size
        else:
            (layers, *_), (count, *_) = taken_numbers(name), layout.held[name]
            units.update(dict.fromkeys(layers[:count], size // count))
    return min(everything, max(*units.values(), 2 * largest_bucket(on_cuda) * element, changes))


def _sizes(layout: Layout, element: int) -> dict[str, int]:
    """Parameter → its bytes, with `element` bytes in an element of the model's dtype."""
    own = {name: ITEMSIZE[dtype] for name, dtype in layout.dtypes.items()}
    return {name: prod(shape) * own.get(name, element) for name, shape in layout.held.items()}


def _draft_weights(config: Config) -> int:
    model, tp = kv_cache.draft(config)
    return sum(file.stat().st_size for file in Path(model).glob("*.safetensors")) // tp if model else 0


def _elements(layout: Layout) -> int:
    return sum(map(prod, layout.held.values()))


def _forward(config: Config, hf_config: Mapping[str, Any]) -> int:
    """Bytes of the residual stream, of a module's input and output, of the widest inner activations, and of three rows
    of float32 for each running request, or each scored token of a prompt: vLLM's sampler keeps logits,
    log-probabilities and probabilities."""
    d, tp, element = architecture(hf_config).dimensions, config.rollout.tp, ITEMSIZE[config.model.dtype]
    chosen = hf_config["num_experts_per_tok"] if d.experts else 0
    experts = chosen * (d.hidden + 3 * d.expert_ffn / tp) + 3 * d.shared_ffn / tp
    inner = max(3 * d.ffn / tp, (d.query + 2 * d.key_value) / tp, experts)
    rows = max(config.rollout.max_running, SCORED_TOKENS)
    return round(batched_tokens(config) * element * (3 * d.hidden + inner) + BYTES * rows * d.vocabulary)
