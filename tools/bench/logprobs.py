"""Peak memory and time of per-token log-probabilities, forward and backward: in chunks, and from full logits.

    python tools/bench/logprobs.py [--tokens 32768] [--vocabulary 151936] [--hidden 64] [--chunk 1024] [--json FILE]

Full logits of all tokens rarely fit, so they run on `--full-tokens` of them and their memory is scaled up. Runs on
the GPU if there is one. Each figure is the median of the repetitions, with the lowest and highest.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F

import areal_megatron.trainer  # noqa: F401  (adapts megatron-core to this machine before anything imports it)
from areal_megatron.trainer.logprobs import Vocabulary, token_logprobs

MIB = 2**20


def chunked(hidden, weight, labels, vocabulary):
    rows = torch.arange(len(labels), device=labels.device)
    return token_logprobs(hidden.unsqueeze(1), weight, rows, labels, vocabulary)[0]


def full(hidden, weight, labels, vocabulary):
    logits = (hidden @ weight.T).float() / vocabulary.temperature
    return F.log_softmax(logits, -1).gather(1, labels[:, None])[:, 0]


def measure(function, tokens: int, options: argparse.Namespace, device: torch.device) -> tuple[float, float]:
    """Returns the peak bytes beyond the inputs and their gradients, and the seconds."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, options.hidden, device=device, requires_grad=True)
    weight = torch.randn(options.vocabulary, options.hidden, device=device, requires_grad=True)
    labels = torch.randint(options.vocabulary, (tokens,), device=device)
    vocabulary = Vocabulary(options.vocabulary, 1.0, options.chunk, sequence_parallel=False)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    before = peak(device, reset=True)
    start = time.perf_counter()
    function(hidden, weight, labels, vocabulary).sum().backward()
    highest = peak(device)
    return highest - before, time.perf_counter() - start


def peak(device: torch.device, reset: bool = False) -> int:
    """Returns the peak memory in bytes since the last reset: the allocator's on CUDA, the resident set on CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--full-tokens", type=int, default=4096)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    scale = options.tokens / options.full_tokens
    runs = {"chunked": [], "full": []}
    for _ in range(options.repetitions):
        runs["chunked"].append(measure(chunked, options.tokens, options, device))
        size, seconds = measure(full, options.full_tokens, options, device)
        runs["full"].append((size * scale, seconds * scale))
    report = {"device": str(device), "tokens": options.tokens, "vocabulary": options.vocabulary, "chunk": options.chunk}
    for name, results in runs.items():
        for key, values in zip(("peak_mib", "seconds"), zip(*results, strict=True), strict=True):
            values = [v / MIB for v in values] if key == "peak_mib" else values
            report[f"{name}_{key}"] = {"median": median(values), "min": min(values), "max": max(values)}
    report["memory_full_over_chunked"] = report["full_peak_mib"]["median"] / report["chunked_peak_mib"]["median"]
    print(f"{options.tokens} tokens × {options.vocabulary} columns on {device}, chunks of {options.chunk} tokens")
    print(f"{'':<10}{'peak memory, MiB':>28}{'seconds':>28}")
    for name in runs:
        cells = (report[f"{name}_{key}"] for key in ("peak_mib", "seconds"))
        note = f"  (scaled up from {options.full_tokens} tokens)" if name == "full" else ""
        print(
            f"{name:<10}" + "".join(f"{c['median']:>12,.1f} ({c['min']:,.1f} – {c['max']:,.1f})" for c in cells) + note
        )
    print(f"full logits need {report['memory_full_over_chunked']:.1f} times the memory")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
