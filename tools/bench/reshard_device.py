"""The cost of packing, casting and unpacking on one device: `reshard.py --device cuda|cpu`.

One process without vLLM and without a network packs and unpacks every bucket of the plan from a TP2×PP2 trainer to a
TP2 engine as reshard/publish.py and reshard/reception.py do, on a stream of its own. The time is compared with plain
copies between contiguous buffers: as many calls that read and write as many bytes. Then the whole model is moved from
the trainer's shards into the engine's, with one more copy in place of the link, and compared with the checkpoint from
which the trainer's shards were filled.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_megatron.checkpoint.hf import checkpoint_layout
from areal_megatron.config import ReshardConfig
from areal_megatron.observe.timeline import Timeline
from areal_megatron.reshard.boxes import Layout
from areal_megatron.reshard.copies import bind, pack, unpack
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.outlet import Outlet, TrainerRank
from areal_megatron.reshard.plan import Planner, largest_bucket
from areal_megatron.reshard.session import LinkRef
from areal_megatron.reshard.trainer_layout import MegatronSizes
from tools.bench.common import line, spreads

QWEN_1_5B = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
"""Qwen2.5-1.5B."""
SMALL = QWEN_1_5B | {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "intermediate_size": 1408,
    "vocab_size": 8192,
}
TRAINERS, ENGINE = MegatronSizes(tp=2, pp=2), EngineSizes(tp=2)
SENT = torch.bfloat16
"""The engine's dtype."""
HELD = {"pack": torch.bfloat16, "cast": torch.float32}
"""The trainer's dtype, by the name that packing has in the figures."""


class Shards:
    """A model on a TP2×PP2 trainer in `held` dtype, room for it on a TP2 engine, and the buckets between them."""

    def __init__(self, hf_config: Mapping[str, Any], device: torch.device, held: torch.dtype, bucket_elements: int):
        planner = Planner(hf_config, TRAINERS, ENGINE, bucket_elements)
        plan, self._layouts = planner.plan(0), planner.destinations
        shapes = checkpoint_layout(hf_config).parameters
        self._checkpoint = {name: torch.randn(shape, device=device, dtype=held) for name, shape in shapes.items()}
        trainer = [_allocate(layout, held, device) for layout in planner.sources]
        for layout, parameters in zip(planner.sources, trainer, strict=True):
            for _, tensor, view in self._places(layout, parameters):
                view.copy_(tensor)
        self._engine = [_allocate(layout, SENT, device) for layout in self._layouts]
        buckets = [bucket for rank in range(plan.sources) for bucket in plan.sent_by(rank)]
        self.sizes = [bucket.elements for bucket in buckets]
        self.messages = _in_turns(self.sizes, SENT, device)
        self.staged = _side_by_side(self.sizes, SENT, device)
        self._outgoing = [
            parcel for rank, held in enumerate(trainer) for parcel in _outlet(planner, rank, held).parcels(held)
        ]
        self._packs = [
            bind([t.send for t in bucket.transfers], trainer[bucket.source], flat)
            for bucket, flat in zip(buckets, self.messages, strict=True)
        ]
        self._unpacks = [
            bind([t.receive for t in bucket.transfers], self._engine[bucket.destination], flat)
            for bucket, flat in zip(buckets, self.staged, strict=True)
        ]

    def pack(self) -> None:
        for copies in self._packs:
            pack(copies)

    def unpack(self) -> None:
        for copies in self._unpacks:
            unpack(copies)

    def reshard(self) -> None:
        for parcel, staged in zip(self._outgoing, self.staged, strict=True):
            if parcel.copies is not None:
                pack(parcel.copies)
            staged.copy_(parcel.flat)
        self.unpack()

    def check(self) -> None:
        """Raises RuntimeError unless the engine holds the checkpoint, cast."""
        for layout, parameters in zip(self._layouts, self._engine, strict=True):
            for name, tensor, view in self._places(layout, parameters):
                if not torch.equal(view, tensor.to(SENT)):
                    raise RuntimeError(f"{name} has arrived wrong")

    def _places(self, layout: Layout, parameters: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yields (name, part of the checkpoint's tensor, the rank's view of it)."""
        for piece in layout.pieces:
            for name, region, view in piece.tensors(parameters):
                yield name, self._checkpoint[name][region], view


def _outlet(planner: Planner, rank: int, held: dict[str, Tensor]) -> Outlet:
    """Returns a trainer rank's end of the link, which knows what need not be packed; nothing is connected."""
    timeline = Timeline(Path(os.devnull), "bench")
    trainer = TrainerRank(lambda: held, planner, rank, dtype=SENT, store="", reshard=ReshardConfig(), timeline=timeline)
    return Outlet(trainer, LinkRef(engine=0, generation=1))


def measure(
    device: torch.device, repetitions: int, hf_config: Mapping[str, Any], bucket_elements: int = 0
) -> dict[str, Any]:
    """Returns what --json writes; 0 bucket_elements are as many as a run on this device has. Raises RuntimeError if a
    tensor arrives wrong."""
    bucket_elements = bucket_elements or largest_bucket(device.type == "cuda")
    runs: list[dict[str, float]] = [{} for _ in range(repetitions)]
    for name, held in HELD.items():
        shards = Shards(hf_config, device, held, bucket_elements)
        _measure(name, held, shards, device, runs)
        elements = sum(shards.sizes)
        del shards  # before the next ones are allocated
    figures = spreads(runs)
    aims = {name: figure["median"] for name, figure in figures.items() if name.endswith("_over_copy")}
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        **aims,
        "device": where,
        "repetitions": repetitions,
        "megabytes": elements * SENT.itemsize / 1e6,
        "figures": figures,
    }


