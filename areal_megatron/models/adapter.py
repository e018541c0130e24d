"""Low-rank adapters (LoRA, arXiv 2106.09685) of a model, by the names that PEFT has for their tensors.

A linear layer with weight W [out, in] gives W·x + scale·B·A·x with its adapter: `lora_A` is A [rank, in], `lora_B` is
B [out, rank]. Where Megatron or vLLM fuses several layers of a checkpoint, each of them has its own A and B.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from areal_megatron.config import Config, ConfigError, LoraConfig
from areal_megatron.models.architecture import Architecture, architecture
from areal_megatron.models.table import Cut, Row
from areal_megatron.process.errors import printable

ALL_LINEAR = "all-linear"
FACTORS = ("lora_A", "lora_B")
MEGATRON = ".adapter."
"""What is in Megatron's names of factors, and of no other parameter."""
VARIABLE = "AREAL_ADAPTER"
"""The environment variable from which an engine's processes know the adapter that they get: Adapter.told, as JSON."""
_WEIGHT = ".weight"
_LINEAR = (".linear_", ".in_proj.", ".out_proj.")
"""What is in Megatron's names of linear layers, but of the output layer."""
LARGEST = 512
"""The largest rank of an adapter that engines take."""
_NOT_SERVED = "kv_b_proj"
"""Engines apply an adapter of this layer wrongly, without an error: latent attention computes with parts of the layer's
weight (vLLM 0.32)."""


@dataclass(frozen=True)
class Adapter:
    """Which linear layers of a model have adapters, and of which kind."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """The last parts of the layers' names, or ALL_LINEAR alone."""
    use_rslora: bool = False
    experts: bool = False
    """Whether routers' experts have some, too."""

    @classmethod
    def of(cls, settings: LoraConfig) -> Adapter | None:
        """Returns what a run's config asks for; None without adapters."""
        if not settings.rank:
            return None
        return cls(settings.rank, settings.alpha, settings.names, settings.use_rslora, settings.experts)

    @classmethod
    def of_told(cls, told: Mapping[str, Any]) -> Adapter:
        """Returns the adapter whose `told` this is."""
        return cls(**{**told, "targets": tuple(told["targets"])})

    @property
    def told(self) -> dict[str, Any]:
        """What other processes are told, as JSON has it."""
        return asdict(self) | {"targets": list(self.targets)}

    @property
    def settings(self) -> str:
        """The keys of a config that ask for it."""
        keys = f"lora.rank={self.rank} lora.alpha={self.alpha:g} lora.targets={','.join(self.targets)}"
        return keys + " lora.use_rslora=true" * self.use_rslora + " lora.experts=true" * self.experts

    @property
    def scale(self) -> float:
        """What B·A is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    def modules(self, model: Architecture) -> list[str]:
        """Returns the last parts of the names of the linear layers with an adapter, in the order of the model. Raises
        ConfigError for a target that the model does not have."""
        rows = linear_rows(model, self.experts)
        found = list(dict.fromkeys(module_of(name) for row in rows for name in row.tensors))
        if self.targets == (ALL_LINEAR,):
            return found
        for target in self.targets:
            if target not in found:
                inner = {module_of(name) for row in linear_rows(model, experts=True) for name in row.tensors}
                near = difflib.get_close_matches(target, found, 1) if target not in inner else []
                hint = f", did you mean {near[0]}?" if near else f"; {model.name} has {', '.join(found)}"
                problem = "is of experts; set lora.experts=true" if target in inner else "is no linear layer"
                raise ConfigError(f"lora.targets: {printable(target, 60)} {problem}{hint}")
        return [name for name in found if name in self.targets]

    def rows(self, model: Architecture) -> list[Row]:
        """Returns the rows of the linear layers with an adapter, in the order of the model. Raises ConfigError as
        `modules` does."""
        modules = self.modules(model)
        rows = linear_rows(model, self.experts)
        return [row for row in rows if any(module_of(name) in modules for name in row.tensors)]


def served(config: Config, hf_config: Mapping[str, Any]) -> Adapter | None:
    """Returns the adapter that the engines of a run get, with all targets by their names; None if they get whole
    weights. Raises ConfigError for a target that the model does not have or that engines cannot apply."""
    adapter = Adapter.of(config.lora) if config.engines_adapt else None
    if adapter is None:
        return None
    modules = adapter.modules(architecture(hf_config))
    if _NOT_SERVED in modules:
        others = ",".join(name for name in modules if name != _NOT_SERVED)
        raise ConfigError(
            f"lora.targets: engines apply an adapter of {_NOT_SERVED} wrongly; write {others}, or have merged weights "
            "sent with lora.merge=true"
        )
    return replace(adapter, targets=tuple(modules))


def unserved(adapter: Adapter, model: Architecture) -> str:
    """Returns why engines cannot apply an adapter, "" if they can. Raises ConfigError as `Adapter.modules` does."""
    if _NOT_SERVED in adapter.modules(model):
        return f"engines apply an adapter of {_NOT_SERVED} wrongly"
    if adapter.experts:
        return "engines cannot apply adapters of experts"
    return f"its rank is {adapter.rank}, and engines take up to {LARGEST}" if adapter.rank > LARGEST else ""


def linear_rows(model: Architecture, experts: bool = False) -> list[Row]:
    """Returns the rows of the linear layers that may have adapters, in the order of the model: all layers but the
    output layer and, unless `experts` is set, a router's experts."""
    rows = [row for row in model.layer if row.megatron.endswith(_WEIGHT) and (experts or not row.of_experts)]
    return [row for row in rows if any(kind in row.megatron for kind in _LINEAR)]


