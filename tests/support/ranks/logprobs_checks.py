"""Checks of log-probabilities, entropies and their gradients against float64, which test_logprobs.py starts."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from areal_megatron.trainer.logprobs import Vocabulary, token_logprobs

ROWS, COLUMNS, HIDDEN = 40, 96, 16
"""Tokens of the micro-batch, and columns of the padded vocabulary."""


def check(folder: Path, rank: int, tp: int) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), tp), rank=rank, world_size=tp)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    try:
        # a vocabulary without padding, with some, and one that leaves the second of two ranks none
        for size, tile in itertools.product((96, 83, 41), (1, 7, 300, 2**20)):
            check_float32(rank, tp, Vocabulary(size, 0.7, tile, sequence_parallel=tp > 1), tokens=29)
        for tokens, temperature in ((0, 0.7), (1, 1.0), (300, 1.0)):
            check_float32(rank, tp, Vocabulary(83, temperature, 300, sequence_parallel=False), tokens)
        check_several(rank, tp)
        check_steep(rank, tp)
        for dtype in (torch.bfloat16, torch.float16):
            check_half(rank, tp, dtype)
    finally:
        dist.destroy_process_group()


def inputs(size: int, tokens: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(size + tokens)
    hidden, weight = torch.randn(ROWS, 1, HIDDEN), scale * torch.randn(COLUMNS, HIDDEN)
    weight[size:] = 100  # padding, whose logits must count for nothing
    labels = torch.randint(size, (tokens,))
    labels[:2] = size - 1
    return hidden.to(dtype), weight.to(dtype), torch.randint(ROWS, (tokens,)), labels


def exact(hidden: Tensor, weight: Tensor, rows: Tensor, labels: Tensor, vocabulary: Vocabulary) -> list[Tensor]:
    """Returns log-probabilities, entropies and the gradients of hidden states and weights, in float64."""
    hidden, weight = (x.double().requires_grad_() for x in (hidden, weight))
    logits = hidden[rows, 0] @ weight[: vocabulary.size].T / vocabulary.temperature
    plain = torch.distributions.Categorical(logits=logits, validate_args=False)  # it would refuse no tokens at all
    found = plain.log_prob(labels), plain.entropy()
    return [*found, *torch.autograd.grad(loss(*found), (hidden, weight))]


def loss(logprobs: Tensor, entropies: Tensor | None) -> Tensor:
    factors = torch.linspace(-1, 1, len(logprobs), dtype=logprobs.dtype)
    return (factors * logprobs).sum() + (0 if entropies is None else 0.3 * (factors.square() * entropies).sum())


def found(rank: int, tp: int, given: tuple[Tensor, ...], vocabulary: Vocabulary, entropy: bool) -> list[Tensor]:
    """What `exact` returns, of the trainer's function; of the gradients this rank's part."""
    hidden, weight, rows, labels = given
    own_hidden = hidden.chunk(tp)[rank] if vocabulary.sequence_parallel else hidden
    own_hidden, own_weight = (x.detach().clone().requires_grad_() for x in (own_hidden, weight.chunk(tp)[rank]))
    logprobs, entropies = token_logprobs(own_hidden, own_weight, rows, labels, vocabulary, entropy=entropy)
    assert (entropies is not None) == entropy
    loss(logprobs, entropies).backward()
    with torch.no_grad():  # gradients or none: the same
        again, _ = token_logprobs(own_hidden, own_weight, rows, labels, vocabulary)
    torch.testing.assert_close(again, logprobs, atol=0, rtol=0)
    return [logprobs, entropies, own_hidden.grad, own_weight.grad]


def check_float32(rank: int, tp: int, vocabulary: Vocabulary, tokens: int) -> None:
    given = inputs(vocabulary.size, tokens, 0.5, torch.float32)
    expected = own_part(rank, tp, vocabulary, exact(*given, vocabulary))
    assert_near(found(rank, tp, given, vocabulary, entropy=True), expected, 1e-6, 1e-6)
    logprobs, *_ = found(rank, tp, given, vocabulary, entropy=False)
    torch.testing.assert_close(logprobs.double(), expected[0], atol=1e-6, rtol=1e-6)


def check_several(rank: int, tp: int) -> None:
    """Log-probabilities of several tokens in the same place, the same one twice among them; -1 is none of them."""
    for tokens, tile in ((29, 1), (29, 300), (0, 300)):
        vocabulary = Vocabulary(83, 0.7, tile, sequence_parallel=tp > 1)
        hidden, weight, rows, labels = inputs(vocabulary.size, tokens, 0.5, torch.float32)
        several = torch.stack([labels, labels, labels.flip(0), torch.zeros_like(labels)], 1)
        factors = torch.linspace(-1, 2, several.numel()).view(several.shape)
        exact_hidden, exact_weight = (x.double().requires_grad_() for x in (hidden, weight))
        logits = exact_hidden[rows, 0] @ exact_weight[: vocabulary.size].T / vocabulary.temperature
        expected = logits.log_softmax(-1).gather(1, several)
        (factors * expected).sum().backward()
        own_hidden = hidden.chunk(tp)[rank] if tp > 1 else hidden
        own_hidden, own_weight = (x.detach().clone().requires_grad_() for x in (own_hidden, weight.chunk(tp)[rank]))
        asked = torch.cat([several, torch.full_like(labels, -1)[:, None]], 1)
        ours, _ = token_logprobs(own_hidden, own_weight, rows, asked, vocabulary)
        (factors * ours[:, :-1]).sum().backward()
        torch.testing.assert_close(ours[:, :-1].double(), expected, atol=1e-6, rtol=1e-6)
        assert ours.isfinite().all()
        exact_hidden, exact_weight = exact_hidden.grad.chunk(tp)[rank], exact_weight.grad.chunk(tp)[rank]
        for gradient, right in ((own_hidden.grad, exact_hidden), (own_weight.grad, exact_weight)):
            assert (gradient.double() - right).norm() <= 1e-6 * right.norm()


def check_steep(rank: int, tp: int) -> None:
    """Logits that differ by hundreds: some probabilities are 1, and most are 0 in float32."""
    vocabulary = Vocabulary(83, 1.0, 300, sequence_parallel=tp > 1)
    given = inputs(vocabulary.size, 29, 40.0, torch.float32)
    expected = own_part(rank, tp, vocabulary, exact(*given, vocabulary))
    assert expected[0].min() < -300 and expected[1].min() < 1e-12
    assert_near(found(rank, tp, given, vocabulary, entropy=True), expected, 1e-4, 1e-4)


def check_half(rank: int, tp: int, dtype: torch.dtype) -> None:
    """Products of numbers in half precision are float32 ones; gradients are rounded to half precision."""
    vocabulary = Vocabulary(83, 0.7, 300, sequence_parallel=tp > 1)
    given = inputs(vocabulary.size, 300, 0.5, dtype)
    expected = own_part(rank, tp, vocabulary, exact(*given, vocabulary))
    ours = found(rank, tp, given, vocabulary, entropy=True)
    assert_near(ours, expected, 1e-6, torch.finfo(dtype).eps)
    assert ours[2].dtype == ours[3].dtype == dtype


def assert_near(ours: list[Tensor], expected: list[Tensor], value: float, gradient: float) -> None:
    """`value` bounds the errors of log-probabilities and entropies, `gradient` those of gradients as a share of their
    norm."""
    for number in (0, 1):
        torch.testing.assert_close(ours[number].double(), expected[number], atol=value, rtol=1e-6)
    for number in (2, 3):
        error = (ours[number].double() - expected[number]).norm()
        assert error <= gradient * expected[number].norm(), (number, float(error / expected[number].norm()))


def own_part(rank: int, tp: int, vocabulary: Vocabulary, whole: list[Tensor]) -> list[Tensor]:
    logprobs, entropies, hidden, weight = whole
    hidden = hidden.chunk(tp)[rank] if vocabulary.sequence_parallel else hidden
    return [logprobs, entropies, hidden, weight.chunk(tp)[rank]]
