"""How long trainers take for a batch, from the micro-batches that they are given."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from areal_megatron.config import Config
from areal_megatron.models.architecture import architecture
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.packing.partition import partition
from areal_megatron.planning.forecast.accelerators import Accelerator
from areal_megatron.planning.memory.recompute import flops_ratio
from areal_megatron.planning.memory.trainer import Held, trainable
from areal_megatron.reshard.trainer_layout import MegatronSizes

ADAM = 4 + 2 * 12 + 2
"""Bytes that a step of Adam reads and writes for a parameter: gradient; main parameter and moments, twice; itself."""
PROXIMAL, OPTIMIZER, BUBBLE = "proximal and reference passes", "optimizer steps", "pipeline bubble"
RECOMPUTED, EXCHANGED = "recomputation", "exchange between ranks"
OVERHEADS = (PROXIMAL, OPTIMIZER, BUBBLE, RECOMPUTED, EXCHANGED)
"""What takes time besides forward and backward passes themselves."""


@dataclass(frozen=True)
class PackedBatch:
    """What the micro-batches of a batch hold: all that a layout's time for it depends on, but for trainer.dp."""

    sums: np.ndarray
    """Tokens, trained tokens and attended pairs of each micro-batch, float64 [3, m]; mini-batch by mini-batch, of each
    replica by replica."""
    counts: np.ndarray
    """Micro-batches of each replica in each mini-batch, int64 [mini-batches, replicas]."""
    mean_length: int

    @classmethod
    def of(cls, plan: list[list[list[list[int]]]], lengths: np.ndarray, trained: np.ndarray) -> PackedBatch:
        """Builds it from a plan of `packing.partition`: sequences by replica, mini-batch and micro-batch."""
        parts = [replica[number] for number in range(len(plan[0])) for replica in plan]
        microbatches = [microbatch for part in parts for microbatch in part]
        order = np.fromiter((index for microbatch in microbatches for index in microbatch), dtype=np.int64)
        where = np.repeat(np.arange(len(microbatches)), [len(microbatch) for microbatch in microbatches])
        sums = [
            np.bincount(where, values[order], minlength=len(microbatches))  # some may be empty
            for values in (lengths, trained, lengths * (lengths + 1.0) / 2)
        ]
        counts = np.array([len(part) for part in parts], dtype=np.int64).reshape(len(plan[0]), len(plan))
        return cls(np.stack(sums), counts, int(lengths.mean()))


