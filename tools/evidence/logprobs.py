"""Log-probabilities of a vocabulary of 152k: what larger chunks, a float32 product and compiled code would change.

The trainer's own function is timed forward and backward, with chunks as it has them and four times as large. Its
result, and that of the output layer's product with a bfloat16 and with a float32 result, are compared with float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import areal_megatron.trainer  # noqa: F401  (adapts megatron-core to this machine before anything imports it)
from areal_megatron.models.logits import chunk_tokens
from areal_megatron.trainer.logprobs import Vocabulary
from tools.bench.logprobs import chunked, full
from tools.evidence.ceilings import seconds
from tools.evidence.parts import Finding, Options, Part, Skip

VOCABULARY, HIDDEN, TOKENS = 151936, 1536, 8192
"""As in Qwen2.5-1.5B."""


def inputs(options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Returns hidden states, the output layer's weights and the tokens; logits have a deviation of about 5."""
    vocabulary, hidden, tokens = (512, 64, 256) if options.small else (VOCABULARY, HIDDEN, TOKENS)
    torch.manual_seed(0)
    make = {"device": options.device, "dtype": torch.bfloat16}
    states, weight = torch.randn(tokens, hidden, **make), torch.randn(vocabulary, hidden, **make) * 5 / hidden**0.5
    return states.requires_grad_(), weight.requires_grad_(), torch.randint(vocabulary, (tokens,), device=options.device)


def chunks(options: Options) -> Iterator[Finding]:
    hidden, weight, labels = inputs(options)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if options.on_cuda else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel()
    with torch.no_grad():
        exact = full(hidden.float(), weight.float(), labels, _vocabulary(weight, 1))
    for factor in (1, 4):
        vocabulary = _vocabulary(weight, factor)

        def both_ways(vocabulary: Vocabulary = vocabulary) -> None:
            chunked(hidden, weight, labels, vocabulary).sum().backward()

        took = seconds(both_ways, hidden.device)
        name = "log-probabilities" if factor == 1 else f"… in chunks {factor} times as large"
        yield Finding(name, 1e6 * took / len(labels), "µs/token", more={"chunk": vocabulary.chunk})
    with torch.no_grad():
        yield from _difference("log-probabilities", chunked(hidden, weight, labels, _vocabulary(weight, 1)), exact)


def products(options: Options) -> Iterator[Finding]:
    if not options.on_cuda:
        raise Skip("torch.mm takes out_dtype on CUDA only")
    hidden, weight, labels = (tensor.detach() for tensor in inputs(options))
    exact = full(hidden.float(), weight.float(), labels, _vocabulary(weight, 1))
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "product in bfloat16, then to float32": lambda states: (states @ weight.T).float(),
        "product with a float32 result": lambda states: torch.mm(states, weight.T, out_dtype=torch.float32),
    }
    for name, logits in ways.items():
        rows = hidden[: chunk_tokens(len(weight), 1)]
        took = seconds(lambda logits=logits, rows=rows: logits(rows), hidden.device)
        yield Finding(name, 1e6 * took / len(rows), "µs/token", shown=False)
        parts = [logits(states).log_softmax(-1) for states in hidden.split(len(rows))]
        found = torch.cat(parts).gather(1, labels[:, None])[:, 0]
        yield from _difference(name, found, exact)


def compiled(options: Options) -> Iterator[Finding]:
    """The passes over the logits of a chunk, which compiled code would make one."""
    if not options.on_cuda:
        raise Skip("the trainer compiles nothing on CPU")
    _, weight, _ = inputs(options)
    logits = torch.randn(chunk_tokens(len(weight), 1), len(weight), device=options.device)

    def sums(logits: Tensor) -> Tensor:
        logits = logits - logits.amax(-1, keepdim=True)
        weights = logits.exp()
        return torch.stack([weights.sum(-1), (weights * logits).sum(-1)])

    eager, fused = (seconds(lambda f=f: f(logits), logits.device) for f in (sums, torch.compile(sums)))
    yield Finding("compiled passes over logits, time over eager ones", fused / eager, more={"eager_s": eager})


def _vocabulary(weight: Tensor, factor: int) -> Vocabulary:
    size = len(weight)
    return Vocabulary(size, temperature=1.0, chunk=factor * chunk_tokens(size, 1), sequence_parallel=False)


def _difference(name: str, found: Tensor, exact: Tensor) -> Iterator[Finding]:
    off = (found - exact).abs().float()
    more = {"mean": float(off.mean()), "max": float(off.max())}
    yield Finding(f"{name}, off float32 at p99", float(off.quantile(0.99)), more=more)


PARTS: dict[str, Part] = {"chunks": chunks, "products": products, "compiled": compiled}
