"""Memory of tiny models, built as the trainer builds them: ranks write what they measure, test_memory.py compares."""

import itertools
import json
import os
from functools import cache
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from areal_megatron.config import Config, DataConfig, ModelConfig, TrainerConfig
from areal_megatron.trainer.batch import RowPart, pack
from areal_megatron.trainer.model import PolicyModel, ValueModel, build_model, parallel_sizes
from areal_megatron.trainer.optimizer import ModelOptimizer

TOKENS = 512
CPU = torch.device("cpu")


def measure(
    folder: Path, tp: int, dtype: str, recompute: str, layers: int = 0, megatron: dict[str, Any] = MappingProxyType({})
) -> dict[str, int]:
    """Returns the bytes of buffers, optimizer states and tensors saved in a forward pass."""
    trainer = TrainerConfig(tp=tp, recompute=recompute, recompute_layers=layers, microbatch_tokens=TOKENS)
    trainer.megatron = dict(megatron)
    chunk, parts = allocated(config_of(folder, dtype, trainer), PolicyModel)
    for parameter in chunk.parameters():
        torch.nn.init.normal_(parameter.data, std=0.02)
    return parts | {"critic": of_critic(folder, tp, dtype), "saved": saved(chunk)}


@cache
def of_critic(folder: Path, tp: int, dtype: str) -> int:
    """Returns the bytes of a critic's buffers and optimizer states, which no recomputation changes."""
    _, parts = allocated(config_of(folder, dtype, TrainerConfig(tp=tp, microbatch_tokens=TOKENS)), ValueModel)
    return sum(parts.values())


def config_of(folder: Path, dtype: str, trainer: TrainerConfig) -> Config:
    return Config(
        name="t", updates=1, mode="sft", model=ModelConfig(str(folder), dtype), data=DataConfig(""), trainer=trainer
    )


def allocated(config: Config, kind: type) -> tuple[torch.nn.Module, dict[str, int]]:
    """Returns a model of that kind, and the bytes of its buffers and optimizer states."""
    chunks = build_model(config, parallel_sizes(config, CPU), CPU, kind)
    buffers = [*chunks[0].buffers, *chunks[0].expert_parallel_buffers]
    optimizer = ModelOptimizer(config.optimizer, chunks, 1)
    optimizer._allocate()
    moments = [s[name] for s in optimizer._moments() for name in ("exp_avg", "exp_avg_sq")]
    reduced = config.model.dtype != "float32"
    main = [p for group in optimizer.megatron.param_groups for p in group["params"]] if reduced else []
    return chunks[0], {
        "parameters": sum(buffer.param_data.nbytes for buffer in buffers),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": sum(tensor.nbytes for tensor in [*moments, *main]),
    }


def saved(model: torch.nn.Module) -> int:
    """Returns the bytes that the forward pass of one long sequence keeps for the backward pass, without parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = tensor  # alive, so that its address is not used again
        return tensor

    microbatch = pack([np.arange(TOKENS, dtype=np.int32) % 50], [np.zeros(0, dtype=np.int64)], RowPart(CPU))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(microbatch.tokens, None, None, packed_seq_params=microbatch.packed)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def alive(model: torch.nn.Module, part: RowPart) -> int:
    """Returns the bytes of what a forward pass over one long sequence has made and is still there after it."""
    made = []

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            made.extend((StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes()) for x in tensors)
            return result

    parameters = {StorageWeakRef(parameter.untyped_storage()).cdata for parameter in model.parameters()}
    microbatch = pack([np.arange(TOKENS, dtype=np.int32) % 50], [np.zeros(0, dtype=np.int64)], part)
    with Recording():
        output = model(microbatch.tokens, None, None, packed_seq_params=microbatch.packed)
    held = {storage.cdata: size for storage, size in made if not storage.expired()}
    assert output.requires_grad
    return sum(size for storage, size in held.items() if storage not in parameters)


def write_alive(folder: Path, rank: int, models: str, cp: int) -> None:
    """Writes rank-N.json into `folder`: model, recompute → the bytes of activations on this context-parallel rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), cp), rank=rank, world_size=cp)
    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    model_parallel_cuda_manual_seed(1)
    found = {}
    for model, recompute in itertools.product(sorted(Path(models).iterdir()), ("none", "full")):
        trainer = TrainerConfig(cp=cp, recompute=recompute, microbatch_tokens=TOKENS)
        torch.manual_seed(0)
        chunk, _ = allocated(config_of(model, "float32", trainer), PolicyModel)
        for parameter in chunk.parameters():
            torch.nn.init.normal_(parameter.data, std=0.02)
        found[f"{model.name} {recompute}"] = alive(chunk, RowPart.of(chunk.config, CPU))
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


def warm_up(pp: int, vpp: int, stage: int, microbatches: int) -> int:
    """Returns the number of forward passes before Megatron's schedule alternates forward and backward passes."""
    group = SimpleNamespace(size=lambda: pp, rank=lambda: stage)
    pipeline = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None)
    return get_pp_rank_microbatches(microbatches, vpp, pp, p2p_communicator=pipeline)[2]


def write_measured(folder: Path, rank: int, models: str, tp: int) -> None:
    """Writes measured.json into `folder`; `models` is a folder of models."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), tp), rank=rank, world_size=tp)
    parallel_state.initialize_model_parallel(tp, expert_tensor_parallel_size=tp)
    model_parallel_cuda_manual_seed(1)
    recomputed = [("none", 0), ("elementwise", 0), ("elementwise", 1), ("mlp", 0), ("mlp", 3), ("full", 0), ("full", 2)]
    dtypes = ("bfloat16", "float16", "float32")[: 5 - 2 * tp]
    cases = [
        (model, tp, dtype, *what)
        for model, dtype, what in itertools.product(sorted(Path(models).iterdir()), dtypes, recomputed)
        if dtype == "bfloat16" or not what[1]
    ]
    for model in sorted(Path(models).iterdir()):
        feed_forward = "moe" if "moe" in model.name else "mlp"
        for modules in (None, ["core_attn"], ["layernorm"], [feed_forward], ["core_attn", "layernorm", feed_forward]):
            fields = {"recompute_granularity": "selective"} | ({"recompute_modules": modules} if modules else {})
            cases.append((model, tp, "bfloat16", "none", 0, fields))
    schedules = [
        (pp, vpp, stage, count * pp)
        for pp in (2, 3, 4)
        for vpp in (1, 2, 3)
        for stage in range(pp)
        for count in (1, 2, 8)
    ]
    measured = {
        "models": [[model.name, *case, measure(model, *case)] for model, *case in cases],
        "warm_up": [[*schedule, warm_up(*schedule)] for schedule in schedules],
    }
    if rank == 0:
        (folder / "measured.json").write_text(json.dumps(measured))
