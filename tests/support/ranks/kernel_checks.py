"""Checks of training with the kernels that have a form for CPUs, which otherwise only GPUs use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import mlp

from areal_megatron.config import Config, DataConfig, ModelConfig
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.trainer import experts, hardware, patches
from areal_megatron.trainer.model import build_model, named_parameters, parallel_sizes
from tests.support.ranks import adapter_checks
from tests.support.ranks.memory_checks import TOKENS, measure
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

    plain_stack, add = experts.stacked, patches._Products.wgrad_gemm_accum_fp32
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            hardware, "kernels", lambda *_: {name: "" if name in names else "off" for name in hardware.KERNELS}
        )
        patch.setattr(experts, "stacked", stack)
        patch.setattr(F, "grouped_mm", counted("experts", F.grouped_mm))
        patch.setattr(patches._Products, "wgrad_gemm_accum_fp32", staticmethod(counted("gradients", add)))
        if "swiglu" in names:  # instead of trainer/elementwise.py's
            patch.setattr(mlp, "bias_swiglu_impl", counted("swiglu", bias_swiglu_impl))
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


def check_adapters(folder: Path, rank: int, cases: dict[str, list]) -> None:
    """Adapters of experts that one product multiplies, see adapter_checks.py."""
    with only(["experts"]) as calls:
        adapter_checks.check_layouts(folder, rank, cases)
    assert calls["experts"] and calls["view"]


def join(folder: Path) -> None:
    """Makes this process a world of its own."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, expert_tensor_parallel_size=1)
    model_parallel_cuda_manual_seed(1)


def check_saved(folder: Path, rank: int, models: list[str]) -> None:
    """Fused SwiGLU keeps three tensors of chosen experts' width less for the backward pass; of a dense MLP it keeps as
    much as trainer/elementwise.py. Where it is recomputed no kernel makes a difference."""
    join(folder)
    for name in models:
        saved = {}
        for names in ([], ["swiglu"], ["swiglu", "experts"]):
            with only(names):
                saved[len(names)] = measure(folder / name, 1, "bfloat16", "none")["saved"]
                again = [measure(folder / name, 1, "bfloat16", what)["saved"] for what in ("elementwise", "mlp")]
            assert again == saved.setdefault("again", again), (name, names)
        hf = read_config(folder / name)
        d = architecture(hf).dimensions
        width = 3 * hf["num_experts_per_tok"] * d.expert_ffn if d.experts else 0
        assert saved[0] - saved[1] == TOKENS * d.layers * 2 * width, (name, saved)
        assert saved[2] == saved[1], (name, saved)


def check_names(folder: Path, rank: int, model: str) -> None:
    """Experts that are multiplied together have the parameters of Megatron's, and the same entries in checkpoints."""
    join(folder)
    config = Config(name="t", updates=1, model=ModelConfig(str(folder / model), "float32"), data=DataConfig(""))
    device, found = torch.device("cpu"), []
    for names in ([], ["experts"]):
        with only(names):
            chunks = build_model(config, parallel_sizes(config, device), device)
        parameters = dict(named_parameters(chunks))
        for number, name in enumerate(sorted(parameters)):
            parameters[name].data.fill_(number)
        assert chunks[0].module.decoder.layers[0].mlp.experts.grouped == bool(names)
        entries = chunks[0].module.sharded_state_dict()
        apply_factories(entries)
        tensors = [tensor for tensor in nested_values(entries) if isinstance(tensor, ShardedTensor)]
        at = {
            (tensor.key, tensor.global_offset): (tensor.global_shape, float(tensor.data.mean())) for tensor in tensors
        }
        assert len(at) == len(tensors)
        found.append(({name: parameter.shape for name, parameter in parameters.items()}, at))
    assert found[0] == found[1]
    assert sum("experts" in key for key, _ in found[0][1]) == 4 * 4 * 3  # layers, experts, gate and up and down
