"""What a trainer rank holds, in bytes: pure formulas over the trainer's layout."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from areal_megatron.config import Config
from areal_megatron.models.architecture import architecture
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.models.logits import chunk_tokens
from areal_megatron.reshard import trainer_layout
from areal_megatron.reshard.plan import BUCKET_ELEMENTS
from areal_megatron.reshard.trainer_layout import MegatronSizes
from launch.memory import activations
from launch.memory.parts import COMMUNICATOR, CONTEXT, LINK, MemoryPart, RankMemory

MOMENTS, MAIN = 8, 4
"""Bytes of Adam's two moments and of a float32 copy."""


class Held(NamedTuple):
    """Parameters of a rank, in elements."""

    dense: int
    experts: int
    largest: int
    """Of one tensor."""

    @property
    def all(self) -> int:
        return self.dense + self.experts


def held(hf_config: Mapping[str, Any], sizes: MegatronSizes, stage: int, critic: bool = False) -> Held:
    """Of the first rank of a pipeline stage; those beside it hold as many. A critic has a head with one row in place of
    the output layer. Raises ConfigError."""
    layout = trainer_layout.layout(hf_config, sizes, stage * sizes.tp * sizes.cp * sizes.dp)
    if critic:
        layout = trainer_layout.without_head(layout)
    counts = {name: prod(shape) for name, shape in layout.held.items()}
    if critic and stage == sizes.pp - 1:
        counts["head"] = hf_config["hidden_size"]
    experts = sum(count for name, count in counts.items() if ".experts." in name)
    largest = max(prod(shape[name.count("{}") :]) for name, shape in layout.held.items())
    return Held(sum(counts.values()) - experts, experts, largest)


def trainer_memory(config: Config, hf_config: Mapping[str, Any], on_cuda: bool) -> RankMemory:
    """The fullest rank of the pipeline. Raises ConfigError where the sizes do not fit the model."""
    return max(
        (stage_memory(config, hf_config, stage, on_cuda) for stage in range(config.trainer.pp)),
        key=lambda memory: memory.total,
    )


