"""Makes megatron-core run on a machine without CUDA.

megatron-core 0.16.1 names CUDA in places that no setting reaches. Where no CUDA device is visible, the name `torch`
inside megatron-core's own modules (and nowhere else in the process) is bound to a stand-in that forwards everything to
torch except the few calls below, and trainer/elementwise.py computes parts of its layers. trainer/patches.py has what
is replaced with a CUDA device too.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from areal_megatron.process.patching import patch
from areal_megatron.trainer import elementwise

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


def adapt_megatron() -> None:
    """Imports megatron-core and adapts it if no CUDA device is visible. Must run before anything else imports it."""
    on_cpu = not torch.cuda.is_available()
    # These warnings are about parts that are not required (TransformerEngine, apex), megatron-core's own defaults, and
    # collectives that torch 2.13 has begun to rename: a user could do nothing about them.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.c10d_logger")
    # Fused functions are compiled where they are defined. On a CPU that needs a C++ compiler, takes seconds at import,
    # and gains nothing.
    with _replaced(torch, "compile", _as_it_is) if on_cpu else contextlib.nullcontext():
        for name in MODULES:
            importlib.import_module(name)
    if on_cpu:
        stand_in = _Torch()
        for name, module in list(sys.modules.items()):
            if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
                patch(module, "torch", stand_in)
        _use_cpu_generator()
        _exchange_uneven_parts()
        elementwise.bind()


def _as_it_is(function: Callable | None = None, **_: Any) -> Callable:
    """Takes the place of torch.compile, also of its decorator with options."""
    return function or (lambda function: function)


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


@contextlib.contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    original = patch(holder, name, value)
    try:
        yield
    finally:
        patch(holder, name, original)


class _StandIn(ModuleType):
    """A module with the attributes of `original`, except those that a subclass sets."""

    def __init__(self, original: ModuleType):
        super().__init__(original.__name__)
        self._original = original

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._original, name)
        setattr(self, name, value)
        return value


class _Cuda(_StandIn):
    """torch.cuda for a machine whose only device is the CPU, where nothing is asynchronous."""

    def __init__(self):
        super().__init__(torch.cuda)
        stream = _Stream()
        self.Stream = self.current_stream = lambda: stream
        self.stream = lambda _: contextlib.nullcontext()
        self.current_device = lambda: torch.device("cpu")
        self.synchronize = lambda *_: None
        self.empty_cache = lambda: None
        self.manual_seed = torch.manual_seed
        self.get_rng_state = lambda *_: torch.get_rng_state()


class _Stream:
    """The only stream of a CPU, and an event on it that has always happened already."""

    def record_event(self) -> _Stream:
        return self

    def wait_stream(self, _: _Stream) -> None: ...

    def wait(self, _: _Stream) -> None: ...

    def synchronize(self) -> None: ...


class _Torch(_StandIn):
    """torch, with factories that make CPU tensors when asked for CUDA ones, or for pinned ones."""

    def __init__(self):
        super().__init__(torch)
        self.cuda = _Cuda()
        for name in ("empty", "empty_like", "zeros", "ones", "full", "tensor"):
            setattr(self, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory):
    def make(*args, **options):
        if options.get("device") == "cuda":
            options["device"] = torch.device("cpu")
        options.pop("pin_memory", None)  # there is nobody to copy it
        return factory(*args, **options)

    return make


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
