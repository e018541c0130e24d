"""Estimates the activations that a trainer rank keeps for the backward pass, by counting what autograd saves.

The method is that of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv 2205.05198, Section 4), whose 34 · s · b · h bytes per layer are for GELU, dropout and as many key heads as query
heads. The models here have SwiGLU, RMSNorm, grouped queries and experts instead, so the terms differ; as in the paper,
sequence parallelism divides by tp everything that is not a whole row of tokens. The attention of trainer/attention.py
never keeps scores, so recompute=selective, which drops those alone, saves next to nothing and is counted as `none`.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_megatron.config import Config
from areal_megatron.models.architecture import Architecture
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.reshard.trainer_layout import MegatronSizes


@dataclass(frozen=True)
class Layer:
    """One decoder layer on one rank. All sizes are bytes per token of a micro-batch."""

    model: Architecture
    chosen: int
    """Experts that a token is sent to (num_experts_per_tok); 0 without experts."""
    sizes: MegatronSizes
    element: int
    """Bytes of an element of model.dtype."""
    fused_swiglu: bool = True
    """Whether a dense MLP's SwiGLU keeps its input alone; else it consists of operations that keep their results."""

    @property
    def saved(self) -> float:
        """Bytes that the layer's forward pass saves without recomputation."""
        return (2 * self._norm + self._attention + self._mlp) / self.sizes.tp + self._rotation

    @property
    def input(self) -> float:
        """Bytes that recompute=full keeps of the layer."""
        return self.element * self.model.dimensions.hidden / self.sizes.tp

    @property
    def final_norm(self) -> float:
        """Bytes that the norm after the last layer saves; its output is counted with the log-probabilities."""
        return (self.element * self.model.dimensions.hidden + 4) / self.sizes.tp

    @property
    def passing(self) -> float:
        """The most gradients that are alive at once in the layer's backward pass: those of the inner activations of its
        widest module; with sequence parallelism also the module's input and its gradient, gathered over tp."""
        d, e = self.model.dimensions, self.element
        attention = e * (2 * d.query + 2 * d.key_value) / self.sizes.tp
        mlp = 4 * e * d.ffn / self.sizes.tp + self._expert_tokens * e * (
            d.hidden + 4 * d.expert_ffn / self.sizes.expert_tp
        )
        return max(attention, mlp) + (2 * e * d.hidden if self.sizes.tp > 1 else 0)

    @property
    def _norm(self) -> float:
        """The norm before attention or before the MLP: what it saves, its output (saved by the linear layer after it)
        and a float32 number."""
        return 2 * self.element * self.model.dimensions.hidden + 4

    @property
    def _attention(self) -> float:
        """The fused projection (the values are a view of it), the rotated queries and keys, the output, and a float32
        normaliser for each head."""
        d, e = self.model.dimensions, self.element
        kept = e * (d.query + 2 * d.key_value) + e * (d.query + d.key_value) + e * d.query + 4 * d.heads
        return kept + self._head_norms

    @property
    def _head_norms(self) -> float:
        """Normalised queries and keys, in families that have them: Megatron copies the queries of several groups
        out of the projection, so that they are saved once more."""
        d, e = self.model.dimensions, self.element
        if not any("q_layernorm" in row.megatron for row in self.model.family.layer):
            return 0
        copied = e * d.query if d.kv_heads > self.sizes.tp else 0
        return copied + 4 * (d.heads + d.kv_heads)

    @property
    def _rotation(self) -> float:
        """Cosines and sines of whole rows of tokens, once for queries and once for keys."""
        return 4 * self.element * self.model.dimensions.head_dim

    @property
    def _mlp(self) -> float:
        """Dense: gate and up, and their product; where SwiGLU is not fused also the activation and the other factor.
        Experts: for each chosen expert the token itself, all of these, and the weighted product; also the router's
        bookkeeping. The load of the experts is assumed to be even."""
        d, e = self.model.dimensions, self.element
        if not d.experts:
            return (3 if self.fused_swiglu else 5) * e * d.ffn
        inner = 6 * e * d.expert_ffn / self.sizes.expert_tp
        return self.sizes.tp * self._expert_tokens * (e * d.hidden + inner) + 5 * d.experts + 24 * self.chosen

    @property
    def _expert_tokens(self) -> float:
        """Tokens that reach the experts of a rank for each token of the micro-batch: the rank's part of the row,
        gathered over etp, once for each chosen expert."""
        return self.chosen * self.sizes.expert_tp / self.sizes.tp


def microbatch_tokens(config: Config) -> int:
    """Returns the tokens of the largest micro-batch: trainer.microbatch_tokens, or a whole mini-batch if that is less,
    but no fewer than the longest trajectory has; a multiple of tp."""
    cap, tp = config.trainer.microbatch_tokens, config.trainer.tp
    if config.mode != "sft":
        longest = config.longest_sequence
        cap = max(longest, min(cap, config.batch_size // config.ppo.minibatches * longest))
    return -(-cap // tp) * tp


def in_flight(config: Config, stage: int) -> int:
    """Returns how many forward passes of a model chunk a pipeline stage keeps at once under 1F1B.

    With virtual stages: as many as the interleaved schedule warms up with
    (megatron.core.pipeline_parallel.schedules.get_pp_rank_microbatches), and the one at hand.
    """
    t = config.trainer
    minibatches = config.ppo.minibatches if config.mode != "sft" else 1
    most = max(config.batch_size // (minibatches * t.dp), 1)
    if t.vpp == 1:
        return min(t.pp - stage, most)
    return min(2 * (t.pp - stage - 1) + (t.vpp - 1) * t.pp + 1, t.vpp * -(-most // t.pp) * t.pp)


def activations(config: Config, layer: Layer, stage: int) -> int:
    """Returns the bytes that a rank of a pipeline stage holds at the peak, which is the first backward pass."""
    sizes, tokens, passes = layer.sizes, microbatch_tokens(config), in_flight(config, stage)
    layers = sizes.stage_sizes(layer.model.dimensions.layers)[stage] // sizes.vpp
    full = config.trainer.recompute == "full"
    kept = layers * (layer.input if full else layer.saved)
    if full:
        kept += 4 * layer.model.dimensions.head_dim  # the angles, float32, an argument of every recomputed layer
    if stage == 0:
        kept += 8 + (sizes.tp > 1)  # token ids, and which of them are another rank's
    again = layer.saved if full else 0
    last = layer.final_norm if stage == sizes.pp - 1 else 0
    return round(tokens * (passes * kept + last + again + layer.passing))


def describe(config: Config, stage: int) -> str:
    passes = in_flight(config, stage)
    return (
        f"trainer.recompute={config.trainer.recompute}, {microbatch_tokens(config):,} tokens, "
        f"{passes} forward pass{'es' if passes > 1 else ''} in flight"
    )


def layer_of(config: Config, model: Architecture, chosen: int, on_cuda: bool) -> Layer:
    return Layer(
        model, chosen, MegatronSizes.of(config.trainer), ITEMSIZE[config.model.dtype], fused_swiglu=not on_cuda
    )
