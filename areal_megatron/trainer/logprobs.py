"""Log-probabilities and entropies of tokens from hidden states, without ever holding the logits of all tokens.

Each tensor-parallel rank computes the logits of its part of the vocabulary tile by tile, some tokens × some columns,
and adds each tile to the sums that the softmax needs; these are reduced over the ranks once, at the end. The backward
pass computes the logits again, in the same tiles. On a CPU a tile stays in the core's cache. On a GPU it is as large as
its memory allows (models/logits.py), and one kernel or two do all that happens to a tile between products.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from areal_megatron.models.logits import cpu_logits, gpu_logits, tile
from areal_megatron.trainer.parallel import tensor_parallel_group

log = logging.getLogger(__name__)

_LEAST = -87.0
"""The logarithm of about the smallest normal number: a CPU takes a hundred times as long for e to the power of less."""


@dataclass(frozen=True)
class Vocabulary:
    """How the output layer is sharded, and how its logits become a distribution."""

    size: int
    """The tokens of the model; the columns beyond, which pad the output layer, have no probability."""
    temperature: float
    """The divisor of the logits: engines sample from that distribution and report its log-probabilities."""
    tile: int
    """The number of logits in memory at the same time, at most."""
    sequence_parallel: bool
    """Whether hidden states are sharded over tp along the tokens."""
    rounded: bool = False
    """Whether logits are rounded to the dtype of the hidden states, as by a model without an output layer in
    float32."""


def tile_of(device: torch.device) -> int:
    """Returns how many logits to hold at a time on a device."""
    if device.type == "cuda":
        return gpu_logits(torch.cuda.get_device_properties(device).total_memory)
    return cpu_logits(torch.get_num_threads())


def token_logprobs(
    hidden: Tensor, weight: Tensor, rows: Tensor, labels: Tensor, vocabulary: Vocabulary, *, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Returns log p(labels[i]) after the token at rows[i], float32 of the shape of `labels`, and if asked for the
    `entropy` of that distribution in nats, float32 [N].

    hidden: the final hidden states of a micro-batch on the last pipeline stage, [T, 1, h] ([T / tp, 1, h] under
    sequence parallelism). weight: [padded vocabulary / tp, h]. rows: int64 [N]. labels: int64 [N], or [N, L] for
    several tokens in the same place. Both results are the same on all tensor-parallel ranks.
    """
    group = tensor_parallel_group()
    columns = labels[:, None] if labels.dim() == 1 else labels
    predicting = _predicting(hidden, rows, vocabulary)
    found, entropies = _TokenLogprobs.apply(predicting, weight, columns, vocabulary, group, entropy)
    return found.view(labels.shape), entropies


