"""Activations that a trainer rank keeps for the backward pass, by counting the tensors that autograd saves.

The way of counting is that of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv 2205.05198, Section 4), whose 34 · s · b · h bytes a layer are for GELU, dropout and as many key heads as query
heads. Here are none of these but SwiGLU, RMSNorm, grouped queries and experts, so the terms differ; as there,
sequence parallelism divides by tp all that is not a whole row of tokens. The attention of trainer/attention.py never
keeps scores, so recompute=selective, which spares those, saves next to nothing and is counted as none.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_megatron.config import Config
from areal_megatron.models.architecture import Architecture
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.reshard.trainer_layout import MegatronSizes


@dataclass(frozen=True)
class Layer:
    """One decoder layer on one rank; figures are bytes for each token of a micro-batch."""

    model: Architecture
    chosen: int
    """Experts of a token (num_experts_per_tok); 0 without experts."""
    sizes: MegatronSizes
    element: int
    fused_norms: bool = True
    """CUDA's RMSNorm saves its input; elsewhere it is composed of operations that save it and the normalised input
    in float32."""

    @property
    def saved(self) -> float:
        """What the layer's forward pass saves."""
        return (2 * self._norm + self._attention + self._mlp) / self.sizes.tp + self._rotation

    @property
    def input(self) -> float:
        """What recompute=full keeps of it."""
        return self.element * self.model.dimensions.hidden / self.sizes.tp

    @property
    def final_norm(self) -> float:
        """Of the norm after the last layer; its output belongs to the log-probabilities."""
        hidden = self.model.dimensions.hidden
        return ((self.element if self.fused_norms else 8) * hidden + 4) / self.sizes.tp

    @property
    def passing(self) -> float:
        """Gradients alive at once in the layer's backward pass: those of the widest module's inner activations; with
        sequence parallelism also its input and the gradient of that, gathered over tp."""
        d, e = self.model.dimensions, self.element
        attention = e * (2 * d.query + 2 * d.key_value) / self.sizes.tp
        mlp = 4 * e * d.ffn / self.sizes.tp + self._expert_tokens * e * (
            d.hidden + 4 * d.expert_ffn / self.sizes.expert_tp
        )
        return max(attention, mlp) + (2 * e * d.hidden if self.sizes.tp > 1 else 0)

    @property
    def _norm(self) -> float:
        """Before attention and before the MLP: what the norm saves, its output (which the linear layer after it saves)
        and a float32 number."""
        hidden = self.model.dimensions.hidden
        return (self.element if self.fused_norms else 8) * hidden + self.element * hidden + 4

    @property
    def _attention(self) -> float:
        """The fused projection, of which the values are a view, the rotated queries and keys, the output, and a float32
        normaliser a head."""
        d, e = self.model.dimensions, self.element
        kept = e * (d.query + 2 * d.key_value) + e * (d.query + d.key_value) + e * d.query + 4 * d.heads
        return kept + self._head_norms

    @property
    def _head_norms(self) -> float:
        """Where queries and keys are normalised: the queries once more, which Megatron copies out of the projection."""
        d, e = self.model.dimensions, self.element
        if not any("q_layernorm" in row.megatron for row in self.model.family.layer):
            return 0
        numbers = 4 * (d.heads + d.kv_heads)
        if self.fused_norms:
            return e * d.query + numbers
        return 8 * d.query + (8 if e < 4 else 4) * d.key_value + numbers

    @property
    def _rotation(self) -> float:
        """Cosines and sines, once for queries and once for keys, of whole rows of tokens."""
        return 4 * self.element * self.model.dimensions.head_dim

    @property
    def _mlp(self) -> float:
        """Dense: gate and up, and three times as much as one of them: its activation, the other factor, their product.
        Experts: for each chosen one the token itself and, since the product is weighted, one more of them; also the
        router's bookkeeping. An even load is assumed."""
        d, e = self.model.dimensions, self.element
        if not d.experts:
            return 5 * e * d.ffn
        inner = 6 * e * d.expert_ffn / self.sizes.expert_tp
        return self.sizes.tp * self._expert_tokens * (e * d.hidden + inner) + 5 * d.experts + 24 * self.chosen

    @property
    def _expert_tokens(self) -> float:
        """Tokens that reach the experts of a rank for each one of the micro-batch: its part of the row, gathered over
        etp, as often as experts are chosen."""
        return self.chosen * self.sizes.expert_tp / self.sizes.tp


def microbatch_tokens(config: Config) -> int:
    """Of the largest micro-batch: the cap, a longer trajectory, or all of a mini-batch that is smaller."""
    cap, tp = config.trainer.microbatch_tokens, config.trainer.tp
    if config.mode != "sft":
        longest = config.longest_sequence
        cap = max(longest, min(cap, config.batch_size // config.ppo.minibatches * longest))
    return -(-cap // tp) * tp


def in_flight(config: Config, stage: int) -> int:
    """Forward passes of one model chunk that stage `stage` keeps at once under 1F1B (with virtual stages the
    interleaved schedule: megatron.core.pipeline_parallel.schedules.get_pp_rank_microbatches, and the one at hand)."""
    t = config.trainer
    minibatches = config.ppo.minibatches if config.mode != "sft" else 1
    most = max(config.batch_size // (minibatches * t.dp), 1)
    if t.vpp == 1:
        return min(t.pp - stage, most)
    return min(2 * (t.pp - stage - 1) + (t.vpp - 1) * t.pp + 1, t.vpp * -(-most // t.pp) * t.pp)


def activations(config: Config, layer: Layer, stage: int) -> int:
    """Bytes that a rank of pipeline stage `stage` holds at the fullest moment, the first backward pass."""
    sizes, tokens, passes = layer.sizes, microbatch_tokens(config), in_flight(config, stage)
    layers = sizes.stage_sizes(layer.model.dimensions.layers)[stage] // sizes.vpp
    full = config.trainer.recompute == "full"
    kept = layers * (layer.input if full else layer.saved)
    if full:
        kept += 4 * layer.model.dimensions.head_dim  # the angles, float32, an argument of every recomputed layer
    if stage == 0:
        kept += 8  # token ids
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
    return Layer(model, chosen, MegatronSizes.of(config.trainer), ITEMSIZE[config.model.dtype], fused_norms=on_cuda)
