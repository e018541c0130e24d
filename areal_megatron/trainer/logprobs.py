"""Log-probabilities and entropies of tokens from hidden states, without ever holding the logits of all tokens.

Each tensor-parallel rank computes the logits of its part of the vocabulary for a chunk of tokens at a time, and the
sums that the softmax needs are reduced over the ranks. The backward pass computes the logits again. Peak memory is
about chunk × vocabulary / tp × 12 bytes, whatever the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

_LEAST = -200.0
"""Log-probability below which the probability is 0 in float32, so that its product with the logarithm is 0 as well."""


@dataclass(frozen=True)
class Vocabulary:
    """How the output layer is sharded, and how its logits become a distribution."""

    size: int
    """The tokens of the model; the columns beyond, which pad the output layer, have no probability."""
    temperature: float
    """The divisor of the logits: engines sample from that distribution and report its log-probabilities."""
    chunk: int
    """The number of tokens whose logits are in memory at the same time."""
    sequence_parallel: bool
    """Whether hidden states are sharded over tp along the tokens."""
    rounded: bool = False
    """Whether logits are rounded to the dtype of the hidden states, as by a model without an output layer in
    float32."""


def token_logprobs(
    hidden: Tensor, weight: Tensor, rows: Tensor, labels: Tensor, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """Returns log p(labels[i]) after the token at rows[i], and the entropy of that distribution: float32 [N] each.

    hidden: the final hidden states of a micro-batch on the last pipeline stage, [T, 1, h] ([T / tp, 1, h] under
    sequence parallelism). weight: [padded vocabulary / tp, h]. rows, labels: int64 [N]. Both results are the same on
    all tensor-parallel ranks.
    """
    if vocabulary.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    group = parallel_state.get_tensor_model_parallel_group()
    return _TokenLogprobs.apply(hidden.squeeze(1).index_select(0, rows), weight, labels, vocabulary, group)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, vocabulary, group):
        shard = _Shard(weight, vocabulary, group)
        logprobs, entropies, normalisers = (
            torch.empty(len(labels), dtype=torch.float32, device=hidden.device) for _ in range(3)
        )
        for chunk in _chunks(len(labels), vocabulary.chunk):
            logits = shard.logits(hidden[chunk])
            top = shard.reduce(logits.amax(-1), dist.ReduceOp.MAX)
            logits -= top[:, None]
            own, column = shard.columns(labels[chunk])
            target = logits.gather(1, column[:, None])[:, 0].where(own, 0)
            weights = logits.exp()
            parts = torch.stack([weights.sum(-1), torch.linalg.vecdot(weights, logits), target])
            total, weighted, target = shard.reduce(parts, dist.ReduceOp.SUM)
            log_total = total.log()
            logprobs[chunk] = target - log_total
            entropies[chunk] = log_total - weighted / total
            normalisers[chunk] = top + log_total
        ctx.shard, ctx.chunk = shard, vocabulary.chunk
        ctx.save_for_backward(hidden, weight, labels, normalisers, entropies)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, d_logprobs, d_entropies):
        hidden, weight, labels, normalisers, entropies = ctx.saved_tensors
        if d_logprobs is None:
            d_logprobs = torch.zeros_like(entropies)
        shard, held = ctx.shard, ctx.shard.rows
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for chunk in _chunks(len(labels), ctx.chunk):
            # d log p(label) / d logits = onehot(label) − softmax
            # d entropy / d logits = −softmax · (log softmax + entropy)
            logprobs = shard.logits(hidden[chunk]).sub_(normalisers[chunk, None])
            slope = -d_logprobs[chunk, None]
            if d_entropies is not None:
                known = logprobs.clamp(min=_LEAST).add_(entropies[chunk, None])
                slope = known.mul_(-d_entropies[chunk, None]).add_(slope)
            d_logits = logprobs.exp_().mul_(slope)
            own, column = shard.columns(labels[chunk])
            d_logits.scatter_add_(1, column[:, None], (d_logprobs[chunk] * own)[:, None])
            d_logits = d_logits.div_(shard.temperature).to(hidden.dtype)
            d_hidden[chunk] = d_logits @ weight[:held]
            d_weight[:held] += d_logits.T @ hidden[chunk]
        return d_hidden, d_weight.to(weight.dtype), None, None, None


class _Shard:
    """The columns of the logits that this tensor-parallel rank computes."""

    def __init__(self, weight: Tensor, vocabulary: Vocabulary, group: dist.ProcessGroup):
        self.group, self.temperature, self.rounded = group, vocabulary.temperature, vocabulary.rounded
        self.start = weight.size(0) * group.rank()
        real = min(max(vocabulary.size - self.start, 0), weight.size(0))
        self.all_padding = real == 0
        self.rows = max(real, 1)
        self.weight = weight.detach()[: self.rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, rows]"""
        logits = (hidden @ self.weight.T).float() if self.rounded else _float32_product(hidden, self.weight.T)
        if self.all_padding:
            return logits.fill_(torch.finfo(torch.float32).min)
        return logits.div_(self.temperature)

    def columns(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns whether this rank has the column of each label, and which column (any if it has not)."""
        column = labels - self.start
        own = (column >= 0) & (column < self.rows) & (not self.all_padding)
        return own, column.clamp(0, self.rows - 1)

    def reduce(self, values: Tensor, operation: dist.ReduceOp) -> Tensor:
        if self.group.size() > 1:
            dist.all_reduce(values, operation, group=self.group)
        return values


def _float32_product(left: Tensor, right: Tensor) -> Tensor:
    """Returns left @ right in float32, which is exact but for the order of its sums, whatever the dtype of both."""
    if left.is_cuda and left.dtype != torch.float32:  # as vLLM computes it; there is no such kernel for a CPU
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
