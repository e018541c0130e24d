"""Comparison of what trainer ranks hold together with a Hugging Face model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from areal_megatron.config import Config
from areal_megatron.models.architecture import architecture
from areal_megatron.reshard.trainer_layout import is_head, layout, without_head
from areal_megatron.trainer.batch import MicroBatch
from areal_megatron.trainer.learner import Learner
from areal_megatron.trainer.model import named_parameters
from areal_megatron.trainer.parallel import parallel_state
from areal_megatron.trainer.trainer import Trainer
from tests.support.tiny_models import canonical

BIAS = "e_score_correction_bias"


def gather_vocabulary(logits: Tensor, size: int) -> Tensor:
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=-1)[..., :size]


def gather_sequence(hidden: Tensor, config: Config) -> Tensor:
    if config.trainer.tp == 1:
        return hidden
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(hidden) for _ in range(group.size())]
    dist.all_gather(parts, hidden.contiguous(), group=group)
    return torch.cat(parts)


def gather_row(values: Tensor, microbatch: MicroBatch) -> Tensor:
    """Returns the values of all tokens of the micro-batch's row, from those of each context-parallel rank's tokens."""
    view = microbatch.packed.view
    own, whole = torch.from_numpy(view.tokens), values.new_zeros(len(view.place), *values.shape[1:])
    whole[own[own >= 0]] = values[own >= 0]
    dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    return whole


def whole_gradients(learner: Learner) -> dict[str, Tensor]:
    """Returns the gradients of this rank's parameters that are trained, from the shards of all ranks that hold the
    same."""
    groups = {
        "buffers": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "expert_parallel_buffers": parallel_state.get_expert_data_parallel_group(),
    }
    for kind, group in groups.items():
        for bucket in (
            bucket for chunk in learner.chunks for buffer in getattr(chunk, kind) for bucket in buffer.buckets
        ):
            own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=group)
    trained = ((name, each) for name, each in named_parameters(learner.chunks) if each.requires_grad)
    return {name: parameter.main_grad for name, parameter in trained}


def pieces(
    trainer: Trainer, held: dict[str, Tensor], expected: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields (name, ours, theirs) for each part of a canonical tensor that this rank holds.

    The tensors of a critic include its head.
    """
    whole = layout(trainer.hf_config, trainer.sizes, trainer.parallel.rank)
    if "head.weight" in expected:
        whole = without_head(whole)
        yield from (("head.weight", held[name].float(), expected["head.weight"]) for name in held if is_head(name))
    for piece in whole.pieces:
        if piece.tensor.endswith(BIAS) and not any(name.endswith(BIAS) for name in expected):
            continue  # the bias of a router has no gradient
        for name, region, view in piece.tensors(held):
            yield name, view.float(), expected[name][region]


def rounding(trainer: Trainer) -> int:
    """Returns how many times further float32 rounds than in other models: the norm inside a gated delta net divides by
    numbers near 0, and in float32 the gradients of transformers itself are off by 2e-6."""
    return 3 if architecture(trainer.hf_config).dimensions.linear else 1


def assert_parameters(trainer: Trainer, expected: Mapping[str, Tensor], atol: float, learner: str = "policy") -> None:
    """Compares with `expected`, whose names are those of a Hugging Face model in memory."""
    for name, ours, theirs in pieces(trainer, trainer.learners[learner].parameters(), canonical(expected)):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def assert_gradient(trainer: Trainer, gradients: Mapping[str, Tensor], learner: str = "policy") -> None:
    """Every part is within 1e-6 of the norm of the whole gradient, which is also the norm for clipping; within more
    where `rounding` says so."""
    subject, most = trainer.learners[learner], 1e-6 * rounding(trainer)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    assert (error := abs(subject.optimizer.gradient_norm() / norm - 1)) < 1e-5, f"the norm is off by {error:.1e}"
    for name, ours, theirs in pieces(trainer, whole_gradients(subject), canonical(gradients)):
        assert (error := float((ours - theirs).norm() / norm)) < most, f"{name} is off by {error:.1e} of the norm"
