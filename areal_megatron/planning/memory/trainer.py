"""What a trainer rank holds, in bytes: pure formulas over the trainer's layout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from areal_megatron.config import Config
from areal_megatron.model_check import reference_config
from areal_megatron.models.adapter import MEGATRON, Adapter, adapted
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.models.logits import BYTES, cpu_logits, gpu_logits, tile
from areal_megatron.models.pattern import numbers
from areal_megatron.planning.memory.activations import activations, describe, layer_of, microbatch_tokens
from areal_megatron.planning.memory.parts import COMMUNICATOR, CONTEXT, GIB, MemoryPart, RankMemory, communicator_bytes
from areal_megatron.planning.memory.traffic import weight_traffic
from areal_megatron.reshard import trainer_layout
from areal_megatron.reshard.plan import largest_bucket
from areal_megatron.reshard.session import HISTORY, HOST_BLOCK, looking_bytes
from areal_megatron.reshard.trainer_layout import MegatronSizes

MOMENTS, MAIN = 8, 4
"""Bytes that a parameter takes in Adam's two moments, and in a float32 copy."""


class Held(NamedTuple):
    """The parameters of a rank, in elements."""

    dense: int
    experts: int
    largest: int
    """Elements of the largest tensor."""

    @property
    def all(self) -> int:
        return self.dense + self.experts


def held(
    hf_config: Mapping[str, Any],
    sizes: MegatronSizes,
    stage: int,
    critic: bool = False,
    adapter: Adapter | None = None,
) -> Held:
    """Returns the parameters of the first rank of a pipeline stage, or an `adapter`'s factors; the stage's other ranks
    hold as many.

    The output layer of a `critic` is a head with one row. Raises ConfigError where the sizes do not fit the model.
    """
    alike = replace(sizes, cp=1, dp=sizes.expert_tp * sizes.ep)  # replicas change nothing of what a rank holds
    return _held(json.dumps(dict(hf_config)), alike, stage, critic, adapter)


def trainable(config: Config, hf_config: Mapping[str, Any], sizes: MegatronSizes, stage: int) -> Held:
    """Returns what is trained of a rank of a stage: the factors of adapters, or without these all parameters."""
    return held(hf_config, sizes, stage, adapter=Adapter.of(config.lora))


@lru_cache(maxsize=4096)
def _held(hf_config: str, sizes: MegatronSizes, stage: int, critic: bool, adapter: Adapter | None) -> Held:
    described = json.loads(hf_config)
    layout = trainer_layout.layout(described, sizes, stage * sizes.tp * sizes.dp, adapter)
    if critic:
        layout = trainer_layout.without_head(layout)
    counts = {name: prod(shape) for name, shape in layout.held.items()}
    if critic and stage == sizes.pp - 1:
        counts["head"] = described["hidden_size"]
    experts = sum(count for name, count in counts.items() if ".experts." in name)
    largest = max((prod(shape[numbers(name) :]) for name, shape in layout.held.items()), default=0)
    return Held(sum(counts.values()) - experts, experts, largest)


def trainer_memory(config: Config, hf_config: Mapping[str, Any], on_cuda: bool, gpu_gib: float = 0) -> RankMemory:
    """Returns the peak memory of the fullest rank, on GPUs with `gpu_gib` GiB (0 if unknown). Raises ConfigError where
    the sizes do not fit the model."""
    return max(
        (stage_memory(config, hf_config, stage, on_cuda, gpu_gib) for stage in range(config.trainer.pp)),
        key=lambda memory: memory.total,
    )


