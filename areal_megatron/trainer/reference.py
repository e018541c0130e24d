"""The frozen model that ppo.penalty keeps the policy near: the one that the run began with, or a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from areal_megatron.checkpoint import hf
from areal_megatron.config import Config
from areal_megatron.model_check import reference_config
from areal_megatron.models.architecture import read_config
from areal_megatron.reshard.trainer_layout import layout
from areal_megatron.trainer import pipeline
from areal_megatron.trainer.adapter import adapters_of, switched_off
from areal_megatron.trainer.batch import MicroBatch
from areal_megatron.trainer.logprobs import Vocabulary
from areal_megatron.trainer.model import build_model, parallel_sizes, policy_of, tensors
from areal_megatron.trainer.objective import trained_logprobs
from areal_megatron.trainer.parallel import Parallel


class Reference:
    """A model on the policy's ranks, in the policy's layout, that only computes log-probabilities.

    `vocabulary` is the policy's. A teacher may be of any size; it has experts of its own, which no engine chooses. Of a
    policy with adapters it is the same model without them, and no copy.
    """

    def __init__(self, config: Config, parallel: Parallel, vocabulary: Vocabulary, policy: pipeline.Chunks):
        """`policy`: the policy as it is in model.path."""
        own = reference_config(config)
        described, sizes = read_config(own.model.path), parallel_sizes(own, parallel.device)
        teacher = bool(config.ppo.penalty.kl_folder)
        self._chunks = policy
        if teacher or not config.has_adapters:
            self._chunks = build_model(own, sizes, parallel.device, replays_routes=not teacher, frozen=True)
        if teacher:
            hf.load(tensors(self._chunks), layout(described, sizes, parallel.rank), own.model.path)
        elif self._chunks is not policy:
            begun = tensors(policy)
            for name, values in tensors(self._chunks).items():
                values.copy_(begun[name])
        self._adapters = adapters_of(self._chunks)
        self._vocabulary = replace(vocabulary, size=described["vocab_size"])

    def logprobs(self, microbatches: Sequence[MicroBatch]) -> list[Tensor]:
        """Returns the log-probability of each micro-batch's trained tokens, float32 [N] each, by the distribution at
        the temperature of the rollouts; [] on other stages than the last."""
        with switched_off(self._adapters):
            work = [(each, partial(self._found, microbatch=each)) for each in microbatches]
            return pipeline.forward(self._chunks, work)

    def _found(self, hidden: Tensor, microbatch: MicroBatch) -> Tensor:
        return trained_logprobs(policy_of(self._chunks), self._vocabulary, hidden, microbatch)[0]
