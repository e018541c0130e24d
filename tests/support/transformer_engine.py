"""Stands in for TransformerEngine's layers, whose kernels need a GPU: modules with the parameters, names and empty
entries of checkpoints that TransformerEngine's have, and megatron-core's own specification of a layer over them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel import ColumnParallelLinear

from areal_megatron.trainer import layers, reference, trainer
from areal_megatron.trainer.layers import RMSNorm


class Norm(RMSNorm):
    """TENorm, which has an entry of its own in checkpoints."""

    def get_extra_state(self):
        return torch.empty(0)

    def set_extra_state(self, state):
        pass


class NormAndLinear(ColumnParallelLinear):
    """TELayerNormColumnParallelLinear."""

    def __init__(self, input_size, output_size, *, config, **options):
        super().__init__(input_size, output_size, config=config, **options)
        self._eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel

    def forward(self, x, *arguments, **options):
        normed = F.rms_norm(x, self.layer_norm_weight.shape, self.layer_norm_weight, self._eps)
        return super().forward(normed, *arguments, **options)


class Modules(LocalSpecProvider):
    """TESpecProvider, but for experts, which are a sequence of the same linear layers."""

    def fuse_layernorm_and_linear(self):
        return True

    def column_parallel_layer_norm_linear(self):
        return NormAndLinear

    def linear(self):
        return Linear

    def layer_norm(self, rms_norm=False, for_qk=False):
        return Norm


@contextmanager
def transformer_engine():
    """Trainers that are made here have its layers."""

    def sizes(*arguments):
        return replace(plain(*arguments), fused_layernorm=True)

    plain = trainer.parallel_sizes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt_layer_specs, "TESpecProvider", Modules, raising=False)
        patch.setattr(layers, "TENorm", Norm)
        for module in (trainer, reference):
            patch.setattr(module, "parallel_sizes", sizes)
        yield