class TrainerTime:
    """Times of one PPO update on all trainer ranks, in seconds.

    `config.trainer.recompute` must be decided. Every rank of a node has GPUs of the same node beside it: groups of at
    most `node_gpus` ranks talk over NVLink, larger ones over the network.
    """

    def __init__(self, config: Config, hf_config: Mapping[str, Any], gpu: Accelerator, node_gpus: int = 8):
        self._config, self._hf_config, self._gpu = config, hf_config, gpu
        self._sizes, self._d = MegatronSizes.of(config.trainer), architecture(hf_config).dimensions
        self._flops, self._element = SequenceFlops.of(hf_config), ITEMSIZE[config.model.dtype]
        self._chosen = hf_config["num_experts_per_tok"] if self._d.experts else 0
        self._node_gpus = node_gpus
        t = config.trainer
        self._replica = t.tp * t.cp
        stages = self._sizes.stage_sizes(self._d.layers)
        self._most_layers, self._last_layers = max(stages), stages[-1]
        own = (trainable(config, hf_config, self._sizes, stage) for stage in range(t.pp))
        self._step = self._optimizer_step(max(own, key=lambda each: each.all))
        self._of_products = 2 if config.has_adapters else 3
        """What all passes take of the FLOPs of a forward pass's products: frozen weights have no gradient."""
        self._counted = frozenset(OVERHEADS)

    def update(self, prompts: ArrayLike, answers: ArrayLike, seed: int = 0) -> float:
        """Returns the time of an update on sequences with these numbers of prompt and answer tokens, in the order of
        the batch, groups together."""
        return self.of_packed(self.packed(prompts, answers, seed))

    def packed(self, prompts: ArrayLike, answers: ArrayLike, seed: int = 0) -> PackedBatch:
        """Returns the micro-batches into which the controller divides such a batch."""
        config = self._config
        trained = np.asarray(answers, dtype=np.int64)
        lengths = np.asarray(prompts, dtype=np.int64) + trained
        n, t = config.rollout.group_size, config.trainer
        plan = partition(
            lengths.tolist(),
            t.dp,
            config.ppo.minibatches,
            t.microbatch_tokens,
            seed,
            self._flops(lengths, trained),
            t.microbatch_multiple,
            np.arange(len(lengths)) // n,
        )
        return PackedBatch.of(plan, lengths, trained)

    def of_packed(self, batch: PackedBatch) -> float:
        """Returns the time of an update on such micro-batches."""
        forwards, backwards = (each.max(axis=1) for each in self.passes(batch))
        hidden, total = backwards / batch.counts[:, 0], backwards.sum()
        if OPTIMIZER in self._counted:
            total += np.maximum(0.0, self._step[0] - hidden).sum() + len(hidden) * self._step[1]
            total += self._gpu.efficiencies.batch_s
        ppo = self._config.ppo
        # the first mini-batch's proximal policy is the current one (trainer/ppo.py)
        scored = np.full(len(forwards), int(ppo.has_reference))
        scored[1:] += ppo.objective == "decoupled"
        return float(total + (scored * forwards).sum() * (PROXIMAL in self._counted))

    def shares(self, batch: PackedBatch) -> dict[str, float]:
        """Returns what takes the time of an update on such micro-batches, in seconds that add up to it, with the useful
        FLOPs at the GPUs' peak as the first.

        Each of `OVERHEADS` is what the time is longer by with it, after those before it were taken away. Of the rest
        the slowest stage and replica has more than the mean.
        """
        less, found, before = copy(self), {}, self.of_packed(batch)
        for overhead in OVERHEADS:
            less._counted -= {overhead}
            now = less.of_packed(batch)
            found[overhead], before = before - now, now
        tokens, trained, pairs = batch.sums.sum(1)
        share, flops, rate = self._gpu.efficiencies, self._flops, self._gpu.flops * self._config.trainer_ranks
        useful = (
            self._of_products * (flops.token * tokens + flops.trained * trained) / rate,
            3 * flops.pair * pairs / rate,
        )
        products, attention = useful[0] * (1 / share.products - 1), useful[1] * (1 / share.attention - 1)
        uneven = before - sum(useful) - products - attention
        kernels = {"products below the peak": products, "attention below the peak": attention}
        return {"useful": sum(useful), **kernels, **found, "uneven stages and ranks": uneven}

    def passes(self, batch: PackedBatch) -> tuple[np.ndarray, np.ndarray]:
        """Returns the times of the forward passes of each mini-batch on each replica, and of both passes, float64
        [mini-batches, replicas] each."""
        recomputed = 3 * (flops_ratio(self._config, self._hf_config, batch.mean_length) - 1)
        recomputed *= RECOMPUTED in self._counted
        tokens, trained, pairs = batch.sums
        forward, backward = self._microbatches(tokens, trained, pairs, recomputed)
        return self._in_pipeline(forward, batch.counts), self._in_pipeline(forward + backward, batch.counts)

    def model_flops(self, lengths: np.ndarray, trained: np.ndarray) -> float:
        """Returns the FLOPs that training on these sequences takes whatever the layout: forward and backward pass."""
        return 3 * float(self._flops(lengths, trained).sum())

    def least(self, lengths: np.ndarray, trained: np.ndarray) -> float:
        """Returns the seconds that one GPU would take for the products and attention of both passes."""
        share, flops = self._gpu.efficiencies, self._flops
        pairs = float((lengths * (lengths + 1.0) / 2).sum())
        products = flops.token * float(lengths.sum()) + flops.trained * float(trained.sum())
        work = self._of_products * products / share.products + 3 * flops.pair * pairs / share.attention
        return work / self._gpu.flops

    def _microbatches(
        self, tokens: np.ndarray, trained: np.ndarray, pairs: np.ndarray, recomputed: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the times of a forward and of a backward pass of each micro-batch on the slowest stage."""
        share, flops, d = self._gpu.efficiencies, self._flops, self._d
        rate = self._replica * self._gpu.flops
        products = flops.token * tokens / share.products / rate / d.layers
        layer = products + flops.pair * pairs / share.attention / rate / d.layers
        head = flops.trained * trained / share.products / rate
        forward = np.maximum(self._most_layers * layer, self._last_layers * layer + head) + share.pass_s
        frozen = np.maximum(self._most_layers * products, self._last_layers * products + head)
        traffic = self._most_layers * self._layer_traffic(tokens) * (EXCHANGED in self._counted)
        # backwards the inputs of column-parallel layers are gathered once more
        backward = (2 + recomputed) * forward - (3 - self._of_products) * frozen
        return forward + traffic, backward + (1.5 + recomputed) * traffic

    def _layer_traffic(self, tokens: np.ndarray) -> np.ndarray:
        """Returns what the ranks of a layer's forward pass exchange, as time."""
        t, d, own = self._config.trainer, self._d, tokens / self._config.trainer.cp
        row, seconds = d.hidden * self._element, np.zeros(len(tokens))
        if t.tp > 1:  # two gathers and two scatters of the whole row, by sequence parallelism
            seconds += 4 * own * row * (t.tp - 1) / t.tp / self._rate(t.tp) + 4 * self._gpu.efficiencies.message_s
        if t.cp > 1:
            seconds += 2 * tokens * d.key_value / t.tp * self._element * (t.cp - 1) / t.cp / self._rate(self._replica)
        if self._chosen and self._sizes.ep > 1:
            ep, ranks = self._sizes.ep, self._sizes.ep * self._sizes.expert_tp
            there_and_back = 2 * self._chosen * tokens / self._replica * row * (ep - 1) / ep / self._rate(ranks)
            seconds += there_and_back * d.sparse_layers / d.layers
        return seconds

    def _rate(self, ranks: int) -> float:
        """Bytes/s between neighbouring ranks of a group."""
        return self._gpu.link(ranks, self._node_gpus)

    def _in_pipeline(self, seconds: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The times of micro-batches in a pipeline, float64 as `counts`: all on the slowest stage, and one on each
        other stage."""
        t, ends = self._config.trainer, counts.ravel().cumsum()
        sums = np.add.reduceat(seconds, np.concatenate([[0], ends[:-1]])).reshape(counts.shape)
        return sums * (1 + (t.pp - 1) / t.vpp / counts * (BUBBLE in self._counted))

    def _optimizer_step(self, own: Held) -> tuple[float, float]:
        """The times of the exchange of gradients and parameters, which passes may hide, and of the step."""
        t, gpu = self._config.trainer, self._gpu
        ranks, of_expert = t.tp * t.cp * t.dp, self._sizes.ep * self._sizes.expert_tp
        exchange = stepped = 0.0
        for elements, replicas in ((own.dense, ranks // t.tp), (own.experts, ranks // of_expert)):
            sent = elements * (4 + self._element) * (replicas - 1) / replicas
            exchange += sent / self._rate(ranks)
            stepped += elements / replicas
        step = stepped * ADAM / (gpu.memory * gpu.efficiencies.memory)
        if self._config.optimizer.on_host:
            step = stepped * (4 + self._element) / (gpu.host * gpu.efficiencies.host)
        return exchange, step
