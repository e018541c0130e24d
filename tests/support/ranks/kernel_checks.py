"""Checks of training with the kernels that have a form for CPUs, which otherwise only GPUs use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.nn.functional as F
from megatron.core.transformer import mlp

from areal_megatron.trainer import experts, gradients, hardware
from tests.support.ranks.trainer_checks import check_layouts, check_overlap

CHECKS = {"layouts": check_layouts, "overlap": check_overlap}


@contextmanager
def only(names: list[str]) -> Iterator[Counter]:
    """Trainers that are made here use these kernels and no others. Yields how often each was called, and how often the
    weights of experts were seen as one tensor (`view`) or copied to one (`copy`)."""
    calls = Counter()

    def counted(name, function):
        def call(*arguments, **options):
            calls[name] += 1
            return function(*arguments, **options)

        return call

    def stack(weights):
        found = plain_stack(weights)
        calls["view" if found.data_ptr() == weights[0].data_ptr() else "copy"] += 1
        return found

    plain_stack, add = experts.stacked, gradients._Products.wgrad_gemm_accum_fp32
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            hardware, "kernels", lambda *_: {name: "" if name in names else "off" for name in hardware.KERNELS}
        )
        patch.setattr(experts, "stacked", stack)
        patch.setattr(F, "grouped_mm", counted("experts", F.grouped_mm))
        patch.setattr(gradients._Products, "wgrad_gemm_accum_fp32", staticmethod(counted("gradients", add)))
        patch.setattr(mlp, "bias_swiglu_impl", counted("swiglu", mlp.bias_swiglu_impl))
        for module in (mlp, experts):
            patch.setattr(module, "weighted_bias_swiglu_impl", counted("swiglu", module.weighted_bias_swiglu_impl))
        yield calls


def check_kernels(folder: Path, rank: int, of: str, names: list[str], cases: dict[str, list]) -> None:
    """A check of trainer_checks.py, with these kernels."""
    with only(names) as calls:
        CHECKS[of](folder, rank, cases)
    assert set(calls) - {"view", "copy"} == set(names), calls
    if "experts" in names:
        # the reference has its weights apart, and the end of a bucket may lie between experts
        assert 0 < calls["copy"] < calls["view"] or of == "overlap", calls