def stage_memory(
    config: Config, hf_config: Mapping[str, Any], stage: int, on_cuda: bool, gpu_gib: float = 0
) -> RankMemory:
    """Returns the peak memory of a rank of one pipeline stage: in a backward pass, in an optimizer step, or while the
    model is built."""
    t, sizes, element = config.trainer, MegatronSizes.of(config.trainer), ITEMSIZE[config.model.dtype]
    model, own, learnt = (
        architecture(hf_config),
        held(hf_config, sizes, stage),
        trainable(config, hf_config, sizes, stage),
    )
    adapters = learnt.all * config.has_adapters
    # DDP with the distributed optimizer keeps the parameters of a dtype in one buffer, whole on every rank
    count = f"{own.all / 1e9:,.2f} billion" + f" and {adapters / 1e6:,.1f} million of adapters" * config.has_adapters
    parameters = MemoryPart("parameters", element * (own.all + adapters), f"{count} in {config.model.dtype}")
    # grad_reduce_in_fp32 (trainer/model.py); a gradient is made in the parameter's dtype and added to the buffer
    whose = "the rank's adapters" if config.has_adapters else "all parameters of the rank"
    gradients = MemoryPart("gradients", 4 * learnt.all + element * learnt.largest, f"float32, of {whose}")
    on_device = not (on_cuda and config.optimizer.on_host)
    optimizer = _optimizer(config, sizes, learnt) if on_device else MemoryPart("optimizer", 0)
    chosen = hf_config["num_experts_per_tok"] if model.dimensions.experts else 0
    layer = layer_of(config, model, chosen, on_cuda)
    kept = MemoryPart("activations", activations(config, layer, stage), describe(config, stage))
    held_logits = gpu_logits(gpu_gib * GIB) if on_cuda else cpu_logits(1)
    logprobs = _logprobs(config, hf_config, sizes, stage, held_logits)
    backward = kept.bytes + logprobs.bytes
    # DDP makes its buffers beside the parameters that the model was built with, before optimizer and activations
    building = element * learnt.all - optimizer.bytes
    more = max(_step(sizes, learnt) if on_device else 0, building, backward) - backward
    sent = learnt if config.engines_adapt else own
    parts = (
        parameters,
        gradients,
        optimizer,
        _reference(config, hf_config, own, stage),
        _critic(config, hf_config, sizes, stage, on_device),
        _merged(config, hf_config, sizes, stage),
        kept,
        logprobs,
        *_sending(config, hf_config, sent, sizes, stage, on_cuda),
        MemoryPart("CUDA and NCCL", _communication(config, hf_config, sizes) if on_cuda else 0, "an allowance"),
        MemoryPart("step or start", more, "beyond the backward pass"),
    )
    count = t.tp * t.cp * t.dp
    first = stage * count
    ranks = f"ranks {first}–{first + count - 1}" if count > 1 else f"rank {first}"
    return RankMemory(f"trainer rank (stage {stage} of {t.pp}, {ranks})", tuple(part for part in parts if part.bytes))


def _expert_replicas(sizes: MegatronSizes) -> int:
    """Returns how many ranks of a stage hold the same experts."""
    return sizes.tp * sizes.cp * sizes.dp // (sizes.expert_tp * sizes.ep)


def _optimizer(config: Config, sizes: MegatronSizes, own: Held) -> MemoryPart:
    """Megatron's distributed optimizer shards the states of a parameter over the ranks that hold it. Parameters in
    float32 are their own main parameters."""
    main = 0 if config.model.dtype == "float32" else MAIN
    states = "two moments" if not main else "main parameters and two moments"
    size = (main + MOMENTS) * _own_elements(sizes, own)
    experts = f", of experts over {_expert_replicas(sizes)}" if own.experts else ""
    over = f"trainer.dp={sizes.dp}" + (f" × cp={sizes.cp}" if sizes.cp > 1 else "")
    return MemoryPart("optimizer", size, f"float32 {states}, sharded over {over}{experts}")


