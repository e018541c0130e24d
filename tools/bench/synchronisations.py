"""Finds where a program makes its host wait for the device, on machines with and without one.

On CUDA torch itself tells (`torch.cuda.set_sync_debug_mode`). On a CPU the tensors that would be on the device are told
from those of the host by how they were made: with a `torch.device` object, by a call such as `to(device)`, or from
tensors on the device. Whatever is made without a device, with the string "cpu", by `cpu()` or from an array is the
host's. An operation waits if the shape of its result depends on values on the device, if its result is a Python object
or a tensor of the host, or if it copies pageable memory to the device without `non_blocking`.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from areal_megatron.trainer import cpu, patches
from areal_megatron.trainer.trainer import Trainer

OWNERS = ("areal_megatron", "megatron", "tools", "tests")
"""The packages one of whose lines is named as the cause: the innermost of them on the stack."""
HERE = frozenset({__file__, cpu.__file__, patches.__file__})

VALUES_DECIDE_THE_SHAPE = frozenset(
    {
        "bincount",
        "equal",
        "masked_select",
        "nonzero",
        "repeat_interleave",
        "unique_consecutive",
        "unique_dim",
        "_local_scalar_dense",
        "_unique2",
    }
)
"""Names of ATen operations that wait on CUDA for what they have computed."""
INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
TO_PYTHON = frozenset({"__array__", "numpy", "tolist"})
FROM_PYTHON = frozenset({"as_tensor", "asarray", "tensor"})


class Site(NamedTuple):
    """A line of code that waits, and why: the operation, without its line number, which changes with every edit."""

    file: str
    """From the folder above the package: areal_megatron/trainer/batch.py."""
    function: str
    operation: str


REASONS = {
    "areal_megatron/ppo/penalty.py": "replicas add up means on their hosts, once a mini-batch",
    "areal_megatron/ppo/selection.py": "replicas add up counts on their hosts",
    "areal_megatron/trainer/critic.py": "replicas add up moments on their hosts, once a batch",
    "areal_megatron/trainer/rate_limit.py": "the learning rate follows from the first mini-batch, once a batch",
    "areal_megatron/trainer/token_sums.py": "metrics, once a batch",
    "areal_megatron/trainer/ppo.py": "what the probe found is sent to the controller, once a batch",
    "areal_megatron/trainer/update_size.py": "metrics, once a batch",
    "megatron/core/optimizer/clip_grads.py": "whether to take the step, and to clip: once a step",
    "megatron/core/transformer/moe/token_dispatcher.py": "how many tokens go to each expert decides the shapes",
}
"""Why the host has to wait in a file."""


def reason(site: Site) -> str:
    """Returns why the host has to wait there; empty if nobody knows."""
    return REASONS.get(site.file, "")


def kept_on_host(trainer: Trainer) -> list[Tensor]:
    """Returns what the trainer's models have on the host on CUDA too: the orders of experts."""
    modules = [m for learner in trainer.learners.values() for chunk in learner.chunks for m in chunk.modules()]
    dispatchers = [m.token_dispatcher for m in modules if hasattr(m, "token_dispatcher")]
    return [value for dispatcher in dispatchers for value in vars(dispatcher).values() if isinstance(value, Tensor)]


@contextlib.contextmanager
def synchronisations(host: Iterable[Tensor] = ()) -> Iterator[Counter[Site]]:
    """A context that counts how often each line of this thread makes the host wait for the device.

    `host`: tensors made before that are the host's; any other one is taken to be the device's.
    """
    seen: Counter[Site] = Counter()
    if torch.cuda.is_available():
        with _warned(seen):
            yield seen
        return
    watch = _Watch(seen)
    for tensor in host:
        watch.keep(tensor)
    waits = {"synchronize": lambda *_: watch.waits("synchronize")}
    with (
        warnings.catch_warnings(action="ignore"),  # Megatron's would seem to come from here
        patch.multiple(cpu._Stream, **waits),
        patch.multiple(sys.modules["megatron.core.parallel_state"].torch.cuda, **waits),
        patch.object(torch, "from_numpy", watch.on_host(torch.from_numpy)),
        patch.object(torch, "frombuffer", watch.on_host(torch.frombuffer)),
        _Operations(watch),
        _Calls(watch),
    ):
        yield seen


