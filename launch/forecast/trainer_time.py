"""How long trainers take for a batch, from the micro-batches that they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_megatron.config import Config
from areal_megatron.models.architecture import architecture
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.packing.partition import partition
from areal_megatron.reshard.trainer_layout import MegatronSizes
from launch.forecast.accelerators import Accelerator
from launch.memory.recompute import flops_ratio
from launch.memory.trainer import held

ADAM = 4 + 2 * 12 + 2
"""Bytes that a step of Adam reads and writes for a parameter: gradient; main parameter and moments, twice; itself."""


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
        own = max((held(hf_config, self._sizes, stage) for stage in range(t.pp)), key=lambda each: each.all)
        self._step = self._optimizer_step(own.all)

    def update(self, prompts: Sequence[int], answers: Sequence[int], seed: int = 0) -> float:
        """Returns the time of an update on sequences of so many prompt and answer tokens, in the order of the batch,
        groups together."""
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
        return self.of_plan(plan, lengths, trained)

    def of_plan(self, plan: list[list[list[list[int]]]], lengths: np.ndarray, trained: np.ndarray) -> float:
        """Returns the time of an update whose sequences are divided as `packing.partition` does it: by replica,
        mini-batch and micro-batch."""
        recomputed = 3 * (flops_ratio(self._config, self._hf_config, int(lengths.mean())) - 1)
        ppo, total = self._config.ppo, 0.0
        for number in range(len(plan[0])):
            forwards, backwards = [], []
            for replica in plan:
                microbatches = replica[number]
                sums = np.array(
                    [
                        (lengths[m].sum(), trained[m].sum(), (lengths[m] * (lengths[m] + 1.0) / 2).sum())
                        for m in (np.array(each, dtype=np.int64) for each in microbatches)
                    ]
                )
                forward, backward = self._microbatches(*sums.T, recomputed)
                forwards.append(self._in_pipeline(forward))
                backwards.append(self._in_pipeline(forward + backward))
            slowest = max(backwards)
            total += slowest + max(0.0, self._step[0] - slowest / len(plan[0][number])) + self._step[1]
            # the first mini-batch's proximal policy is the current one (trainer/trainer.py)
            others = (ppo.objective == "decoupled" and number > 0) + ppo.has_reference
            total += others * max(forwards)
        return total

    def model_flops(self, lengths: np.ndarray, trained: np.ndarray) -> float:
        """Returns the FLOPs that training on these sequences takes whatever the layout: forward and backward pass."""
        return 3 * float(self._flops(lengths, trained).sum())

    def _microbatches(
        self, tokens: np.ndarray, trained: np.ndarray, pairs: np.ndarray, recomputed: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the times of a forward and of a backward pass of each micro-batch on the slowest stage."""
        share, flops, d = self._gpu.efficiencies, self._flops, self._d
        rate = self._replica * self._gpu.flops
        layer = (flops.token * tokens / share.products + flops.pair * pairs / share.attention) / rate / d.layers
        head = flops.trained * trained / share.products / rate
        forward = np.maximum(self._most_layers * layer, self._last_layers * layer + head)
        traffic = self._most_layers * self._layer_traffic(tokens)
        # backwards the inputs of column-parallel layers are gathered once more
        return forward + traffic, (2 + recomputed) * forward + (1.5 + recomputed) * traffic

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
        gpu = self._gpu
        return (gpu.nvlink if ranks <= self._node_gpus else gpu.network) * gpu.efficiencies.links

    def _in_pipeline(self, seconds: np.ndarray) -> float:
        """The time of micro-batches in a pipeline: all on the slowest stage, and one on each other stage."""
        t = self._config.trainer
        return float(seconds.sum() + (t.pp - 1) / t.vpp * seconds.mean())

    def _optimizer_step(self, elements: int) -> tuple[float, float]:
        """The times of the exchange of gradients and parameters, which passes may hide, and of the step."""
        t, gpu = self._config.trainer, self._gpu
        replicas = t.dp * t.cp
        exchanged = elements * (4 + self._element) * (replicas - 1) / replicas
        step = elements / replicas * ADAM / (gpu.memory * gpu.efficiencies.memory)
        if self._config.optimizer.on_host:
            step = elements / replicas * (4 + self._element) / (gpu.host * gpu.efficiencies.host)
        return exchanged / self._rate(t.tp * replicas), step