def adapted(model: Architecture, adapter: Adapter | None) -> Architecture:
    """Returns the factors of a model's adapter as an architecture of their own, with the model's sizes; without an
    adapter the model. Raises ConfigError for targets that the model does not have."""
    if adapter is None:
        return model
    modules = adapter.modules(model)
    layer = [factor for row in adapter.rows(model) for factor in _factors(row, modules)]
    dimensions = replace(model.dimensions, adapter_rank=adapter.rank)
    return replace(model, dimensions=dimensions, layer=tuple(layer), is_adapter=True)


def _factors(row: Row, modules: list[str]) -> tuple[Row, Row]:
    """The rows of A and of B of the layers that one weight of Megatron's fuses.

    A layer that is cut by rows has A whole on every rank, one that is cut by columns has B whole.
    """
    axes = {name: axes.rpartition(" ") for name, axes in row.tensors.items() if module_of(name) in modules}
    by_columns, experts = row.cut is Cut.COLUMNS, "experts " * row.of_experts
    first, second = FACTORS
    down = _named(row, first) | {
        "cut": Cut.COLUMNS if by_columns else Cut.WHOLE,
        "tensors": {factor_of(name, first): f"{experts}adapter_rank {inner}" for name, (*_, inner) in axes.items()},
    }
    up = _named(row, second) | {
        "cut": Cut.WHOLE if by_columns else row.cut,
        "tensors": {factor_of(name, second): f"{outer} adapter_rank" for name, (outer, *_) in axes.items()},
        "among": tuple(factor_of(name, second) for name in row.tensors),
    }
    return replace(row, **down), replace(row, **up)


def _named(row: Row, factor: str) -> dict[str, str]:
    megatron = row.megatron.removesuffix(_WEIGHT) + MEGATRON + factor
    return {"megatron": megatron, "vllm": f"{row.vllm.removesuffix(_WEIGHT)}.{factor}", "grouped": "", "fused": ""}


def factor_of(name: str, factor: str) -> str:
    """Returns the name of a weight's factor."""
    return f"{name.removesuffix(_WEIGHT)}.{factor}{_WEIGHT}"


def module_of(name: str) -> str:
    """Returns the last part of the name of a weight's layer: q_proj of model.layers.3.self_attn.q_proj.weight."""
    return name.removesuffix(_WEIGHT).rpartition(".")[2]
