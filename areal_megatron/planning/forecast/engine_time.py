"""How long an engine takes to decode a token of each running answer, and to prefill: a roofline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_megatron.config import Config
from areal_megatron.engine import kv_cache
from areal_megatron.models.architecture import architecture
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.planning.forecast.accelerators import Accelerator


class EngineTime:
    """Times of one engine, in seconds. A step of `running` answers with `context` tokens before them, all answers
    together, takes `step(running) + per_token * context`. Nodes have `node_gpus` GPUs each."""

    def __init__(self, config: Config, hf_config: Mapping[str, Any], gpu: Accelerator, node_gpus: int = 8):
        self._sizes, self._gpu, self._tp = architecture(hf_config).dimensions, gpu, config.rollout.tp
        self._flops, self._element = SequenceFlops.of(hf_config), ITEMSIZE[config.model.dtype]
        self._chosen = hf_config["num_experts_per_tok"] if self._sizes.experts else 0
        self._link = gpu.link(self._tp, node_gpus)
        self._read = gpu.memory * gpu.efficiencies.memory
        self.per_token = kv_cache.bytes_per_token(config, hf_config) / self._read

    def step(self, running: float) -> float:
        """Returns the time of a step but for keys and values: weights are read while they are multiplied, and what
        takes longer counts."""
        gpu, share = self._gpu, self._gpu.efficiencies
        flops = running * (self._flops.token + self._flops.trained)
        weights = self.weight_elements(running) * self._element / self._tp / self._read
        products = flops / (self._tp * gpu.flops * share.products)
        return max(weights, products) + self._messages(running) + share.step_s + running * share.request_s

    def prefill(self, tokens: float, pairs: float) -> float:
        """Returns the time for `tokens` in which queries attend to `pairs` keys in all."""
        share = self._gpu.efficiencies
        whole = self._flops.token * tokens / share.products + self._flops.pair * pairs / share.attention
        return whole / (self._tp * self._gpu.flops) + self._traffic(tokens)

    def begin(self, answers: int) -> float:
        """Returns the time of `answers` new answers besides their prompts."""
        return answers * self._gpu.efficiencies.answer_s

    def weight_elements(self, running: float) -> float:
        """Returns how many weights a step reads: of experts those that any of the answers chooses, by chance."""
        d = self._sizes
        touched = d.experts * (1 - (1 - self._chosen / d.experts) ** running) if d.experts else 0
        experts = 3 * d.sparse_layers * d.hidden * d.expert_ffn
        return (self._flops.token + self._flops.trained) / 2 + (touched - self._chosen) * experts

    def _messages(self, running: float) -> float:
        """Two all-reduces a layer."""
        if self._tp == 1:
            return 0.0
        return 2 * self._sizes.layers * self._gpu.efficiencies.message_s + self._traffic(running)

    def _traffic(self, tokens: float) -> float:
        sent = 2 * self._sizes.layers * tokens * self._sizes.hidden * self._element * 2 * (self._tp - 1) / self._tp
        return sent / self._link
