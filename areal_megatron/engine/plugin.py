"""vLLM's general plugin: registers the weight transfer backends "areal", "areal-streamed" and "areal-changes" in every
process of an engine, and makes all the replacements in vLLM 0.32.0 that engines need, each with the reason.

Every vLLM process of an environment with this package loads it, so it imports nothing heavy at module level.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

from areal_megatron.engine.environment import CPUS
from areal_megatron.process.patching import patch

TAKE_PREFILLED_AGAIN = "take_prefilled_again"
"""The method of EngineCore that returns how many tokens it has prefilled again since the last call."""


@cache  # vLLM calls entry points more than once in a process
def register() -> None:
    """Entry point `vllm.general_plugins` of setup.py."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from areal_megatron.models.adapter import VARIABLE

    receivers = {"areal": "Receiver", "areal-streamed": "StreamedReceiver", "areal-changes": "ChangesReceiver"}
    for name, receiver in receivers.items():
        WeightTransferEngineFactory.register_engine(name, "areal_megatron.reshard.receive", receiver)
    if VARIABLE in os.environ:
        _keep_adapters()
    _cut_projections_of_nets_once()
    _leave_images_out()
    _count_tokens_prefilled_again()
    if current_platform.is_cpu():
        _read_texts_without_torchvision()
        _keep_linear_weights()
        _leave_experts_alone()
        _rotate_all_heads()
        _use_fused_norms()
        _apply_adapters_by_run()
        _expand_settings_of_requests()
        _inspect_models_here()
        _fork_processes()
        _compute_on_own_cores()


def _keep_adapters() -> None:
    """Makes the policy's adapter one without files, which begins as zeros and is filled by the Receiver.

    vLLM forgets all adapters after each update, which it takes for one of the model's own weights: not here.
    """
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    from areal_megatron.engine.adapters import IN_MEMORY

    def load(self: WorkerLoRAManager, request: LoRARequest) -> Any:
        if request.lora_path != IN_MEMORY:
            return load_file(self, request)
        return self._adapter_manager.create_dummy_lora(request.lora_int_id, 1, self.embedding_modules)

    load_file = patch(WorkerLoRAManager, "_load_adapter", load)
    patch(LoRAModelRunnerMixin, "reset_lora_state", lambda self: None)


def _cut_projections_of_nets_once() -> None:
    """Gives a tensor-parallel rank the rows of B that its part of a projection into a gated delta net has.

    Such a projection of Qwen3-Next is one tensor, and the ranks divide its rows in their order. vLLM divides the
    rows of B as if it were two tensors, one below the other.
    """
    from torch import Tensor
    from vllm.lora.layers.column_parallel_linear import ColumnParallelLinearWithLoRA

    def own_rows(self: Any, lora_b: Tensor) -> Tensor:
        if self.is_merged_col_linear and len(self.base_layer.output_sizes) == 1:
            return lora_b[self.tp_rank * self.output_size : (self.tp_rank + 1) * self.output_size]
        return cut(self, lora_b)

    cut = patch(ColumnParallelLinearWithLoRA, "slice_lora_b", own_rows)