@contextlib.contextmanager
def _warned(seen: Counter[Site]) -> Iterator[None]:
    def show(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            seen[_site("synchronize")] += 1

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


class _Watch:
    """Which storages are the host's, and what has waited."""

    def __init__(self, seen: Counter[Site]):
        self._seen = seen
        self._host: dict[int, torch.UntypedStorage] = {}
        """Address of a storage → itself, so that no other gets its address meanwhile."""

    def waits(self, operation: str) -> None:
        self._seen[_site(operation)] += 1

    def is_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._host

    def keep(self, tensor: Tensor) -> Tensor:
        """Notes that a tensor is the host's."""
        storage = tensor.untyped_storage()
        self._host[storage._cdata] = storage
        return tensor

    def on_host(self, factory):
        return lambda *arguments, **options: self.keep(factory(*arguments, **options))

    def to_device(self, tensor: Tensor, waits: bool) -> Tensor:
        """Copies a tensor of the host, since on a CPU the original would be returned itself."""
        if waits:
            self.waits("to the device")
        with _unwatched():
            return tensor.clone()

    def to_host(self, tensor: Tensor, waits: bool) -> Tensor:
        if waits:
            self.waits("to the host")
        with _unwatched():
            return self.keep(tensor.clone())


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


class _Calls(TorchFunctionMode):
    """What Python calls and no operation of ATen shows: on a CPU these return at once."""

    def __init__(self, watch: _Watch):
        super().__init__()
        self._watch = watch

    def __torch_function__(self, function, types, arguments=(), options=None):
        options, watch, name = options or {}, self._watch, getattr(function, "__name__", "")
        if name in TO_PYTHON and not watch.is_host(arguments[0]):
            watch.waits(name)
        if name == "cpu" or (name == "to" and "cpu" in (*arguments[1:], options.get("device"))):
            waits = not options.get("non_blocking")
            return arguments[0] if watch.is_host(arguments[0]) else watch.to_host(arguments[0], waits)
        if name == "to" and _device(arguments[1:], options) and watch.is_host(arguments[0]):
            return watch.to_device(function(*arguments, **options), not options.get("non_blocking"))
        given = [leaf for leaf in tree_leaves((arguments, options)) if isinstance(leaf, Tensor)]
        result = function(*arguments, **options)
        if name in FROM_PYTHON:
            if not all(map(watch.is_host, given)):
                watch.waits(name)
            watch.keep(result)
            return watch.to_device(result, waits=True) if _device((), options) else result
        if not given and isinstance(result, Tensor) and not _device((), options):
            watch.keep(result)
        return result


class _Operations(TorchDispatchMode):
    """The operations of ATen, whoever calls them."""

    def __init__(self, watch: _Watch):
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options, watch = options or {}, self._watch
        name = function._opname
        given = [leaf for leaf in tree_leaves((arguments, options)) if isinstance(leaf, Tensor)]
        device = [tensor for tensor in given if not watch.is_host(tensor)]
        if device and _waits(name, function._overloadname, arguments, watch):
            watch.waits(name)
        result = function(*arguments, **options)
        if (given and not device) or name == "lift_fresh":  # as Python's lists of indices are made
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    watch.keep(tensor)
        return result


def _waits(name: str, overload: str, arguments: tuple, watch: _Watch) -> bool:
    """Whether an operation with tensors of the device makes the host wait."""
    if name == "repeat_interleave":
        return overload == "Tensor"
    if name in INDEXING:  # a single value to put is filled in where the mask is
        return any(map(_is_mask, arguments[1])) and (name == "index" or arguments[2].numel() > 1)
    if name == "copy_":
        blocking = not (len(arguments) > 2 and arguments[2])
        return blocking and watch.is_host(arguments[0]) != watch.is_host(arguments[1])
    return name in VALUES_DECIDE_THE_SHAPE


def _is_mask(place: Tensor | None) -> bool:
    return place is not None and place.dtype in (torch.bool, torch.uint8)


def _device(arguments: tuple, options: dict[str, Any]) -> bool:
    return any(isinstance(value, torch.device) for value in (*arguments, options.get("device")))


def _site(operation: str) -> Site:
    frame: FrameType | None = sys._getframe(1)
    while frame:
        parts = Path(frame.f_code.co_filename).parts
        installed = parts.index("site-packages") if "site-packages" in parts else 0  # in whatever folder that is
        owner = next((place for place in range(len(parts) - 1, installed - 1, -1) if parts[place] in OWNERS), None)
        if owner is not None and frame.f_code.co_filename not in HERE:
            return Site("/".join(parts[owner:]), frame.f_code.co_qualname, operation)
        frame = frame.f_back
    return Site("", "", operation)
