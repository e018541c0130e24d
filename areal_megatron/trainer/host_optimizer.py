"""megatron-core's optimizer with its states in the memory of the host, a bucket of parameters at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from areal_megatron.reshard.published import HostMemory
from areal_megatron.reshard.session import HOST_BLOCK

_BUCKET = 2**25
"""Elements of a bucket, but for the rest of its last parameter: enough for fast copies, few enough that the copies of
one run beside the step of another."""


@dataclass
class _Bucket:
    parts: list[Tensor]
    """This rank's parts of parameters, flat, in the order of their memory."""
    main: Tensor
    """[elements] float32 on the host: their main values, one part after another."""
    gradients: Tensor | None
    """Pinned memory for their gradients; None where the parts are on the host themselves."""

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Returns the elements of each part in a flat tensor like `main`."""
        return flat.split([part.numel() for part in self.parts])


class HostOptimizer(HybridDeviceOptimizer):
    """AdamW on the host: for each bucket one copy of its gradients from the device, a fused step, and one copy of its
    parameters back, in their own dtype. Copies run beside the steps of other buckets.

    Megatron's own makes these for each parameter, and converts to 16 bits in memory that is not pinned, for which the
    host waits. It also passes over parameters that are not on a CUDA device, cannot load states of float32 parameters,
    and first copies whole parameters, before it knows which part of them is this rank's.
    """

    def _get_sub_optimizer_param_groups(self, _fraction: float) -> tuple[list, list, dict, dict, dict]:
        groups = [
            group | {"params": [p for p in group["params"] if not isinstance(p, torch.nn.Parameter)]}
            for group in self.param_groups
        ]
        self._buckets = list(_buckets(part for group in groups for part in group["params"]))
        self._wires: list[tuple[Tensor, torch.Event | None]] = []
        """Two pinned buffers from which parameters are copied to the device in turns, and when that copy is done."""
        main_of, part_of = {}, {}
        for bucket in self._buckets:
            for part, main in zip(bucket.parts, bucket.split(bucket.main), strict=True):
                main_of[part], part_of[main] = main, part
        mains = [group | {"params": [main_of[part] for part in group["params"]]} for group in groups if group["params"]]
        return mains, [], main_of, part_of, dict(main_of)

    def build_cpu_optimizer_list(
        self, kind: Callable[[list], torch.optim.Optimizer], groups: list[dict[str, Any]]
    ) -> list:
        """Returns an optimizer for each bucket."""
        made = []
        for bucket in self._buckets:
            own = {self.gpu_params_map_cpu_copy[part] for part in bucket.parts}
            chosen = [group | {"params": [main for main in group["params"] if main in own]} for group in groups]
            made.append(kind([group for group in chosen if group["params"]]))
        return made

    def _register_param_copy_back_gpu_hook(self) -> None:
        return  # `step` does that

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self._sync_hdo_param_groups_to_sub_optimizers()
        arrivals = [self._fetch(bucket) for bucket in self._buckets]
        for bucket, optimizer, arrived in zip(self._buckets, self.cpu_optimizers, arrivals, strict=True):
            if arrived:
                arrived.synchronize()
            optimizer.step()
            self._put_back(bucket)
        if any(arrivals):
            torch.cuda.current_stream().wait_stream(self._h2d_stream)
        self._sync_sub_optimizers_state_to_hdo()

    def _fetch(self, bucket: _Bucket) -> torch.Event | None:
        """Starts to copy the gradients of a bucket to the host; returns when they are there."""
        gradients = [cast(Tensor, getattr(part, "decoupled_grad", part.grad)) for part in bucket.parts]
        mains = [self.gpu_params_map_cpu_copy[part] for part in bucket.parts]
        if bucket.gradients is None:
            for main, gradient in zip(mains, gradients, strict=True):
                main.grad = gradient.to(main.dtype)
            return None
        self._d2h_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._d2h_stream):
            _copy_in_runs(bucket.gradients, gradients, to_flat=True)
        for main, gradient in zip(mains, bucket.split(bucket.gradients), strict=True):
            main.grad = gradient
        return self._d2h_stream.record_event()

    def _put_back(self, bucket: _Bucket) -> None:
        """Starts to copy the main values of a bucket into its parameters."""
        if bucket.gradients is None:
            _copy_in_runs(bucket.main, bucket.parts, to_flat=False)
            return
        wire, copied = self._wires.pop(0) if len(self._wires) == 2 else (torch.empty(0), None)
        if copied:
            copied.synchronize()
        if wire.numel() < bucket.main.numel():
            wire = torch.empty(bucket.main.numel(), dtype=bucket.parts[0].dtype, pin_memory=True)
        flat = wire[: bucket.main.numel()].copy_(bucket.main)
        self._h2d_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._h2d_stream):
            _copy_in_runs(flat, bucket.parts, to_flat=False)
        self._wires.append((wire, self._h2d_stream.record_event()))


def _buckets(parts: Iterable[Tensor]) -> Iterator[_Bucket]:
    """Yields the buckets of parts of parameters, with the parts' values as main values."""
    parts = sorted(parts, key=lambda part: (part.dtype.itemsize, part.data_ptr()))
    held: list[Tensor] = []
    size = 4 * sum(map(torch.numel, parts))
    pinned = HostMemory(pinned=True, block=min(HOST_BLOCK, 1 << max(size - 1, 0).bit_length()))

    def bucket() -> _Bucket:
        size = sum(part.numel() for part in held)
        main = torch.empty(size, dtype=torch.float32)
        _copy_in_runs(main, held, to_flat=True)
        return _Bucket(list(held), main, pinned.take(size, torch.float32) if held[0].is_cuda else None)

    for part in parts:
        if held and (part.dtype != held[0].dtype or sum(map(torch.numel, held)) >= _BUCKET):
            yield bucket()
            held.clear()
        held.append(part)
    if held:
        yield bucket()


def _copy_in_runs(flat: Tensor, parts: list[Tensor], to_flat: bool) -> None:
    """Copies `parts` one after another into the flat tensor, or from there: by one copy for each run of parts that
    follow one another in memory."""
    start = 0
    for run in _runs(parts):
        place = flat[start : start + run.numel()]
        (place if to_flat else run).copy_(run if to_flat else place, non_blocking=True)
        start += run.numel()


def _runs(parts: list[Tensor]) -> Iterator[Tensor]:
    """Yields the elements of flat tensors, in their order, as the fewest views that hold them."""
    first, count = parts[0], 0
    for part in parts:
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or (
            part.storage_offset() != first.storage_offset() + count
        ):
            yield first.as_strided((count,), (1,))
            first, count = part, 0
        count += part.numel()
    yield first.as_strided((count,), (1,))