def _leave_images_out() -> None:
    """Makes language models load from folders of models that also take images, without the tensors of that part."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from areal_megatron.models.names import TOWER

    def of_model(self: DefaultModelLoader, config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        leaves_out = not hasattr(model, "visual")
        return (pair for pair in load(self, config, model) if not (leaves_out and pair[0].startswith(TOWER)))

    load = patch(DefaultModelLoader, "get_all_weights", of_model)


def _count_tokens_prefilled_again() -> None:
    """Gives EngineCore a count of the tokens that it has computed again since an update dropped their keys and values:
    vLLM counts each prompt once, and nothing that it computes a second time."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

    dropped: dict[str, int] = {}
    count = 0

    def reset(self: Scheduler, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        for ended in dropped.keys() - self.requests.keys():
            del dropped[ended]
        if reset_running_requests:
            dropped.update((request.request_id, request.num_computed_tokens) for request in self.running)
        return reset_cache(self, reset_running_requests, reset_connector)

    def begin(self: KVCacheManager, request: Request, num_hits: int) -> None:
        nonlocal count
        # What is dropped again before it begins is computed once; what is dropped while it is computed again counts
        # whole here, and at its next beginning what had been computed of it.
        count += max(dropped.pop(request.request_id, 0) - num_hits, 0)
        record(self, request, num_hits)

    def take(_: EngineCore) -> int:
        nonlocal count
        taken, count = count, 0
        return taken

    reset_cache = patch(Scheduler, "reset_prefix_cache", reset)
    record = patch(KVCacheManager, "record_prefix_cache_stats", begin)
    setattr(EngineCore, TAKE_PREFILLED_AGAIN, take)


def _leave_experts_alone() -> None:
    """Makes experts on CPU compute as without adapters, which are on other layers alone.

    vLLM has Triton's kernels for the experts of every model with adapters, and these do not exist on CPU.
    """
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    def without_adapters(self: FusedMoEConfig) -> None:
        self.is_lora_enabled = False
        complete(self)

    complete = patch(FusedMoEConfig, "__post_init__", without_adapters)


def _read_texts_without_torchvision() -> None:
    """Makes vLLM import models that also take images where there is no torchvision, as where torch is for CPUs: the
    package index has none for such a torch.

    transformers has the sizes of images beside what resizes them, and vLLM imports both before it knows whether a model
    is to take any. What is imported here has no function, so that an image fails with its name.
    """
    if importlib.util.find_spec("torchvision") is None:
        transforms = ModuleType("torchvision.transforms.v2")
        vars(transforms)["functional"] = ModuleType(f"{transforms.__name__}.functional")
        sys.modules.setdefault(transforms.__name__, transforms)


def _keep_linear_weights() -> None:
    """Makes CPU linear layers compute from `weight` itself.

    vLLM would move it into a packed copy and leave an empty parameter, into which nothing can be received. Weights
    other than matrices, such as a convolution's, keep the form that their kernels require.
    """
    import torch
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim != 2:
            prepare(layer, remove_weight)
        else:
            layer.cpu_linear = torch.nn.functional.linear

    prepare = patch(utils, "dispatch_cpu_unquantized_gemm", plain)


def _rotate_all_heads() -> None:
    """Makes rotary embeddings on CPU turn all heads of queries and keys [tokens, heads, head_dim].

    vLLM's kernel turns the first head alone, without an error; it turns all of [tokens, heads × head_dim].
    """
    from torch import Tensor
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    def forward_cpu(
        self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        has_heads = query.dim() == 3 or (key is not None and key.dim() == 3)
        return (self.forward_native if has_heads else rotate.__get__(self))(positions, query, key)

    rotate = patch(RotaryEmbedding, "forward_cpu", forward_cpu)


def _use_fused_norms() -> None:
    """Makes RMSNorm on CPU one call of vLLM's own kernel, as on GPUs.

    On CPU vLLM takes several operations of torch instead, counting on torch.compile to join them, which we do without.
    SwiGLU stays as it is: vLLM's kernel for CPUs takes three times as long as torch's two operations.
    """
    import torch
    from torch import Tensor
    from vllm import _custom_ops, ir
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.platforms import current_platform

    current_platform.import_kernels()

    def fits(x: Tensor, weight: Tensor | None, size: int | None) -> bool:
        return size is None and weight is not None and weight.dtype == x.dtype

    def rms_norm_fits(x, weight, epsilon, variance_size=None) -> bool:
        return fits(x, weight, variance_size)

    @ir.ops.rms_norm.register_impl("areal", supports_args=rms_norm_fits)
    def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
        x = x.contiguous()
        _custom_ops.rms_norm(out := torch.empty_like(x), x, weight, epsilon)
        return out

    def fused_fits(x, x_residual, weight, epsilon, variance_size=None) -> bool:
        return fits(x, weight, variance_size) and x.is_contiguous() and x_residual.is_contiguous()

    @ir.ops.fused_add_rms_norm.register_impl("areal", supports_args=fused_fits, inplace=True)
    def fused_add_rms_norm(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        _custom_ops.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual

    def priority(_platform: type, _config: Any) -> IrOpPriorityConfig:
        own = ["areal", "native"]
        return IrOpPriorityConfig.with_default(["native"], rms_norm=own, fused_add_rms_norm=own)

    patch(type(current_platform), "get_default_ir_op_priority", classmethod(priority))


def _apply_adapters_by_run() -> None:
    """Makes adapters on CPU one product for each run of tokens with the same adapter.

    vLLM copies the factors for every token, which takes twice as long as the rest of a small model. Where no
    adapter is to be applied, it takes the last one.
    """
    import torch.nn.functional as F
    from torch import Tensor
    from vllm.lora.punica_wrapper import punica_cpu

    def runs(lengths: Tensor, adapters: Tensor) -> Iterator[tuple[slice, int]]:
        end = 0
        for length, adapter in zip(lengths.tolist(), adapters.tolist(), strict=True):
            end += length
            if adapter >= 0:
                yield slice(end - length, end), adapter

    def shrink(x: Tensor, factors: Tensor, out: Tensor, _: Any, lengths: Tensor, adapters: Tensor, *rest: Any) -> None:
        *_, scale = rest
        for run, adapter in runs(lengths, adapters):
            factor = factors[adapter].flatten(0, -2).to(out.dtype)
            out[run, : len(factor)] = F.linear(x[run].to(out.dtype), factor) * scale

    def expand(x: Tensor, factors: Tensor, out: Tensor, _: Any, lengths: Tensor, adapters: Tensor, *rest: Any) -> None:
        *_, first, size, adds = rest
        for run, adapter in runs(lengths, adapters):
            found = F.linear(x[run].to(out.dtype), factors[adapter].flatten(0, -2).to(out.dtype))
            part = out[run, first : first + size]
            part.copy_(part + found if adds else found)

    patch(punica_cpu, "sgmv_shrink", shrink)
    patch(punica_cpu, "sgmv_expand_slice", expand)


def _expand_settings_of_requests() -> None:
    """Makes speculative decoding on CPU divide the logits of drafted tokens by the temperature of their request.

    vLLM (cpu_triton_utils.py) writes the temperatures of tokens, their top_p and top_k into a copy, and takes
    for them what happens to be in the memory that it should have written.
    """
    import torch
    from torch import Tensor
    from vllm.utils import cpu_triton_utils

    def expand(
        output: Tensor, of_requests: Tensor, ends: Tensor, replaced: int, by: int, MAX_NUM_TOKENS: int = 0
    ) -> None:
        counts = ends.long().diff(prepend=ends.new_zeros(1))
        output.copy_(torch.where(of_requests == replaced, by, of_requests).repeat_interleave(counts))

    patch(cpu_triton_utils, "_expand_kernel_impl", expand)  # not registered yet


def _inspect_models_here() -> None:
    """Makes CPU engines look at the class of their model in the server, which needs it anyway.

    vLLM starts a process for it, in which importing vLLM takes 10 s, so that the server does not initialize CUDA.
    """
    from vllm.model_executor.models import registry

    patch(registry, "_run_in_subprocess", lambda inspect: inspect())


def _fork_processes() -> None:
    """Makes CPU engines fork EngineCore from the server, which has imported vLLM already and so starts 10 s faster.

    vLLM spawns it, so that no child inherits threads of OpenMP; but before the fork the server computes nothing.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)

    def check_and_fork(_platform: type, config: Any) -> None:
        check(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    check = patch(platform, "check_and_update_config", classmethod(check_and_fork))


def _compute_on_own_cores() -> None:
    """Keeps EngineCore on the cores that the launcher gave its engine.

    The server that it is forked from runs on any core: where trainers wait, it answers on theirs.
    """
    from vllm.v1.engine.core import EngineCoreProc

    def on_own_cores(*args: Any, **options: Any) -> None:
        if cores := os.environ.get(CPUS):
            os.sched_setaffinity(0, map(int, cores.split(",")))
        run(*args, **options)

    run = patch(EngineCoreProc, "run_engine_core", staticmethod(on_own_cores))
