"""All that trainers replace in libraries, and why: in megatron-core 0.16.1 and torch 2.13.0.

`apply` runs when the package of the trainer is imported, before any model is built. What takes the place of larger
parts is in files of its own: cpu.py, elementwise.py, host_optimizer.py and objects.py.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import distributed_c10d

from areal_megatron.process.imports import absent
from areal_megatron.process.patching import patch
from areal_megatron.trainer import elementwise
from areal_megatron.trainer.cpu import TorchOnCpu
from areal_megatron.trainer.objects import signing

MODULES = (
    "megatron.core.dist_checkpointing.serialization",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel",
    "megatron.core.ssm.gated_delta_net",
    "megatron.core.tensor_parallel",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.transformer.multi_latent_attention",
)
"""The modules that the trainer imports. The modules that these import are adapted too."""


def apply() -> None:
    """Imports megatron-core and replaces parts of it. Must run before anything else imports it. Raises RuntimeError if
    a library lacks one of the names."""
    on_cpu = not torch.cuda.is_available()
    _import_megatron(on_cpu)
    if on_cpu:
        _do_without_cuda()
        _use_cpu_generator()
        _exchange_uneven_parts()
        _use_own_swiglu()
    _use_own_rotation()
    _do_without_optional_libraries()
    _keep_optimizers_on_host()
    _do_not_wait_for_experts()
    _load_all_but_steps()
    # It would advise CUDA_DEVICE_MAX_CONNECTIONS=1, which run/gpu_settings.py refuses.
    layers = sys.modules["megatron.core.tensor_parallel.layers"]
    patch(layers.linear_with_grad_accumulation_and_async_allreduce, "warned", True)


def _import_megatron(on_cpu: bool) -> None:
    """Imports MODULES, without warnings and without compiling for a CPU."""
    # These warnings are about parts that are not required (TransformerEngine, apex), megatron-core's own defaults, and
    # collectives that torch 2.13 has begun to rename: a user could do nothing about them.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.c10d_logger")
    # Megatron's inference imports wandb where it is installed, for a third of a second; ranks send nothing to trackers.
    # Fused functions are compiled where they are defined. On a CPU that needs a C++ compiler, takes seconds at import,
    # and gains nothing.
    with absent("wandb"), _replaced(torch, "compile", _as_it_is) if on_cpu else contextlib.nullcontext():
        for name in MODULES:
            importlib.import_module(name)


def _do_without_cuda() -> None:
    """Binds the name `torch` inside megatron-core's own modules, and nowhere else in the process, to a stand-in: they
    name CUDA in places that no setting reaches."""
    stand_in = TorchOnCpu()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            patch(module, "torch", stand_in)


def _use_cpu_generator() -> None:
    """Makes activation recomputation save and restore the CPU's random generator, which is the device's here."""
    random = sys.modules["megatron.core.tensor_parallel.random"]
    patch(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    patch(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
    logging.getLogger(random.__name__).setLevel(logging.ERROR)  # it warns about the CPU's generator


def _exchange_uneven_parts() -> None:
    """Lets ranks send each expert as many tokens as chose it.

    gloo gathers and scatters equal parts only. An all-to-all takes the sizes of its parts as numbers, and
    megatron-core converts only CUDA tensors to these.
    """
    dispatcher = sys.modules["megatron.core.transformer.moe.token_dispatcher"]
    mappings = sys.modules["megatron.core.tensor_parallel.mappings"]

    def move(tensor, as_numpy=False, **_):
        if not torch.is_tensor(tensor):
            return tensor
        tensor = tensor.to("cpu", non_blocking=True)
        return tensor.numpy() if as_numpy else tensor

    def gather_parts(part, group, sizes=None, use_global_buffer=False):
        if sizes is None or group.size() == 1:
            return gather(part, group, sizes, use_global_buffer)
        longest = max(1, *sizes)
        padding = [0, 0] * (part.dim() - 1) + [0, longest - len(part)]
        parts = gather(F.pad(part, padding), group).split(longest)
        return torch.cat([rows[:size] for rows, size in zip(parts, sizes, strict=True)])

    def reduce_scatter_parts(whole, group, sizes=None, use_global_buffer=False):
        if sizes is None or group.size() == 1:
            return reduce_scatter(whole, group, sizes, use_global_buffer)
        whole = whole.clone()
        torch.distributed.all_reduce(whole, group=group)
        return whole.split(sizes)[group.rank()].clone()

    patch(dispatcher, "maybe_move_tensor_to_cpu", move)
    gather = patch(mappings, "_gather_along_first_dim", gather_parts)
    reduce_scatter = patch(mappings, "_reduce_scatter_along_first_dim", reduce_scatter_parts)


def _use_own_swiglu() -> None:
    """Makes layers compute SwiGLU by elementwise.py where bias_activation_fusion is on."""
    patch(sys.modules["megatron.core.transformer.mlp"], "bias_swiglu_impl", elementwise.swiglu)


def _use_own_rotation() -> None:
    """Makes attention rotate by elementwise.py. Megatron's takes about ten kernels without TransformerEngine."""

    def rotate(x: Tensor, angles: Tensor, config: Any, cu_seqlens: Tensor | None = None, mscale: float = 1.0, **others):
        if cu_seqlens is None and mscale == 1.0 and not config.rotary_interleaved:
            return elementwise.rotated(x, angles, getattr(config, elementwise.ROTATION))
        return original(x, angles, config, cu_seqlens=cu_seqlens, mscale=mscale, **others)

    attention = sys.modules["megatron.core.transformer.attention"]
    original = patch(attention, "apply_rotary_pos_emb", rotate)


