"""Estimates the activations that a trainer rank keeps for the backward pass, by counting what autograd saves.

The method follows Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198, Section 4). Their 34 · s · b · h bytes per layer are for GELU, dropout and equal numbers of key and query
heads. The models here have SwiGLU, RMSNorm, grouped queries and experts instead, so the terms differ; as in the paper,
sequence parallelism divides by tp everything that is not a whole row of tokens. The attention of trainer/attention.py
never keeps scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from areal_megatron.config import Config
from areal_megatron.models.architecture import Architecture
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.models.qwen3 import HEAD_NORMS
from areal_megatron.models.qwen3_next import SHARED_EXPERT_GATE
from areal_megatron.models.table import ROUTER_BIAS, Cut
from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.run.versions import has_transformer_engine

CHUNK = 64
"""The tokens of a chunk of trainer/delta_rule.py."""


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
    rotates_alike: bool = False
    """Whether all layers of a pass keep the same cosines and sines (trainer/elementwise.py), else each has its own."""
    modules: tuple[str, ...] = ()
    """What megatron-core recomputes of the layer besides (TrainerConfig.recompute_modules)."""

    def kept(self, recompute: str) -> float:
        """Returns the bytes that the layer's forward pass keeps, with `recompute` (none, elementwise, mlp, full)."""
        if recompute == "full":
            return self.element * self.model.dimensions.hidden / self.sizes.tp
        norms = self._norms(recompute != "none" or "layernorm" in self.modules)
        mlp = 0 if {"mlp", "moe"} & {*self.modules} else self._mlp(recompute)
        return (norms + self._attention + mlp) / self.sizes.tp + (0 if self.rotates_alike else 2 * self.rotation)

    def again(self, recompute: str) -> float:
        """Returns the bytes that the layer's backward pass recomputes before it uses them."""
        made = replace(self, modules=()).kept("none")
        return made if recompute == "full" else made - self.kept(recompute)

    @property
    def final_norm(self) -> float:
        """Bytes that the norm after the last layer saves; its output is counted with the log-probabilities."""
        return (self.element * self.model.dimensions.hidden + 4) / self.sizes.tp

    @property
    def passing(self) -> float:
        """The most gradients that are alive at once in the layer's backward pass: for the inner activations of its
        widest module; with sequence parallelism also the module's input and its gradient, gathered over tp. Keys and
        values of all context-parallel ranks are gathered again: as they come, in the order of the queries, and the
        gradients of both, of which the latter are there twice while they are put in place and joined."""
        d, e, cp = self.model.dimensions, self.element, self.sizes.cp
        attention = e * (2 * d.query + 2 * d.key_value) / self.sizes.tp
        if d.linear:
            attention = max(attention, self._chunks / self.sizes.tp)
        if cp > 1:
            attention += 6 * cp * e * 2 * d.key_value / self.sizes.tp
        experts = self._expert_tokens * e * (d.hidden + 4 * d.expert_ffn / self.sizes.expert_tp)
        mlp = max(4 * e * d.ffn / self.sizes.tp, experts + 4 * e * d.shared_ffn / self.sizes.tp)
        return max(attention, mlp) + (2 * e * d.hidden if self.sizes.tp > 1 else 0)

    def _norms(self, recomputed: bool) -> float:
        """The norms before attention and before the MLP: what they save, their output (saved by the linear layer after
        it) and a float32 number; recomputed, their input. TransformerEngine's linear layers hold the norm before them,
        which is not recomputed then."""
        hidden = self.model.dimensions.hidden
        saved = 2 * self.element * hidden + 4
        held = self.sizes.fused_layernorm * (1 if self.model.dimensions.experts else 2)
        return 2 * saved if not recomputed else held * saved + (2 - held) * self.element * hidden

    @property
    def _attention(self) -> float:
        """The mean over the layers of both kinds."""
        d = self.model.dimensions
        if d.latent:
            return self._latent_attention
        return (d.full_layers * self._full_attention + d.linear_layers * self._delta_net) / d.layers

    @property
    def _full_attention(self) -> float:
        """The fused projection (the values are a view of it), the rotated queries and keys, the output, and a float32
        normaliser for each head; where heads have gates, these in the projection, their sigmoid in float32 and what it
        makes of the output."""
        d, e = self.model.dimensions, self.element
        kept = e * (d.query + 2 * d.key_value) + e * (d.query + d.key_value) + e * d.query
        kept += 4 * d.heads * ("core_attn" not in self.modules)
        if any(row.cut is Cut.GATED_HEADS for row in self.model.layer):
            kept += 2 * e * d.query + 4 * d.query
        return kept + self._head_norms

    @property
    def _delta_net(self) -> float:
        """The fused projection alone: the rest is recomputed."""
        d = self.model.dimensions
        return self.element * (d.linear_projection + d.rates)

    @property
    def _chunks(self) -> float:
        """What a backward pass of trainer/delta_rule.py holds of a gated delta net, in float32, with its gradients:
        five matrices of a chunk by a chunk, some queries, keys and values, and the states before and after a chunk, a
        head."""
        d = self.model.dimensions
        widths = d.linear_key_dim + d.linear_value_dim
        head = 5 * CHUNK + 5 * widths + 2 * d.linear_key_dim * d.linear_value_dim / CHUNK
        return 2 * 4 * d.linear_value_heads * head

    @property
    def _latent_attention(self) -> float:
        """Each latent (the keys' with their rotated part) and its norm, with a float32 number; queries, keys and
        values, padded to the width of keys, and attention's output for them; the output without padding, and a float32
        normaliser for each head."""
        d, e = self.model.dimensions, self.element
        latents = e * (2 * (d.latent + d.query_latent) + d.rotated) + 4 * (1 + (d.query_latent > 0))
        if "core_attn" in self.modules:  # values are padded again
            return latents + e * (2 * d.query + 2 * d.attended)
        return latents + e * (4 * d.query + d.attended) + 4 * d.heads

    @property
    def _head_norms(self) -> float:
        """Normalised queries and keys, in families that have them: Megatron copies the queries of several groups
        out of the projection, so that they are saved once more."""
        d, e = self.model.dimensions, self.element
        if not self.model.has(HEAD_NORMS[0]):
            return 0
        copied = e * d.query if d.kv_heads > self.sizes.tp else 0
        return copied + 4 * (d.heads + d.kv_heads)

    @property
    def rotation(self) -> float:
        """Bytes of cosines and sines of whole rows of tokens, kept once or, for queries and for keys, twice."""
        return 2 * self.element * (self.model.dimensions.rotated or self.model.dimensions.head_dim)

    def _mlp(self, recompute: str) -> float:
        """Dense: gate and up, and their product; where SwiGLU is not fused also the activation and the other factor.
        Experts: for each chosen expert the token itself and its weight, all of these, and the weighted product; also
        the router's bookkeeping. The load of the experts is assumed to be even. Recomputed: gate and up, or neither;
        TransformerEngine's experts keep theirs. Where only the first layers are dense, each layer is taken for the kind
        that keeps more."""
        d, e = self.model.dimensions, self.element
        dense = {"none": 3 if self.fused_swiglu and not d.experts else 5, "elementwise": 2, "mlp": 0}[recompute]
        if not d.experts:
            return dense * e * d.ffn
        kept = {"none": 6, "elementwise": 2, "mlp": 2 if self.sizes.grouped_experts else 0}[recompute]
        inner = kept * e * d.expert_ffn / self.sizes.expert_tp
        routed = self.sizes.tp * self._expert_tokens * (e * d.hidden + 4 + inner) + 28 * self.chosen
        if self.model.has(ROUTER_BIAS):
            routed += 5 * d.experts + 4  # scores before they are normalised, their sum, and the groups chosen from
        if self.model.has(SHARED_EXPERT_GATE):
            routed += e * (d.hidden + 1)  # what the shared experts give, and its gate
        return max(routed + dense * e * d.shared_ffn, dense * e * d.ffn)

    @property
    def _expert_tokens(self) -> float:
        """Tokens that reach the experts of a rank for each token of the micro-batch: the rank's part of the row,
        gathered over etp, once for each chosen expert."""
        return self.chosen * self.sizes.expert_tp / self.sizes.tp


