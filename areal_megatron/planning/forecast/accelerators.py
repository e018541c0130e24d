"""What GPUs can do at most, by their makers' figures, and the shares of it that are counted on."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from areal_megatron.config import ConfigError
from areal_megatron.run.json_input import parse_json


@dataclass(frozen=True)
class Efficiencies:
    """The assumed shares of the hardware's peak rates, and the fixed costs.

    One set for all GPUs, models and layouts, unless it is measured (calibration.py): names that end in _s are
    seconds, the others shares.
    """

    products: float = 0.62
    """Matrix products of trainers, and of prefill: a good library's share of the peak at the clock that a GPU holds
    under load."""
    attention: float = 0.4
    """Attention of trainers and of prefill: FlashAttention's, forwards and backwards together."""
    memory: float = 0.8
    """Reading weights and keys and values once, from a GPU's memory."""
    links: float = 0.8
    """What NCCL reaches of NVLink and of the network."""
    host: float = 0.8
    """Copies between a GPU and its host."""
    step_s: float = 0.008
    """What an engine's step takes besides: scheduling, inputs, starting kernels, sampling."""
    request_s: float = 8e-5
    """… and for each running request: its part of the inputs, its token's way to the client."""
    answer_s: float = 0.0
    """What an engine takes for an answer's begin and end: no time on GPUs, where other processes do that."""
    message_s: float = 1.5e-5
    """A small message between the ranks of an engine, or of a trainer's tensor-parallel group."""
    pause_s: float = 0.02
    """An engine's pause for a commit, beside the copy itself (docs/measurements.md, "A weight update")."""
    pass_s: float = 0.0
    """What the forward pass of a micro-batch takes besides, and its backward pass twice: starting kernels, for models
    that are small for their GPU."""
    batch_s: float = 0.0
    """What trainers take for a batch besides passes: packing, diagnostics, the fixed part of optimizer steps."""
    reward_s: float = 1.0
    """From the end of an answer until its score is known."""
    alone: float = 1.0
    """The share of its time that an engine or a trainer rank takes while no other process of the run computes: below 1
    where they share the memory and the cores of one machine."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if type(value) not in (int, float) or not 0 <= value <= 1 or (not value and not each.name.endswith("_s")):
                raise ConfigError(f"efficiencies.{each.name}: {value!r} is no number above 0 and at most 1")


@dataclass(frozen=True)
class Accelerator:
    """A GPU in its usual node: rates in bytes/s, in one direction."""

    name: str
    flops: float
    """Dense bfloat16 FLOP/s."""
    memory: float
    nvlink: float
    """To the other GPUs of its node together."""
    network: float
    """To other nodes: its share of the node's adapters."""
    host: float
    """To its host."""
    gib: float
    """Its memory in GiB."""
    source: str
    efficiencies: Efficiencies = field(default_factory=Efficiencies)

    def link(self, ranks: int, node_gpus: int) -> float:
        """Returns the bytes/s to count on between neighbouring ranks of a group of `ranks`: over NVLink where they have
        room on one node, else over the network."""
        return (self.nvlink if ranks <= node_gpus else self.network) * self.efficiencies.links


_A100 = "NVIDIA, A100 80GB SXM data sheet; DGX A100: 8 adapters of 200 Gb/s, PCIe 4.0 x16"
_HGX = "8 adapters of 400 Gb/s, PCIe 5.0 x16"
_H100 = f"NVIDIA, H100 SXM data sheet, half of the rate with sparsity; DGX H100: {_HGX}"
_H800 = f"an H100 SXM with NVLink of 400 GB/s in both directions: DeepSeek, arXiv 2505.09343; {_HGX}"
_H200 = f"NVIDIA, H200 SXM data sheet; DGX H200: {_HGX}"
_B200 = f"NVIDIA, DGX B200 data sheet, an eighth of it, half of the rate with sparsity: {_HGX}"
ACCELERATORS = {
    each.name: each
    for each in (
        Accelerator("a100", 312e12, 2.039e12, 300e9, 25e9, 32e9, 80, _A100),
        Accelerator("h100", 989.4e12, 3.35e12, 450e9, 50e9, 64e9, 80, _H100),
        Accelerator("h800", 989.4e12, 3.35e12, 200e9, 50e9, 64e9, 80, _H800),
        Accelerator("h200", 989.4e12, 4.8e12, 450e9, 50e9, 64e9, 140, _H200),
        Accelerator("b200", 2250e12, 8.0e12, 900e9, 50e9, 64e9, 179, _B200),
    )
}
CORE = Accelerator("core", 2e11, 5e10, 1e10, 1e10, 1e10, 8, "more than a core of a CPU has: calibrated by its runs")
_RATES = ("flops", "memory", "nvlink", "network", "host", "gib")


def accelerator(name: str) -> Accelerator:
    """Returns the GPU of that name, or the one that a JSON file describes, if the name ends in .json. Raises
    ConfigError for a name that is not known, with the nearest one."""
    if name.endswith(".json"):
        return _measured(Path(name))
    if found := ACCELERATORS.get(name.lower()):
        return found
    near = difflib.get_close_matches(name.lower(), ACCELERATORS, n=1, cutoff=0)[0]
    raise ConfigError(
        f"--gpu {name}: not known; the nearest name is {near}, of {', '.join(ACCELERATORS)}; for another GPU give a "
        f"file, --gpu my_gpu.json, with {', '.join(_RATES)} (docs/measurements.md)"
    )


def this_version() -> str:
    """Returns the version of this project, as a calibration file names it."""
    return metadata.version("areal_megatron")


def _measured(path: Path) -> Accelerator:
    try:
        given = parse_json(path.read_bytes())
    except OSError as e:
        raise ConfigError(f"--gpu: cannot read {path}: {e.strerror}") from None
    except ValueError as e:
        raise ConfigError(f"--gpu: {path} is not JSON: {e}") from None
    if not isinstance(given, dict) or not {*_RATES} <= given.keys() <= {*_RATES, "efficiencies", "version"}:
        raise ConfigError(f"--gpu: {path}: expected {', '.join(_RATES)} and, if some differ, efficiencies")
    if (version := given.get("version", this_version())) != this_version():
        raise ConfigError(
            f"--gpu: {path} was measured by version {version!r}, and this is {this_version()}: run areal calibrate "
            "again, or take `version` out of it if nothing of the run has become faster or slower"
        )
    for key in _RATES:
        if type(given[key]) not in (int, float) or not 0 < given[key] < float("inf"):
            raise ConfigError(f"--gpu: {path}: {key} is {given[key]!r}, expected a number above 0")
    rates = {key: float(given[key]) for key in _RATES}
    return Accelerator(
        "measured", **rates, source=str(path), efficiencies=_efficiencies(path, given.get("efficiencies", {}))
    )


def _efficiencies(path: Path, given: Any) -> Efficiencies:
    known = [each.name for each in fields(Efficiencies)]
    if not isinstance(given, Mapping) or not given.keys() <= {*known}:
        raise ConfigError(f"--gpu: {path}: efficiencies may have {', '.join(known)}")
    try:
        return Efficiencies(**given)
    except ConfigError as e:
        raise ConfigError(f"--gpu: {path}: {e}") from None