def _do_without_optional_libraries() -> None:
    """Makes layers and the clipping of gradients work without TransformerEngine, apex and fla."""
    routing = sys.modules["megatron.core.transformer.moe.moe_utils"]
    vars(routing).setdefault("te_general_gemm", None)  # its callers check for None without TransformerEngine
    # Latent attention believes that TransformerEngine is there, and looks for its classes.
    engine = sys.modules["megatron.core.extensions.transformer_engine"]
    patch(sys.modules["megatron.core.transformer.multi_latent_attention"], "HAVE_TE", engine.HAVE_TE)
    # Gated delta nets believe that they need a library for GPUs; trainer/delta_net.py computes without it, too.
    patch(sys.modules["megatron.core.ssm.gated_delta_net"], "HAVE_FLA", True)
    # Its default fp8=False is not None, which it treats as a request for FP8, and that needs TransformerEngine.
    recomputation = sys.modules["megatron.core.tensor_parallel.random"].CheckpointWithoutOutput
    patch(recomputation.__init__, "__defaults__", (None,))
    clip_grads, utils = (sys.modules[f"megatron.core.{name}"] for name in ("optimizer.clip_grads", "utils"))
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        # Without TransformerEngine and apex, Megatron takes the norm of each tensor to the host.
        patch(clip_grads, "l2_norm_impl", _norm)


def _keep_optimizers_on_host() -> None:
    """Puts our optimizer on the host in the place of Megatron's, which copies parameters one by one."""
    from areal_megatron.trainer.host_optimizer import HostOptimizer

    for of in ("megatron.core.optimizer", "megatron.core.optimizer.distrib_optimizer"):
        patch(sys.modules[of], "HybridDeviceOptimizer", HostOptimizer)


def _do_not_wait_for_experts() -> None:
    """Puts tokens into the order of their experts without waiting for the device, as Megatron does twice."""
    from areal_megatron.trainer.experts import permute

    patch(sys.modules["megatron.core.transformer.moe.token_dispatcher"], "permute", permute)


def _load_all_but_steps() -> None:
    """Makes optimizers load the main values and moments of a parameter from a checkpoint without a step count.

    torch's AdamW keeps it beside them, and Megatron would look for it in the checkpoint too.
    """
    from areal_megatron.trainer.host_optimizer import HostOptimizer

    def load_all_but_step(self: Any, parameter: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        group, place = self.model_param_group_index_map[parameter]
        own = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        if isinstance(self.optimizer, HostOptimizer):
            # It would keep the tensors, which are views of larger ones.
            for name in ("param", "exp_avg", "exp_avg_sq"):
                own["master_param" if name == "param" else name].copy_(tensors[name])
            return
        load(self, parameter, tensors | ({"step": own["step"]} if "step" in own else {}))

    optimizer = sys.modules["megatron.core.optimizer.distrib_optimizer"].DistributedOptimizer
    load = patch(optimizer, "_set_main_param_and_optimizer_states", load_all_but_step)


@contextlib.contextmanager
def cpu_passes_for_cuda() -> Iterator[None]:
    """A context in which CPU tensors give their type as torch.cuda.FloatTensor and so on, and `cuda()` moves nothing.

    Needed while the model and its optimizer are built: the distributed optimizer groups parameters by these names and
    knows no others, and tied embeddings are moved to "the" CUDA device. Needed too while the optimizer's state is
    gathered for a checkpoint, and while it is loaded.
    """
    if torch.cuda.is_available():
        yield
        return
    original = torch.Tensor.type

    def kind(tensor: torch.Tensor, *to: Any, **options: Any) -> Any:
        result = original(tensor, *to, **options)
        return result if to or options else result.replace("torch.", "torch.cuda.", 1)

    with (
        _replaced(torch.Tensor, "type", kind),
        _replaced(torch.Tensor, "cuda", lambda self, *_, **__: self),
    ):
        yield


def accumulate_in_products() -> None:
    """Makes linear layers add a weight's gradient to its float32 buffer in the product that computes it.

    megatron-core looks for this in apex's extension `fused_weight_gradient_mlp_cuda`, and refuses to build an output
    layer without it even where TransformerEngine's layers bring their own.
    """
    layers = sys.modules["megatron.core.tensor_parallel.layers"]
    if not layers._grad_accum_fusion_available:
        vars(layers)["fused_weight_gradient_mlp_cuda"] = _Products  # not there without apex
        patch(layers, "_grad_accum_fusion_available", True)


def sign_objects(key: bytes) -> None:
    """From now on torch's object collectives of this process sign what they send, and unpickle only what was signed
    with the same key; they raise StrangerError for anything else."""
    pickler, unpickler = signing(key)
    patch(distributed_c10d, "_pickler", pickler)
    patch(distributed_c10d, "_unpickler", unpickler)


@contextlib.contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    original = patch(holder, name, value)
    try:
        yield
    finally:
        patch(holder, name, original)


def _as_it_is(function: Callable | None = None, **_: Any) -> Callable:
    """Takes the place of torch.compile, also of its decorator with options."""
    return function or (lambda function: function)


class _Products:
    @staticmethod
    def wgrad_gemm_accum_fp32(rows: Tensor, gradient: Tensor, total: Tensor) -> None:
        """total [out, in] float32 += gradient [tokens, out]ᵀ · rows [tokens, in]"""
        wider: dict[str, Any] = {} if rows.dtype == total.dtype else {"out_dtype": total.dtype}
        torch.addmm(total, gradient.t(), rows, out=total, **wider)


def _norm(_: int, __: Tensor, lists: list[list[Tensor]], *___: Any) -> tuple[Tensor, None]:
    """Returns the norm of all tensors as one, [1]."""
    return torch.stack(torch._foreach_norm(lists[0])).norm().unsqueeze(0), None
