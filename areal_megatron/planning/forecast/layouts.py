"""The layouts of trainers and engines that fit their GPUs: what the search ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import Any, NamedTuple

import numpy as np

from areal_megatron.config import Config, ConfigError, TrainerConfig
from areal_megatron.engine import kv_cache
from areal_megatron.models.architecture import architecture
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.planning.forecast.accelerators import Accelerator
from areal_megatron.planning.forecast.engine_time import EngineTime
from areal_megatron.planning.forecast.trainer_time import PackedBatch, TrainerTime
from areal_megatron.planning.memory import plan_memory
from areal_megatron.planning.memory.engine import engine_memory, kv_tokens, state_tokens
from areal_megatron.planning.memory.parts import GIB, USABLE, communicator_bytes
from areal_megatron.planning.memory.recompute import with_recompute
from areal_megatron.planning.memory.trainer import MAIN, MOMENTS, checkpoint_bytes, held, trainable, trainer_memory
from areal_megatron.reshard.plan import largest_bucket
from areal_megatron.reshard.trainer_layout import MegatronSizes

_STAGES = (1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 32)
"""Pipeline stages that are tried."""
_VIRTUAL = (1, 2)
KEPT = 2
"""Layouts of the trainers that are kept for a number of GPUs, the fastest ones."""


@dataclass(frozen=True)
class Cluster:
    """The nodes of a run, all alike."""

    nodes: int
    gpus: int
    """GPUs of a node."""
    gib: float
    """Memory of a GPU in GiB."""

    @property
    def size(self) -> int:
        return self.nodes * self.gpus

    def splits(self) -> range:
        """Returns the numbers of GPUs that trainers may have: whole nodes where there are four or more."""
        step = self.gpus if self.nodes >= 4 else 1
        return range(step, self.size, step)

    def engines(self, trainers: int, tp: int) -> int:
        """Returns how many engines of `tp` GPUs have room beside `trainers` trainer ranks, which come first: an engine
        is on one node, or has whole ones."""
        whole, used = divmod(trainers, self.gpus)
        left = self.nodes - whole - (used > 0)
        if tp > self.gpus:
            return left * self.gpus // tp
        return left * (self.gpus // tp) + (self.gpus - used) // tp * (used > 0)


@dataclass(frozen=True)
class Nearest:
    """What fits its GPUs least badly, where nothing does."""

    gib: float
    """What it needs of a GPU, or lacks."""
    layout: str
    """Its sizes, as keys of the config."""


class Shape(NamedTuple):
    """The sizes of a replica of the trainers."""

    tp: int
    cp: int
    pp: int
    vpp: int
    ep: int
    etp: int


@dataclass(frozen=True)
class TrainerOption:
    """A layout of the trainers that fits."""

    trainer: TrainerConfig
    seconds: float
    """How long it takes for a batch."""


@dataclass(frozen=True)
class EngineOption:
    """A size of the engines that fits."""

    tp: int
    staging: str
    """reshard.staging."""
    time: EngineTime
    kv_tokens: int
    """Tokens that the KV cache holds beside the states of one answer."""
    state_tokens: float
    """Tokens of the cache whose room the states of one more answer take."""
    shard: int
    """Bytes of the fullest rank's weights."""

    def holds(self, running: int) -> float:
        """Returns the tokens that the KV cache holds with `running` answers."""
        return max(self.kv_tokens - (running - 1) * self.state_tokens, 0)


def engine_options(
    config: Config, hf_config: Mapping[str, Any], gpu: Accelerator, cluster: Cluster
) -> tuple[list[EngineOption], Nearest | None]:
    """Returns the sizes with which the KV cache of an engine holds one answer of full length, and what comes nearest if
    there are none. Engines of several nodes are among them where none of one node fits, or the config has them."""
    found, nearest = [], None
    # what trainers an engine takes from changes its memory by less than a hundredth; the planner has the last word
    alone = replace(config, trainer=TrainerConfig(recompute="none"))
    inside = [tp for tp in _powers(cluster.gpus) if cluster.gpus % tp == 0]
    several = [cluster.gpus * count for count in _powers(cluster.nodes) if count > 1]
    own = config.rollout.tp
    sizes: list[int] = [*inside, *([own] if own <= cluster.size else []), *several]
    for tp in dict.fromkeys(sizes):
        if found and tp in several and tp != own:
            continue
        for staging in dict.fromkeys((config.reshard.staging, "streamed")):
            sized = replace(
                alone,
                rollout=replace(config.rollout, tp=tp, engines=1),
                reshard=replace(config.reshard, staging=staging),
            )
            try:
                memory = engine_memory(sized, hf_config, int(cluster.gib * GIB), on_cuda=True)
            except ConfigError:
                continue  # tp does not divide the model
            tokens = kv_tokens(sized, hf_config, memory.of("KV cache"), on_cuda=True, running=1)
            if tokens >= config.longest_sequence:
                time = EngineTime(sized, hf_config, gpu, cluster.gpus)
                states = state_tokens(sized, hf_config)
                found.append(EngineOption(tp, staging, time, tokens, states, memory.of("weights")))
                continue
            lacking = (config.longest_sequence - tokens) * kv_cache.bytes_per_token(sized, hf_config) - min(
                memory.of("KV cache"), 0
            )
            if nearest is None or lacking / GIB < nearest.gib:
                nearest = Nearest(lacking / GIB, f"rollout.tp={tp} reshard.staging={staging}")
    return found, None if found else nearest


