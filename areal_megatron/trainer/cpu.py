"""torch for megatron-core on a machine without CUDA: everything as it is except the few calls below."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import torch


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


class TorchOnCpu(_StandIn):
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
