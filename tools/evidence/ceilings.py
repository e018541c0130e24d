"""What the device can do at best: copies, and matrix products in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tools.bench.reshard_device import Clock
from tools.evidence.parts import Finding, Options, Part

WARM_UPS, RUNS = 3, 10


def seconds(function, device: torch.device) -> float:
    """Returns the mean seconds of a call, after some that are not counted."""
    clock = Clock(device)
    for _ in range(WARM_UPS):
        function()
    return clock(lambda: [function() for _ in range(RUNS)]) / RUNS


def product_rate(options: Options) -> float:
    """Returns the FLOP/s of a large product of random bfloat16 matrices."""
    a, b = _matrices(options)
    return 2 * len(a) ** 3 / seconds(lambda: a @ b, a.device)


def _matrices(options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    size = 256 if options.small else 8192
    return torch.randn(2, size, size, device=options.device, dtype=torch.bfloat16).unbind()


def device(options: Options) -> Iterator[Finding]:
    name = torch.cuda.get_device_name() if options.on_cuda else f"CPU, {torch.get_num_threads()} threads"
    yield Finding("device", name)
    if options.on_cuda:
        libraries = f"CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        yield Finding("libraries of torch", libraries, shown=False)
        yield Finding("memory", torch.cuda.get_device_properties(0).total_memory / 2**30, "GiB", shown=False)


def copy(options: Options) -> Iterator[Finding]:
    source, target = torch.ones(2, 2**20 if options.small else 2**31, device=options.device, dtype=torch.uint8).unbind()
    yield Finding(
        "copy, read and written", 2 * source.nbytes / seconds(lambda: target.copy_(source), source.device) / 1e9, "GB/s"
    )


def products(options: Options) -> Iterator[Finding]:
    yield Finding("product in bfloat16", product_rate(options) / 1e12, "TFLOP/s")
    if options.on_cuda:
        a, b = _matrices(options)
        took = seconds(lambda: torch.mm(a, b, out_dtype=torch.float32), a.device)
        yield Finding("… with a float32 result", 2 * len(a) ** 3 / took / 1e12, "TFLOP/s")


PARTS: dict[str, Part] = {"device": device, "copy": copy, "products": products}