def stage_memory(config: Config, hf_config: Mapping[str, Any], stage: int, on_cuda: bool) -> RankMemory:
    """A rank of one pipeline stage, at its fullest: in a backward pass, in an optimizer step, or while it is built."""
    t, sizes, element = config.trainer, MegatronSizes.of(config.trainer), ITEMSIZE[config.model.dtype]
    model, own = architecture(hf_config), held(hf_config, MegatronSizes.of(config.trainer), stage)
    layer = activations.layer_of(config, model, hf_config.get("num_experts_per_tok") or 0, on_cuda)
    kept = activations.activations(config, layer, stage)
    parts = [
        # DDP with the distributed optimizer: the parameters lie in one buffer a kind, whole on every rank
        MemoryPart("parameters", element * own.all, f"{own.all / 1e9:,.2f} billion in {config.model.dtype}"),
        # grad_reduce_in_fp32 (trainer/model.py); a gradient is made in the parameter's dtype and added to the buffer
        MemoryPart("gradients", 4 * own.all + element * own.largest, "float32, of all parameters of the rank"),
        MemoryPart("optimizer", *_optimizer(config, sizes, own)),
        MemoryPart(
            "reference",
            element * own.all if config.mode != "sft" and config.ppo.has_reference else 0,
            "frozen parameters",
        ),
        MemoryPart("critic", *_critic(config, hf_config, sizes, stage)),
        MemoryPart("activations", kept, activations.describe(config, stage)),
        MemoryPart(
            "log-probabilities", _logprobs(config, hf_config, sizes) if stage == t.pp - 1 else 0, "last stage only"
        ),
        MemoryPart(
            "sending weights",
            _sending(config, own, element),
            f"two buckets for each of {config.rollout.engines} engines",
        ),
        MemoryPart(
            "CUDA and NCCL", _communication(config, hf_config, sizes, element) if on_cuda else 0, "an allowance"
        ),
    ]
    fixed = sum(part.bytes for part in parts if part.name not in ("activations", "log-probabilities"))
    working = sum(part.bytes for part in parts) - fixed
    # torch's AdamW takes the roots of all second moments at once; TransformerEngine's and apex's need no room
    step = MAIN * (own.dense // t.dp + own.experts // _expert_replicas(sizes))
    # DDP makes its buffers beside the parameters that the model was built with, before optimizer and activations
    building = element * own.all - parts[2].bytes
    parts.append(MemoryPart("step or start", max(step, building, working) - working, "beyond the backward pass"))
    first, count = stage * t.tp * t.dp, t.tp * t.dp
    ranks = f"ranks {first}–{first + count - 1}" if count > 1 else f"rank {first}"
    return RankMemory(f"trainer rank (stage {stage} of {t.pp}, {ranks})", tuple(part for part in parts if part.bytes))


def _expert_replicas(sizes: MegatronSizes) -> int:
    """Ranks that hold the same experts."""
    return sizes.tp * sizes.cp * sizes.dp // (sizes.expert_tp * sizes.ep)


def _optimizer(config: Config, sizes: MegatronSizes, own: Held) -> tuple[int, str]:
    """Megatron's distributed optimizer: ranks that hold the same parameters divide the states of these; float32
    parameters are their own main parameters."""
    main = 0 if config.model.dtype == "float32" else MAIN
    states = "two moments" if not main else "main parameters and two moments"
    size = (main + MOMENTS) * (-(-own.dense // config.trainer.dp) + -(-own.experts // _expert_replicas(sizes)))
    apart = f", of experts over {_expert_replicas(sizes)}" if own.experts else ""
    return size, f"float32 {states}, divided over trainer.dp={config.trainer.dp}{apart}"


def _critic(config: Config, hf_config: Mapping[str, Any], sizes: MegatronSizes, stage: int) -> tuple[int, str]:
    """Its parameters, gradients and optimizer states, as the policy's; the activations of the two take turns."""
    if config.mode == "sft" or not config.ppo.critic:
        return 0, ""
    own, element = held(hf_config, sizes, stage, critic=True), ITEMSIZE[config.model.dtype]
    size = (element + 4) * own.all + _optimizer(config, sizes, own)[0]
    return size, f"{own.all / 1e9:,.2f} billion parameters, gradients and optimizer as the policy's"


def _logprobs(config: Config, hf_config: Mapping[str, Any], sizes: MegatronSizes) -> int:
    """trainer/logprobs.py: the logits of a chunk (12 bytes each), a gradient of the output layer in float32 and twice
    in its dtype, and the final hidden states of a micro-batch gathered, picked, and their gradient."""
    model, element = architecture(hf_config).dimensions, ITEMSIZE[config.model.dtype]
    tokens = activations.microbatch_tokens(config)
    chunk = chunk_tokens(model.vocabulary, sizes.tp)
    rows = sizes.padded_vocabulary(model.vocabulary) // sizes.tp
    return (
        12 * min(chunk, tokens) * rows + (4 + 2 * element) * rows * model.hidden + 3 * element * tokens * model.hidden
    )


def _sending(config: Config, own: Held, element: int) -> int:
    """reshard/publish.py: two buffers in turns for each link, kept from update to update."""
    engines = config.rollout.engines if config.mode == "rl" else 0
    return 2 * element * min(BUCKET_ELEMENTS, own.all) * engines


def _communication(config: Config, hf_config: Mapping[str, Any], sizes: MegatronSizes, element: int) -> int:
    """The context, a communicator for each group of several ranks, one for each link, and the buffer in which Megatron
    gathers a row of tokens over tp for sequence parallelism."""
    t = config.trainer
    groups = [t.tp, t.dp, t.pp, sizes.ranks]
    if architecture(hf_config).dimensions.experts:
        groups += [sizes.ep * sizes.expert_tp, _expert_replicas(sizes)]
    links = config.rollout.engines if config.mode == "rl" else 0
    gathered = element * activations.microbatch_tokens(config) * hf_config["hidden_size"] if t.tp > 1 else 0
    return CONTEXT + COMMUNICATOR * sum(size > 1 for size in groups) + LINK * links + gathered


def checkpoint_bytes(config: Config, hf_config: Mapping[str, Any]) -> int:
    """One checkpoint on disk: the parameters in their dtype and, in the shapes of the parameters, float32 main
    parameters and two moments (`fully_reshardable`), each once whatever the number of ranks; of a critic too."""
    model = architecture(hf_config)
    elements = sum(map(prod, model.canonical.values()))
    if config.mode != "sft" and config.ppo.critic:
        head = 0 if model.tied else model.dimensions.vocabulary * model.dimensions.hidden
        elements += elements - head + model.dimensions.hidden
    return (ITEMSIZE[config.model.dtype] + MAIN + MOMENTS) * elements