def _step(sizes: MegatronSizes, own: Held) -> int:
    """torch's AdamW takes the roots of all second moments at once; TransformerEngine's and apex's need no room."""
    return MAIN * (own.dense // (sizes.dp * sizes.cp) + own.experts // _expert_replicas(sizes))


def host_memory(config: Config, hf_config: Mapping[str, Any]) -> int:
    """Returns the bytes of the host's memory in which the fullest trainer rank keeps its optimizer states, 0 if they
    are not there: main parameters, two moments, and the gradients of a step, float32 each."""
    if not config.optimizer.on_host:
        return 0
    sizes = MegatronSizes.of(config.trainer)

    def elements(stage: int) -> int:
        critic = held(hf_config, sizes, stage, critic=True) if config.has_critic else Held(0, 0, 0)
        return sum(_own_elements(sizes, each) for each in (trainable(config, hf_config, sizes, stage), critic))

    return (2 * MAIN + MOMENTS) * max(map(elements, range(sizes.pp)))


def _own_elements(sizes: MegatronSizes, own: Held) -> int:
    """Elements whose optimizer states are this rank's."""
    return -(-own.dense // (sizes.dp * sizes.cp)) + -(-own.experts // _expert_replicas(sizes))


def _reference(config: Config, hf_config: Mapping[str, Any], policy: Held, stage: int) -> MemoryPart:
    """The frozen model of ppo.penalty: as large as the policy, or a teacher of its own size. Of a policy with adapters
    it is the same model without them."""
    teacher = config.ppo.penalty.kl_folder
    if not config.has_reference or (config.has_adapters and not teacher):
        return MemoryPart("reference", 0)
    own, who = policy, "frozen parameters"
    if teacher:
        sizes = MegatronSizes.of(reference_config(config).trainer)
        own, who = held(read_config(teacher), sizes, stage), "the frozen parameters of ppo.penalty.kl_model"
    return MemoryPart("reference", ITEMSIZE[config.model.dtype] * own.all, f"{own.all / 1e9:,.2f} billion, {who}")


def _merged(config: Config, hf_config: Mapping[str, Any], sizes: MegatronSizes, stage: int) -> MemoryPart:
    """trainer/adapter.py: copies of the weights with adapters, which engines get, and a sum in float32."""
    if not config.has_engines or not config.has_adapters or config.engines_adapt:
        return MemoryPart("merged weights", 0)
    first = stage * sizes.tp * sizes.cp * sizes.dp
    factors = trainer_layout.layout(hf_config, sizes, first, Adapter.of(config.lora)).held
    base = trainer_layout.layout(hf_config, sizes, first).held
    own = {name.partition(MEGATRON)[0] + ".weight" for name in factors}
    size = ITEMSIZE[config.model.dtype] * sum(prod(base[name]) for name in own)
    largest = max((prod(base[name][numbers(name) :]) for name in own), default=0)
    return MemoryPart("merged weights", size + 2 * MAIN * largest, "lora.merge=true, weights with adapters")


def _critic(
    config: Config, hf_config: Mapping[str, Any], sizes: MegatronSizes, stage: int, on_device: bool
) -> MemoryPart:
    """The critic's parameters, gradients and optimizer states. Its activations are never there at the same time as
    the policy's."""
    if not config.has_critic:
        return MemoryPart("critic", 0)
    own = held(hf_config, sizes, stage, critic=True)
    optimizer = _optimizer(config, sizes, own).bytes if on_device else 0
    size = (ITEMSIZE[config.model.dtype] + 4) * own.all + optimizer
    note = f"{own.all / 1e9:,.2f} billion parameters, gradients and optimizer as the policy's"
    return MemoryPart("critic", size, note)


def _logprobs(
    config: Config, hf_config: Mapping[str, Any], sizes: MegatronSizes, stage: int, held_logits: int
) -> MemoryPart:
    """trainer/logprobs.py: the logits of a tile; the gradient of the output layer, and a tile's columns of it in
    float32; and the final hidden states of a micro-batch: gathered, picked, and their gradient, in float32 at first."""
    model, element = architecture(hf_config).dimensions, ITEMSIZE[config.model.dtype]
    tokens, rows = microbatch_tokens(config), sizes.padded_vocabulary(model.vocabulary) // sizes.tp
    high, wide = tile(tokens, rows, held_logits)
    output_layer = 0 if config.has_adapters else (element * rows + 4 * wide) * model.hidden
    hidden_states = (2 * element + 4 + (element if element < 4 else 0)) * tokens * model.hidden
    size = BYTES * high * wide + output_layer + hidden_states if stage == sizes.pp - 1 else 0
    return MemoryPart("log-probabilities", size, "last stage only")


def _sending(
    config: Config, hf_config: Mapping[str, Any], own: Held, sizes: MegatronSizes, stage: int, on_cuda: bool
) -> Iterator[MemoryPart]:
    """reshard/outlet.py: two buffers that each link uses in turn and keeps from update to update, and NCCL's buffers,
    for the rank of the stage that has most of both."""
    traffic = weight_traffic(config, hf_config)
    if traffic is None:
        return
    ranks = sizes.ranks // sizes.pp
    links = max(traffic.peers[stage * ranks : (stage + 1) * ranks], key=communicator_bytes)
    bucket = ITEMSIZE[config.model.dtype] * min(largest_bucket(on_cuda), own.all)
    yield MemoryPart("sending weights", 2 * bucket * len(links), f"two buckets for each of {len(links)} engines")
    if not on_cuda:
        kept = _published(config, own, traffic.sent[stage * ranks : (stage + 1) * ranks], on_cuda)
        yield MemoryPart("last publication", kept, f"reshard.update={config.reshard.update}")
    elif config.may_send_changes():
        size = looking_bytes(min(largest_bucket(on_cuda), own.all), ITEMSIZE[config.model.dtype])
        yield MemoryPart("looking for changes", size, "one message at a time")
    if on_cuda and config.link == "device":
        note = f"{len(links)} communicators with {sum(links)} engine ranks, an allowance"
        yield MemoryPart("links", communicator_bytes(links), note)


def published_memory(config: Config, hf_config: Mapping[str, Any], on_cuda: bool) -> int:
    """Returns the bytes of host memory in which the busiest sender among the trainer ranks keeps its last published
    weights."""
    traffic, sizes = weight_traffic(config, hf_config), MegatronSizes.of(config.trainer)
    if traffic is None:
        return 0
    ranks = sizes.ranks // sizes.pp
    adapter = Adapter.of(config.lora) if config.engines_adapt else None
    return max(
        _published(
            config,
            held(hf_config, sizes, stage, adapter=adapter),
            traffic.sent[stage * ranks : (stage + 1) * ranks],
            on_cuda,
        )
        for stage in range(sizes.pp)
    )


def _published(config: Config, own: Held, sent: Sequence[int], on_cuda: bool) -> int:
    """reshard/published.py: what is sent to several engines is kept once, and beside it some changes for engines that
    lag. All blocks of pinned memory but the last are full but for less than the largest message."""
    if not config.may_send_changes():
        return 0
    element = ITEMSIZE[config.model.dtype]
    kept = element * min(own.all, max(sent))
    blocks = -(-kept // (HOST_BLOCK - element * largest_bucket(on_cuda))) * HOST_BLOCK
    return int((blocks if on_cuda else kept) + HISTORY * kept)


def _communication(config: Config, hf_config: Mapping[str, Any], sizes: MegatronSizes) -> int:
    """Bytes of the CUDA context, of a communicator for each group of several ranks, and of the buffer in which Megatron
    gathers a row of tokens over tp for sequence parallelism."""
    t = config.trainer
    groups = [t.tp, t.cp, t.dp, t.pp, sizes.ranks]
    if t.cp > 1:  # those that share gradients, and those of routers' balance
        groups += [t.dp * t.cp, t.tp * t.cp]
    if architecture(hf_config).dimensions.experts:
        groups += [sizes.ep * sizes.expert_tp, _expert_replicas(sizes)]
    gathered = ITEMSIZE[config.model.dtype] * microbatch_tokens(config) * hf_config["hidden_size"] if t.tp > 1 else 0
    return CONTEXT + COMMUNICATOR * sum(size > 1 for size in groups) + gathered


def checkpoint_bytes(config: Config, hf_config: Mapping[str, Any]) -> int:
    """Returns the size of a checkpoint on disk, whatever the number of ranks.

    What is trained is there once in its dtype, and once in its own shapes (`fully_reshardable`) as float32 main
    parameters and two moments; a critic's likewise.
    """
    model = adapted(architecture(hf_config), Adapter.of(config.lora))
    elements = sum(map(prod, model.canonical.values()))
    if config.has_critic:
        head = 0 if model.tied else model.dimensions.vocabulary * model.dimensions.hidden
        elements += elements - head + model.dimensions.hidden
    return (ITEMSIZE[config.model.dtype] + MAIN + MOMENTS) * elements