def microbatch_tokens(config: Config) -> int:
    """Returns the tokens that a rank has of the largest micro-batch: of trainer.microbatch_tokens, or of a whole
    mini-batch if that is less, but of no fewer than the longest trajectory has; a multiple of tp. Context-parallel
    ranks have equal parts."""
    t, longest = config.trainer, longest_row(config)
    cap = max(longest, t.microbatch_tokens)
    if not config.is_supervised:
        cap = max(longest, min(t.microbatch_tokens, config.batch_size // config.ppo.minibatches * longest))
    return -(-cap // (t.tp * t.cp)) * t.tp


def longest_row(config: Config) -> int:
    """Returns the least number of tokens that a micro-batch has to hold: the longest trajectory's; in supervised
    training, with examples of any length, 1."""
    return config.longest_sequence if not config.is_supervised else 1


def in_flight(config: Config, stage: int) -> int:
    """Returns how many forward passes of a model chunk a pipeline stage keeps at once under 1F1B.

    With virtual stages: as many as the interleaved schedule warms up with
    (megatron.core.pipeline_parallel.schedules.get_pp_rank_microbatches), and the one at hand.
    """
    t = config.trainer
    minibatches = config.ppo.minibatches if not config.is_supervised else 1
    most = max(config.batch_size // (minibatches * t.dp), 1)
    if t.vpp == 1:
        return min(t.pp - stage, most)
    return min(2 * (t.pp - stage - 1) + (t.vpp - 1) * t.pp + 1, t.vpp * -(-most // t.pp) * t.pp)


def kept(config: Config, layer: Layer, stage: int) -> float:
    """Returns the bytes per token that a rank of a pipeline stage keeps between forward and backward passes."""
    recomputed = _of_layers(config, layer, stage)
    size = sum(map(layer.kept, recomputed))
    if "full" in recomputed and not layer.model.dimensions.latent:  # whose layers make their angles themselves
        size += 4 * layer.model.dimensions.head_dim  # the angles, float32, an argument of every recomputed layer
    if layer.rotates_alike and {*recomputed} != {"full"}:
        size += layer.rotation
    if stage == 0:
        size += 8 + (layer.sizes.tp > 1)  # token ids, and which of them are another rank's
    last = layer.final_norm if stage == layer.sizes.pp - 1 else 0
    return in_flight(config, stage) * size + last


def activations(config: Config, layer: Layer, stage: int) -> int:
    """Returns the bytes that a rank of a pipeline stage holds at the peak, in the first backward pass.

    The pass begins with the stage's last layers, which keep the most, and ends with the first ones, which recompute the
    most.
    """
    recomputed = _of_layers(config, layer, stage)
    begins, ends = layer.again(recomputed[-1]), layer.again(recomputed[0])
    gone = sum(layer.kept(what) for what in recomputed if what != recomputed[0])
    return round(microbatch_tokens(config) * (kept(config, layer, stage) + max(begins, ends - gone) + layer.passing))


def _of_layers(config: Config, layer: Layer, stage: int) -> list[str]:
    """What is recomputed of each layer of a virtual stage."""
    sizes = layer.sizes
    return config.trainer.recomputed(sizes.stage_sizes(layer.model.dimensions.layers)[stage] // sizes.vpp)


def describe(config: Config, stage: int) -> str:
    t, passes = config.trainer, in_flight(config, stage)
    modules = f" and {', '.join(t.recompute_modules)} by megatron-core" if t.recompute_modules else ""
    layers = f" recompute_layers={t.recompute_layers}" if t.recompute_layers else ""
    part = f" of {t.cp} ranks each" if t.cp > 1 else ""
    return (
        f"trainer.recompute={t.recompute}{layers}{modules}, {microbatch_tokens(config):,} tokens{part}, "
        f"{passes} forward pass{'es' if passes > 1 else ''} in flight"
    )


def layer_of(config: Config, model: Architecture, chosen: int, on_cuda: bool) -> Layer:
    plain = config.has_adapters or model.dimensions.linear  # as trainer/model.py has it
    engine = on_cuda and has_transformer_engine() and not plain
    sizes = MegatronSizes.of(config.trainer, transformer_engine=engine)
    return Layer(
        model,
        chosen,
        sizes,
        ITEMSIZE[config.model.dtype],
        fused_swiglu=not on_cuda,
        rotates_alike=not model.dimensions.latent,
        modules=config.trainer.recompute_modules,
    )