class TrainerOptions:
    """Finds the fastest layouts of the trainers that fit, for any number of GPUs.

    A layout's time without recomputation is a lower bound. So layouts are tried in the order of this bound. Their
    memory, which decides the recomputation, is counted only for layouts that may be among the fastest.
    """

    def __init__(
        self,
        config: Config,
        hf_config: Mapping[str, Any],
        gpu: Accelerator,
        cluster: Cluster,
        batches: Sequence[tuple[np.ndarray, np.ndarray]],
        engine_tp: int,
    ):
        """`batches`: lengths of prompts and answers, as `pace.draw_batches` returns them; `engine_tp`: of the smallest
        engines, of which most take weights from a trainer rank."""
        self._config, self._hf_config, self._gpu, self._cluster = config, hf_config, gpu, cluster
        self._batches, self._engine_tp = batches, engine_tp
        self._d, self._saved = architecture(hf_config).dimensions, checkpoint_bytes(config, hf_config)
        time = TrainerTime(replace(config, trainer=TrainerConfig(recompute="none")), hf_config, gpu)
        answered = [(np.repeat(prompts, own.shape[1]) + own.ravel(), own.ravel()) for prompts, own in batches]
        self._products = sum(time.least(*each) for each in answered) / len(batches)
        self._packed: dict[tuple[int, int], list[PackedBatch]] = {}
        """trainer.dp and multiple of micro-batches → the batches as they are packed for them."""
        self._too_large: dict[Shape, int] = {}
        """The most replicas with which a shape is known not to fit."""
        self._shapes = list(dict.fromkeys(self._possible()))
        self.nearest: Nearest | None = None
        """The layout found not to fit that needs the least memory."""

    def least_seconds(self, ranks: int) -> float:
        """Returns a lower bound on the seconds per batch on `ranks` GPUs: matrix products only, divided equally;
        infinite if a checkpoint's contents do not fit them."""
        if not self._config.optimizer.on_host and self._saved > USABLE * self._cluster.gib * GIB * ranks:
            return inf
        return self._products / ranks

    def fastest(self, ranks: int) -> list[TrainerOption]:
        """Returns the KEPT fastest layouts on `ranks` GPUs, the fastest first."""
        bounds = []
        for shape in self._shapes:
            if trainer := self._on(shape, ranks):
                quick = trainer if trainer.recompute != "auto" else replace(trainer, recompute="none")
                bounds.append((self._seconds(quick), len(bounds), shape, trainer))
        found: list[TrainerOption] = []
        for least, _, shape, trainer in sorted(bounds, key=lambda bound: bound[:2]):
            if len(found) >= KEPT and least >= found[KEPT - 1].seconds:
                break
            if option := self._fitting(shape, trainer):
                found = sorted([*found, option], key=lambda each: each.seconds)
        return found[:KEPT]

    def seconds(self, time: TrainerTime, trainer: TrainerConfig) -> float:
        """Returns how long trainers of this layout take for a batch, the mean, where `time` has their times."""
        key = trainer.dp, trainer.microbatch_multiple
        if key not in self._packed:
            self._packed[key] = [
                time.packed(np.repeat(prompts, answers.shape[1]), answers.ravel(), number)
                for number, (prompts, answers) in enumerate(self._batches)
            ]
        return sum(map(time.of_packed, self._packed[key])) / len(self._batches)

    def _possible(self) -> Iterator[Shape]:
        """Yields the config's own shape, then every shape whose tp × cp group fits one node, and whose expert group
        does, too, unless the config's own does not."""
        own, gpus, experts = self._config.trainer, self._cluster.gpus, self._d.experts
        yield Shape(own.tp, own.cp, own.pp, own.vpp, own.ep, own.etp)
        inside = [size for size in _powers(gpus) if gpus % size == 0]
        divided = [size for size in dict.fromkeys((*inside, own.ep)) if experts % size == 0] if experts else [1]
        contexts = [size for size in inside if self._d.linear_key_heads % size == 0]
        for tp, cp, pp, vpp in product(inside, contexts, _STAGES, _VIRTUAL):
            if tp * cp > gpus or (pp == 1 and vpp > 1):
                continue
            for ep in divided:
                yield Shape(tp, cp, pp, vpp, ep, int(experts > 0 and tp > 1))

    def _on(self, shape: Shape, ranks: int) -> TrainerConfig | None:
        """Returns the trainers of a shape on `ranks` ranks; None if there are none."""
        dp, rest = divmod(ranks, shape.tp * shape.cp * shape.pp)
        expert_ranks = shape.ep * (shape.etp or shape.tp)
        most = self._config.batch_size // self._config.ppo.minibatches
        if rest or not 0 < dp <= most or shape.tp * shape.cp * dp % expert_ranks:
            return None
        trainer = replace(self._config.trainer, **shape._asdict(), dp=dp)
        if trainer.expert_dispatch == "flex" and expert_ranks == 1:
            return None
        try:
            sizes = MegatronSizes.of(trainer)
            sizes.stage_sizes(self._d.layers)
            elements = held(self._hf_config, sizes, 0).all
            learnt = trainable(self._config, self._hf_config, sizes, 0).all
        except ConfigError:  # the sizes do not divide the model
            return None
        element = ITEMSIZE[self._config.model.dtype]
        states = 0 if self._config.optimizer.on_host else MAIN + MOMENTS - (element == 4) * MAIN
        least = elements * element + learnt * (4 + states / (trainer.tp * trainer.cp * dp))
        return trainer if self._room(shape, trainer, least, self._cluster.gib) else None

    def _room(self, shape: Shape, trainer: TrainerConfig, needed: float, gib: float) -> bool:
        """Returns whether a rank that needs `needed` bytes fits `gib`, a GPU's memory without its links; remembers the
        nearest miss."""
        if needed <= USABLE * gib * GIB:
            return True
        whole = needed / GIB + self._cluster.gib - gib
        if self.nearest is None or whole < self.nearest.gib:
            sizes = " ".join(f"{key}={size}" for key, size in (shape._asdict() | {"dp": trainer.dp}).items())
            self.nearest = Nearest(whole, f"trainer.{sizes}")
        return False

    def _seconds(self, trainer: TrainerConfig) -> float:
        config = replace(self._config, trainer=trainer)
        return self.seconds(TrainerTime(config, self._hf_config, self._gpu, self._cluster.gpus), trainer)

    def _fitting(self, shape: Shape, trainer: TrainerConfig) -> TrainerOption | None:
        if trainer.dp <= self._too_large.get(shape, 0):
            return None
        # without engines nobody has to plan who sends them weights, which takes longer than all else
        alone = replace(self._config, mode="replay", trainer=trainer)
        gib = self._cluster.gib - self._links(trainer) / GIB
        least = with_recompute(alone, "full") if trainer.recompute == "auto" else alone
        if not self._room(shape, trainer, trainer_memory(least, self._hf_config, True, gib).total, gib):
            self._too_large[shape] = trainer.dp
            return None
        decided = plan_memory(alone, self._hf_config, gib).recompute.apply(alone).trainer
        return TrainerOption(trainer, self._seconds(decided))

    def _links(self, trainer: TrainerConfig) -> int:
        """Returns about how many bytes a rank has for sending weights: those that hold the same, of experts fewer than
        of the rest, divide the engines among them."""
        left = self._cluster.size - trainer.tp * trainer.cp * trainer.pp * trainer.dp
        alike = trainer.cp * trainer.dp
        if self._d.experts:
            alike = min(alike, trainer.tp * alike // ((trainer.etp or trainer.tp) * trainer.ep))
        links = 1 + left // self._engine_tp // alike
        buckets = 2 * largest_bucket(on_cuda=True) * ITEMSIZE[self._config.model.dtype]
        connected = communicator_bytes([self._engine_tp] * links) if self._config.link == "device" else 0
        return buckets * links + connected


def _powers(most: int) -> list[int]:
    """Returns the powers of two up to `most`."""
    return [2**power for power in range(most.bit_length()) if 2**power <= most]
