"""Log-probabilities of a vocabulary of 152k: what tiles, their size, a float32 product and compiled code change.

The trainer's own function is timed forward and backward beside plain torch by whole rows, in tiles of several sizes.
Its result, and that of the output layer's product with a bfloat16 and with a float32 result, are compared with float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import areal_megatron.trainer  # noqa: F401  (adapts megatron-core to this machine before anything imports it)
from areal_megatron.models.logits import tile
from areal_megatron.trainer.logprobs import Vocabulary, fold, slopes
from tools.bench.logprobs import full, rows, tiles
from tools.evidence.ceilings import seconds
from tools.evidence.parts import Finding, Options, Part, Skip

VOCABULARY, HIDDEN, TOKENS = 151936, 1536, 8192
"""As in Qwen2.5-1.5B."""
LOGITS = 2**27
"""Held at a time on a GPU of 80 GB."""


def inputs(options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Returns hidden states, the output layer's weights and the tokens; logits have a deviation of about 5."""
    vocabulary, hidden, tokens = (512, 64, 256) if options.small else (VOCABULARY, HIDDEN, TOKENS)
    torch.manual_seed(0)
    make = {"device": options.device, "dtype": torch.bfloat16}
    states, weight = torch.randn(tokens, hidden, **make), torch.randn(vocabulary, hidden, **make) * 5 / hidden**0.5
    return states.requires_grad_(), weight.requires_grad_(), torch.randint(vocabulary, (tokens,), device=options.device)


def sizes(options: Options) -> Iterator[Finding]:
    hidden, weight, labels = inputs(options)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if options.on_cuda else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel()
    with torch.no_grad():
        exact, _ = full(hidden.float(), weight.float(), labels, _vocabulary(weight, LOGITS), entropy=False)
    ways = {"log-probabilities by whole rows": (rows, LOGITS)}
    ways |= {f"… in tiles of 2^{power}": (tiles, 2**power) for power in (25, 27, 29)}
    for name, (function, held) in ways.items():

        def both_ways(function: Callable = function, held: int = held) -> None:
            function(hidden, weight, labels, _vocabulary(weight, held))[0].sum().backward()

        yield Finding(name, 1e6 * seconds(both_ways, hidden.device) / len(labels), "µs/token", more={"tile": held})
    with torch.no_grad():
        found, _ = tiles(hidden, weight, labels, _vocabulary(weight, LOGITS), entropy=False)
        yield from _difference("log-probabilities", found, exact)


def products(options: Options) -> Iterator[Finding]:
    if not options.on_cuda:
        raise Skip("torch.mm takes out_dtype on CUDA only")
    hidden, weight, labels = (tensor.detach() for tensor in inputs(options))
    exact, _ = full(hidden.float(), weight.float(), labels, _vocabulary(weight, LOGITS), entropy=False)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "product in bfloat16, then to float32": lambda states: (states @ weight.T).float(),
        "product with a float32 result": lambda states: torch.mm(states, weight.T, out_dtype=torch.float32),
    }
    for name, logits in ways.items():
        chunk = hidden[: max(1, LOGITS // len(weight))]
        took = seconds(lambda logits=logits, chunk=chunk: logits(chunk), hidden.device)
        yield Finding(name, 1e6 * took / len(chunk), "µs/token", shown=False)
        parts = [logits(states).log_softmax(-1) for states in hidden.split(len(chunk))]
        found = torch.cat(parts).gather(1, labels[:, None])[:, 0]
        yield from _difference(name, found, exact)


def compiled(options: Options) -> Iterator[Finding]:
    """What happens to a tile between products."""
    if not options.on_cuda:
        raise Skip("the trainer compiles nothing on CPU")
    high, wide = tile(TOKENS, VOCABULARY, LOGITS)
    logits, sums = torch.randn(high, wide, device=options.device), torch.randn(2, high, device=options.device).unbind()
    for name, part in (("forward", fold), ("backward", slopes)):
        eager, fused = (seconds(lambda f=f: f(logits, *sums), logits.device) for f in (part.plain, part.compiled))
        yield Finding(f"compiled code for a tile, {name}, over eager", fused / eager, more={"eager_s": eager})


def _vocabulary(weight: Tensor, tile: int) -> Vocabulary:
    return Vocabulary(len(weight), temperature=1.0, tile=tile, sequence_parallel=False)


def _difference(name: str, found: Tensor, exact: Tensor) -> Iterator[Finding]:
    off = (found - exact).abs().float()
    more = {"mean": float(off.mean()), "max": float(off.max())}
    yield Finding(f"{name}, off float32 at p99", float(off.quantile(0.99)), more=more)


PARTS: dict[str, Part] = {"sizes": sizes, "products": products, "compiled": compiled}
