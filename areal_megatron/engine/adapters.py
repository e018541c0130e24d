"""How engines serve adapters: vLLM's options for them, and the names by which requests choose one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from areal_megatron.models.adapter import Adapter, adapted
from areal_megatron.models.architecture import Architecture

BASE = "base"
"""The name under which an engine with adapters serves the model without one."""
IN_MEMORY = "memory"
"""What vLLM is told in place of the folder of an adapter that trainers send."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for the largest rank of its adapters."""


@dataclass(frozen=True)
class Named:
    """An adapter in PEFT's folder, under the name by which requests choose it."""

    name: str
    folder: str
    adapter: Adapter


def told(named: Sequence[Named]) -> str:
    """Returns what the environment variable ADAPTERS tells an engine, from which `read` makes the same again."""
    return json.dumps([{"name": one.name, "folder": one.folder, "adapter": one.adapter.told} for one in named])


def read(text: str) -> list[Named]:
    return [Named(one["name"], one["folder"], Adapter.of_told(one["adapter"])) for one in json.loads(text or "[]")]


def served(folders: Mapping[str, str], others: Sequence[str] = ()) -> list[str]:
    """Returns the options of vLLM's command line for a server of adapters, whose folders these are by the names, and of
    the model without one as BASE, and under `others`."""
    described = [json.dumps({"name": name, "path": folder}) for name, folder in folders.items()]
    return ["--served-model-name", BASE, *others, "--lora-modules", *described]


@dataclass(frozen=True)
class Slots:
    """The room for adapters in every layer of an engine that may have them."""

    count: int
    """As many as there are adapters, and in a run of a program one for others that answer from their folders."""
    each: Adapter
    """The largest adapter that fits into a slot. It has all layers that vLLM fuses in one of these."""
    modules: tuple[str, ...]
    """The last parts of the names that vLLM has for the layers."""

    @property
    def arguments(self) -> list[str]:
        """The options of vLLM's command line."""
        command = ["--enable-lora", "--max-lora-rank", str(self.each.rank), "--lora-target-modules", *self.modules]
        return [*command, "--max-loras", str(self.count), "--max-cpu-loras", str(self.count)]


def slots(adapters: Sequence[Adapter], model: Architecture, driven: bool = False) -> Slots:
    """Returns the room for all of these together, whatever their ranks and targets; `driven`: a program asks."""
    targets = tuple(dict.fromkeys(name for each in adapters for name in each.modules(model)))
    adapter = replace(adapters[0], rank=max(each.rank for each in adapters), targets=targets)
    parts = [row.vllm.rpartition(".")[0] for row in adapted(model, adapter).layer]
    fused = [name for row in model.layer if row.vllm.rpartition(".")[0] in parts for name in row.tensors]
    targets = tuple(dict.fromkeys(name.split(".")[-2] for name in fused))
    rank = next(rank for rank in RANKS if rank >= adapter.rank)
    modules = tuple(dict.fromkeys(part.rpartition(".")[2] for part in parts))
    return Slots(len(adapters) + driven, replace(adapter, rank=rank, targets=targets), modules)
