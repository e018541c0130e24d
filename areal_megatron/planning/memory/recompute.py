"""Decides trainer.recompute=auto: what the backward pass of a run recomputes, from the plan's own figures."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from areal_megatron.config import Config, TrainerConfig
from areal_megatron.models.flops import SequenceFlops, recomputed_flops
from areal_megatron.reshard.trainer_layout import MegatronSizes

Fits = Callable[[Config], bool]


@dataclass(frozen=True)
class Recompute:
    """What the backward pass recomputes, and its cost."""

    recompute: str
    """trainer.recompute, decided."""
    recompute_layers: int
    layers: int
    """Most layers of a virtual pipeline stage."""
    flops: float
    """The FLOPs of a training pass, forward and backward, over those without recomputation."""
    flops_if_full: float
    """The same with recompute=full."""
    tokens: int
    """The length of the sequences for which the FLOPs are counted."""
    why: str = ""
    """Why `auto` was decided without a search; empty also where the config decides."""
    was_auto: bool = False
    modules: tuple[str, ...] = ()
    """What megatron-core recomputes beside it (TrainerConfig.recompute_modules)."""

    @classmethod
    def of(cls, config: Config, hf_config: Mapping[str, Any], was_auto: bool = False, why: str = "") -> Recompute:
        """Describes what a config that is not `auto` asks for."""
        t = config.trainer
        tokens = longest(config)
        without = replace(config, trainer=replace(t, megatron={}))
        flops, full = (flops_ratio(each, hf_config, tokens) for each in (config, with_recompute(without, "full")))
        return cls(
            t.recompute,
            t.recompute_layers,
            _chunk_layers(config, hf_config),
            flops,
            full,
            tokens,
            why,
            was_auto,
            t.recompute_modules,
        )

    def apply(self, config: Config) -> Config:
        return with_recompute(config, self.recompute, self.recompute_layers)

    def __str__(self) -> str:
        what = self.recompute
        if self.recompute_layers:
            less = TrainerConfig(recompute=self.recompute, recompute_layers=1).recomputed(2)[1]
            what += f" in {self.recompute_layers} of the {self.layers} layers of a stage, {less} in the others"
        if self.modules:
            what = f"{', '.join(self.modules)} by megatron-core"
        text = f"recomputation: {what}" + (f" (auto: {self.why})" if self.why else " (auto)" if self.was_auto else "")
        more = f", with full {self.flops_if_full:.3f}" if self.recompute != "full" or self.recompute_layers else ""
        return f"{text}; trainer FLOPs / useful FLOPs {self.flops:.3f}{more}, for sequences of {self.tokens:,} tokens"


def with_recompute(config: Config, recompute: str, layers: int = 0) -> Config:
    return replace(config, trainer=replace(config.trainer, recompute=recompute, recompute_layers=layers))


def longest(config: Config) -> int:
    """Returns the tokens of the longest sequence that the plan assumes."""
    return config.longest_sequence if not config.is_supervised else config.trainer.microbatch_tokens


def flops_ratio(config: Config, hf_config: Mapping[str, Any], tokens: int) -> float:
    """Returns the FLOPs of a forward and a backward pass over one sequence, over those without recomputation.

    The backward pass takes twice as many as the forward pass. The output layer runs for every token but the first.
    """
    sizes = MegatronSizes.of(config.trainer)
    layers = [
        what
        for size in sizes.stage_sizes(hf_config["num_hidden_layers"])
        for what in config.trainer.recomputed(size // sizes.vpp)
    ]
    if {*layers} == {"none"} and not config.trainer.recompute_modules:
        return 1.0
    added, useful = recomputed_flops(hf_config, tokens), 3 * float(SequenceFlops.of(hf_config)(tokens, tokens - 1))
    modules = len(layers) * sum(added["moe" if what == "mlp" else what] for what in config.trainer.recompute_modules)
    return 1 + sizes.vpp * (sum(added[what] for what in layers) + modules) / useful


def decide(config: Config, hf_config: Mapping[str, Any], fits: Fits) -> Recompute:
    """Returns the cheapest recomputation with which a run fits; full if it fits with none. `fits` decides this for a
    config other than `auto`."""
    layers = _chunk_layers(config, hf_config)
    steps = [with_recompute(config, "none")]
    for what in ("elementwise", "mlp", "full"):  # each frees more memory, and costs more, than the one before
        steps += [with_recompute(config, what, count) for count in range(1, layers)] + [with_recompute(config, what)]
    found = bisect_left(steps, True, hi=len(steps) - 1, key=fits)
    return Recompute.of(steps[found], hf_config, was_auto=True)


def _chunk_layers(config: Config, hf_config: Mapping[str, Any]) -> int:
    sizes = MegatronSizes.of(config.trainer)
    return max(sizes.stage_sizes(hf_config["num_hidden_layers"])) // sizes.vpp