@torch.no_grad()
def likeliest(hidden: Tensor, weight: Tensor, rows: Tensor, labels: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Returns whether no token is likelier than labels[i] after the token at rows[i], bool [N]; the arguments are as
    for `token_logprobs`."""
    shard = _Shard(weight, labels[:, None], vocabulary, tensor_parallel_group())
    hidden = _predicting(hidden, rows, vocabulary)
    target = torch.zeros(len(labels), dtype=torch.float32, device=hidden.device)
    top = torch.full_like(target, torch.finfo(torch.float32).min)
    for columns in shard.columns:
        layer = shard.layer(columns)
        for tokens in shard.tokens:
            logits = shard.logits(hidden[tokens], layer)
            own, column = shard.labels(tokens, columns)
            target[tokens] += logits.gather(1, column).where(own, 0)[:, 0]
            top[tokens] = torch.maximum(top[tokens], logits.amax(-1))
    return shard.reduce(target, dist.ReduceOp.SUM) >= shard.reduce(top, dist.ReduceOp.MAX)


def _predicting(hidden: Tensor, rows: Tensor, vocabulary: Vocabulary) -> Tensor:
    """The hidden states of the tokens at `rows` [N, h], on every tensor-parallel rank."""
    if vocabulary.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    return hidden.squeeze(1).index_select(0, rows)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, vocabulary, group, entropy):
        shard = _Shard(weight, labels, vocabulary, group)
        target = torch.zeros(labels.shape, dtype=torch.float32, device=hidden.device)
        total = target.new_zeros(len(labels))
        top = torch.full_like(total, torch.finfo(torch.float32).min)
        weighted = torch.zeros_like(total) if entropy else None
        for columns in shard.columns:
            layer = shard.layer(columns)
            for tokens in shard.tokens:
                logits = shard.logits(hidden[tokens], layer)
                own, column = shard.labels(tokens, columns)
                target[tokens] += logits.gather(1, column).where(own, 0)
                sums = [x[tokens] for x in (top, total, weighted) if x is not None]
                for old, new in zip(sums, fold(logits, *sums), strict=True):
                    old.copy_(new)
        highest = shard.reduce(top.clone(), dist.ReduceOp.MAX)
        parts = torch.cat([target.T, torch.stack(_shifted(top - highest, total, weighted))])
        parts = shard.reduce(parts, dist.ReduceOp.SUM)
        target, (total, *weighted) = parts[: labels.size(1)].T, parts[labels.size(1) :]
        log_total = total.log()
        entropies = log_total - weighted[0] / total if entropy else None
        ctx.shard = shard
        ctx.save_for_backward(hidden, weight, highest + log_total, entropies)
        ctx.set_materialize_grads(False)
        return target - highest[:, None] - log_total[:, None], entropies

    @staticmethod
    def backward(ctx, d_logprobs, d_entropies):
        hidden, weight, normalisers, entropies = ctx.saved_tensors
        shard = ctx.shard
        if d_logprobs is None:
            d_logprobs = torch.zeros(shard.own_labels.shape, dtype=normalisers.dtype, device=normalisers.device)
        d_logprobs = d_logprobs / shard.temperature
        known = (normalisers, d_logprobs.sum(1))
        if d_entropies is not None:
            known += (entropies, d_entropies / shard.temperature)
        d_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for columns in shard.columns:
            layer, own_weight = shard.layer(columns), weight[columns]
            d_own_weight = None if d_weight is None else torch.zeros_like(own_weight, dtype=torch.float32)
            for tokens in shard.tokens:
                logits = shard.logits(hidden[tokens], layer)
                d_logits = slopes(logits, *(x[tokens] for x in known))
                own, column = shard.labels(tokens, columns)
                d_logits.scatter_add_(1, column, d_logprobs[tokens].where(own, 0))
                d_logits = d_logits.to(hidden.dtype)
                _add_product(d_hidden[tokens], d_logits, own_weight)
                if d_own_weight is not None:
                    _add_product(d_own_weight, d_logits.T, hidden[tokens])
            if d_weight is not None and d_own_weight is not None:
                d_weight[columns] = d_own_weight
        return d_hidden.to(hidden.dtype), d_weight, None, None, None, None


class _Shard:
    """The logits that this tensor-parallel rank computes, and the tiles in which it does."""

    def __init__(self, weight: Tensor, labels: Tensor, vocabulary: Vocabulary, group: dist.ProcessGroup):
        self.group, self.temperature, self.rounded = group, vocabulary.temperature, vocabulary.rounded
        self.weight, first = weight.detach(), weight.size(0) * group.rank()
        self.own_labels = labels - first
        real = min(max(vocabulary.size - first, 0), weight.size(0))
        high, wide = tile(len(labels), real, vocabulary.tile)
        self.tokens, self.columns = _slices(len(labels), high), _slices(real, wide)

    def layer(self, columns: slice) -> Tensor:
        """Returns the output layer's rows for these columns, in the dtype that `logits` multiplies with."""
        part = self.weight[columns]
        return part if self.rounded or part.is_cuda else part.float()

    def logits(self, hidden: Tensor, layer: Tensor) -> Tensor:
        """Returns the logits in float32, exact but for the order of their sums, or rounded to the dtype of `hidden`."""
        if self.rounded or hidden.dtype == torch.float32:
            logits = (hidden @ layer.T).float()
        elif hidden.is_cuda:  # as vLLM computes it; there is no such kernel for a CPU
            logits = torch.mm(hidden, layer.T, out_dtype=torch.float32)
        else:
            logits = hidden.float() @ layer.T
        return logits if self.temperature == 1 else logits.div_(self.temperature)

    def labels(self, tokens: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Returns whether each label is in these columns and in which of them, any if it is not: [n, L] both."""
        label = self.own_labels[tokens] - columns.start
        column = label.clamp(0, columns.stop - columns.start - 1)
        return column == label, column

    def reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.group.size() > 1:
            dist.all_reduce(values, operation, group=self.group)
        return values


class Fused:
    """A function of a tile of logits and vectors that runs on a GPU as one kernel or two, compiled at the first call.

    It runs as it is written on a CPU, and where torch cannot compile it for want of Triton or a C compiler, which is
    logged.
    """

    def __init__(self, function: Callable[..., Any]):
        self.plain, self._compiled = function, None

    def __call__(self, logits: Tensor, *vectors: Tensor) -> Any:
        # a tile of one row or column would be compiled on its own
        run = self.compiled if logits.is_cuda and 1 not in logits.shape else self.plain
        return run(logits, *vectors)

    def compiled(self, *tensors: Tensor) -> Any:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # takes seconds

        if self._compiled is None:
            self._compiled = torch.compile(self.plain, dynamic=True, fullgraph=True)
        try:
            return self._compiled(*tensors)
        except (TorchDynamoException, FailOnRecompileLimitHit) as e:
            log.warning("log-probabilities: not compiled, and so slower: %s", str(e).strip().split("\n")[0])
            self._compiled = self.plain
            return self.plain(*tensors)


@Fused
def fold(logits: Tensor, top: Tensor, total: Tensor, weighted: Tensor | None = None) -> list[Tensor]:
    """Returns the sums with a tile added, [n] each: the highest logit, the sum of weights e^(logit − highest), and if
    `weighted` is there the sum of weight × (logit − highest)."""
    highest = torch.maximum(top, logits.amax(-1))
    below = (logits - highest[:, None]).clamp_(min=_LEAST)
    total, *shifted = _shifted(top - highest, total, weighted)
    if not shifted:
        return [highest, total + below.exp_().sum(-1)]
    weights = below.exp()
    return [highest, total + weights.sum(-1), shifted[0] + weights.mul_(below).sum(-1)]


def _shifted(lower: Tensor, total: Tensor, weighted: Tensor | None) -> list[Tensor]:
    """Returns both sums of `fold` as they are where the highest logit is higher: by −lower, which is 0 at least."""
    scale = lower.exp()
    return [total * scale] if weighted is None else [total * scale, (weighted + total * lower) * scale]


@Fused
def slopes(
    logits: Tensor,
    normalisers: Tensor,
    d_logprobs: Tensor,
    entropies: Tensor | None = None,
    d_entropies: Tensor | None = None,
) -> Tensor:
    """Returns the gradient of a tile's logits, but for the labels' own part, in place of the logits.

    d log p(label) / d logits = onehot(label) − softmax
    d entropy / d logits = −softmax · (log softmax + entropy)
    """
    logprobs = logits.sub_(normalisers[:, None]).clamp_(min=_LEAST)
    if entropies is None or d_entropies is None:
        return logprobs.exp_().mul_(-d_logprobs[:, None])
    factors = (logprobs + entropies[:, None]).mul_(-d_entropies[:, None]).sub_(d_logprobs[:, None])
    return logprobs.exp_().mul_(factors)


def _add_product(to: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to a float32 matrix. On a CPU, products of half precision are rounded to it before."""
    if left.dtype == torch.float32:
        to.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(to, left, right, out_dtype=torch.float32, out=to)
    else:
        to += left @ right


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
