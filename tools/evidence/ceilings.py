"""What the device can do at best: copies, and matrix products in bfloat16."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from tools.evidence.parts import Finding, Options, Part

WARM_UPS, RUNS = 3, 10


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Returns the mean seconds of a call, after some that are not counted. On a stream of its own: it waits for nothing
    else that the device does, such as a receive whose sender sends nothing."""
    if device.type == "cpu":
        for _ in range(WARM_UPS):
            function()
        start = time.perf_counter()
        for _ in range(RUNS):
            function()
        return (time.perf_counter() - start) / RUNS
    stream, begin, end = torch.cuda.Stream(device), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            function()
        begin.record()
        for _ in range(RUNS):
            function()
        end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / RUNS


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