def _measure(name: str, held: torch.dtype, shards: Shards, device: torch.device, runs: list[dict[str, float]]) -> None:
    """Adds the figures for one dtype of the trainer to each run."""
    seconds = _Clock(device)
    packed = [size * (held.itemsize + SENT.itemsize) // 2 for size in shards.sizes]  # half is read, half written
    like_pack = list(
        zip(_in_turns(packed, torch.uint8, device), _side_by_side(packed, torch.uint8, device), strict=True)
    )
    like_unpack = list(zip(_side_by_side(shards.sizes, SENT, device), shards.staged, strict=True))
    seconds(shards.reshard)
    shards.check()
    for like in (like_pack, like_unpack):
        seconds(lambda like=like: _copy(like))
    for run in runs:
        took, plain = seconds(shards.pack), seconds(lambda: _copy(like_pack))
        run[f"{name}_gb_per_s"], run[f"{name}_over_copy"] = 2 * sum(packed) / took / 1e9, plain / took
        if held == SENT:
            took, plain = seconds(shards.unpack), seconds(lambda: _copy(like_unpack))
            moved = 2 * sum(flat.nbytes for flat in shards.staged) / 1e9
            run["unpack_gb_per_s"], run["unpack_over_copy"] = moved / took, plain / took
            run["plain_copy_gb_per_s"] = moved / plain
        run[f"reshard_ms_from_{str(held).removeprefix('torch.')}"] = 1e3 * seconds(shards.reshard)


def table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['megabytes']:,.0f} MB to both engine ranks on {report['device']}; median (lowest – highest) of "
        f"{report['repetitions']} repetitions",
        "",
    ]
    for name, figure in report["figures"].items():
        lines.append(line(name, figure) + ("   aim: at least 0.8" if name.endswith("_over_copy") else ""))
    return "\n".join(lines)


class _Clock:
    """Measures the seconds that a function takes, on a CUDA stream of its own or, on CPU, on this thread."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, function: Callable[[], None]) -> float:
        if self._stream is None:
            start = time.perf_counter()
            function()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._stream.device)
        with torch.cuda.stream(self._stream):
            begin.record()
            function()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source)


def _allocate(layout: Layout, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in layout.parameters.items()}


def _in_turns(sizes: list[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Returns flat tensors of these sizes in two alternating buffers, like a sender's messages."""
    buffers = [torch.zeros(max(sizes), dtype=dtype, device=device) for _ in range(2)]
    return [buffers[i % 2][:size] for i, size in enumerate(sizes)]


def _side_by_side(sizes: list[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Returns flat tensors of these sizes one after another in one buffer, like staging."""
    return list(torch.zeros(sum(sizes), dtype=dtype, device=device).split(sizes))
