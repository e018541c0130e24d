"""Time and peak memory of per-token log-probabilities, forward and backward: in tiles, by whole rows, from full logits.

    python tools/bench/logprobs.py [--tokens 32768] [--vocabulary 151936] [--hidden 64] [--dtype float32]
                                   [--entropy none|value|gradient] [--json FILE]

`tiles` is the trainer's own function. `rows` is plain torch with the same results: whole rows of logits for a chunk of
tokens at a time, and one pass over them for every operation. `--entropy`: without entropies, as in a supervised step;
with their values, as every PPO step reports them; or with their gradient as well, as under an entropy bonus. `rows` has
their values in any case. Full logits of all tokens rarely fit, so they run on `--full-tokens` of them and their figures
are scaled up. Runs on the GPU if there is one; on a CPU seconds are of processor time, which other processes change
little. Each figure is the median of the repetitions, with the lowest and highest; ratios are of runs that followed each
other.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import areal_megatron.trainer  # noqa: F401  (adapts megatron-core to this machine before anything imports it)
from areal_megatron.trainer.logprobs import Vocabulary, tile_of, token_logprobs
from tools.bench import common
from tools.bench.common import cell, spread, spreads

MIB = 2**20
ROWS = 2**27
"""Logits of a chunk of whole rows."""


def tiles(hidden, weight, labels, vocabulary, entropy=True):
    rows = torch.arange(len(labels), device=labels.device)
    return token_logprobs(hidden.unsqueeze(1), weight, rows, labels, vocabulary, entropy=entropy)


def rows(hidden, weight, labels, vocabulary, entropy=True):
    return _Rows.apply(hidden, weight, labels, vocabulary.temperature)


def full(hidden, weight, labels, vocabulary, entropy=True):
    logprobs = F.log_softmax((hidden @ weight.T).float() / vocabulary.temperature, -1)
    entropies = -(logprobs.exp() * logprobs).sum(-1) if entropy else None
    return logprobs.gather(1, labels[:, None])[:, 0], entropies


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature):
        ctx.chunks = torch.arange(len(labels)).split(max(1, ROWS // len(weight)))
        logprobs, entropies, normalisers = torch.empty((3, len(labels)), device=hidden.device)
        for chunk in (slice(int(c[0]), int(c[-1]) + 1) for c in ctx.chunks):
            logits = _product(hidden[chunk], weight.T).div_(temperature)
            top = logits.amax(-1)
            logits -= top[:, None]
            weights = logits.exp()
            total, weighted = weights.sum(-1), torch.linalg.vecdot(weights, logits)
            logprobs[chunk] = logits.gather(1, labels[chunk, None])[:, 0] - total.log()
            entropies[chunk] = total.log() - weighted / total
            normalisers[chunk] = top + total.log()
        ctx.temperature = temperature
        ctx.save_for_backward(hidden, weight, labels, normalisers, entropies)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, d_logprobs, d_entropies):
        hidden, weight, labels, normalisers, entropies = ctx.saved_tensors
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for chunk in (slice(int(c[0]), int(c[-1]) + 1) for c in ctx.chunks):
            logprobs = _product(hidden[chunk], weight.T).div_(ctx.temperature).sub_(normalisers[chunk, None])
            slope = -d_logprobs[chunk, None]
            if d_entropies is not None:
                slope = (logprobs + entropies[chunk, None]).mul_(-d_entropies[chunk, None]).add_(slope)
            d_logits = logprobs.exp_().mul_(slope).scatter_add_(1, labels[chunk, None], d_logprobs[chunk, None])
            d_logits = d_logits.div_(ctx.temperature).to(hidden.dtype)
            d_hidden[chunk] = d_logits @ weight
            d_weight += d_logits.T @ hidden[chunk]
        return d_hidden, d_weight.to(weight.dtype), None, None


def _product(left, right):
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


RUNS = {"tiles": tiles, "rows": rows, "full": full}


def measure(function, tokens: int, options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Returns the peak MiB beyond the inputs and their gradients, and the seconds."""
    torch.manual_seed(0)
    make = {"device": device, "dtype": getattr(torch, options.dtype), "requires_grad": True}
    hidden = torch.randn(tokens, options.hidden, **make)
    weight = torch.randn(options.vocabulary, options.hidden, **make)
    labels = torch.randint(options.vocabulary, (tokens,), device=device)
    vocabulary = Vocabulary(options.vocabulary, 1.0, options.tile or tile_of(device), sequence_parallel=False)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    before, clock = peak(device, reset=True), time.process_time if device.type == "cpu" else time.perf_counter
    start = clock()
    logprobs, entropies = function(hidden, weight, labels, vocabulary, options.entropy != "none")
    (logprobs + entropies if options.entropy == "gradient" else logprobs).sum().backward()
    highest = peak(device)  # waits for a GPU
    return {"seconds": clock() - start, "peak_mib": (highest - before) / MIB}


def peak(device: torch.device, reset: bool = False) -> int:
    """Returns the peak memory in bytes since the last reset: the allocator's on CUDA, the resident set on CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__, repetitions=3)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--entropy", choices=("none", "value", "gradient"), default="value")
    parser.add_argument("--tile", type=int, help="logits of a tile; by default what the trainer takes on this device")
    parser.add_argument("--full-tokens", type=int, default=2048)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    scale = options.tokens / options.full_tokens
    found: dict[str, list[dict[str, float]]] = {name: [] for name in RUNS}
    for function in RUNS.values():  # the first call of an operation takes longer; a GPU compiles
        measure(function, min(256, options.tokens), options, device)
    for _ in range(options.repetitions):
        for name, function in RUNS.items():
            short = name == "full"
            run = measure(function, options.full_tokens if short else options.tokens, options, device)
            found[name].append({key: value * (scale if short else 1) for key, value in run.items()})
    report = {"device": str(device), "threads": torch.get_num_threads(), "torch": torch.__version__}
    report |= {key: value for key, value in vars(options).items() if key != "json"}
    for name, runs in found.items():
        report[name] = spreads(runs)
        over = [run["seconds"] / own["seconds"] for run, own in zip(runs, found["tiles"], strict=True)]
        report[name]["seconds_over_tiles"] = spread(over)
    print(f"{options.tokens} tokens × {options.vocabulary} columns, hidden size {options.hidden}, {options.dtype}")
    print(f"entropy: {options.entropy}; forward and backward on {device}, {report['threads']} threads")
    print(f"{'':<6}{'seconds':>26}{'over tiles':>22}{'peak memory, MiB':>28}")
    for name in RUNS:
        line = f"{name:<6}"
        for key, digits, width in (("seconds", 1, 26), ("seconds_over_tiles", 2, 22), ("peak_mib", 0, 28)):
            line += cell(report[name][key], digits).rjust(width)
        print(line + f"  (of {options.full_tokens} tokens, scaled up)" * (name == "full"))
    common.keep(options.json, report)


if __name__ == "__main__":
    main()
