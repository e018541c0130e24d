"""The GPUs of this node: which of them this process may use, how much memory they have, and which cores are near them.

Found without torch. A GPU is known by its number, or by the name `GPU-…` or, of a slice of one, `MIG-…` that
`nvidia-smi -L` prints, as in CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NAME = re.compile("(GPU|MIG)-[0-9A-Za-z/-]+")
_NONE = ("", "-1", "NoDevFiles")
"""Values that hide all GPUs: nvidia's own, and Slurm's."""
_DRIVER = Path("/proc/driver/nvidia/gpus")
_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA_SMI_S = 10.0


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi lists it."""

    number: int
    uuid: str
    bus: str
    """Address on the PCI bus, e.g. 00000000:3B:00.0."""
    mebibytes: int
    """Memory; 0 if unknown."""


def visible() -> list[int | str]:
    """Returns the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them, or else all."""
    value = os.environ.get(VISIBLE)
    if value is None:
        found = listed()
        return list(range(_count())) if found is None else [gpu.number for gpu in found]
    return read(value)


def read(value: str) -> list[int | str]:
    """Returns the GPUs named by a value of CUDA_VISIBLE_DEVICES, as CUDA reads it: up to the first invalid name, with a
    warning on stderr."""
    names: list[int | str] = []
    for name in map(str.strip, value.split(",")):
        if not name.isdigit() and not _NAME.fullmatch(name):
            if name not in _NONE:
                ignored = f"{name!r} is no GPU, and CUDA ignores it and what follows"
                print(f"warning: {VISIBLE}={value}: {ignored}", file=sys.stderr, flush=True)
            break
        names.append(int(name) if name.isdigit() else name)
    return names


@cache  # it takes seconds where the driver is not kept loaded
def listed() -> tuple[Gpu, ...] | None:
    """Returns the GPUs that nvidia-smi lists: all that this process's cgroup lets it open, whatever
    CUDA_VISIBLE_DEVICES says. None if it does not answer, as where there is no driver."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, encoding="utf-8", errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return tuple(
        Gpu(int(row[0]), row[1], row[2], int(row[3]) if row[3].isdigit() else 0)
        for row in rows
        if len(row) == 4 and row[0].isdigit()
    )


def find(name: int | str, found: Iterable[Gpu]) -> Gpu | None:
    """Returns the GPU of that number or name, which may be cut short; None for others and for slices."""
    if isinstance(name, int):
        return next((gpu for gpu in found if gpu.number == name), None)
    return next((gpu for gpu in found if gpu.uuid.startswith(name)), None)


def uuids(names: Sequence[int | str]) -> list[str]:
    """Returns the UUID of each; empty where nvidia-smi does not say, and for slices their own names."""
    found = listed() or ()
    return [gpu.uuid if (gpu := find(name, found)) else str(name) * isinstance(name, str) for name in names]


def smallest_gib(names: Sequence[int | str]) -> float:
    """Returns the memory of the smallest of these GPUs in GiB; 0 if nvidia-smi does not say, as of a slice of one."""
    found = listed() or ()
    memory = [gpu.mebibytes if (gpu := find(name, found)) else 0 for name in names]
    return min(memory, default=0) / 1024


def near_cores(names: Sequence[int | str]) -> set[int]:
    """Returns the cores on the same NUMA nodes as these GPUs; none if the kernel does not say of one of them."""
    found, cores = listed() or (), set()
    for name in names:
        gpu = find(name, found)
        near = _cores_at(gpu.bus) if gpu else set()
        if not near:
            return set()
        cores |= near
    return cores


def _cores_at(bus: str) -> set[int]:
    domain, _, rest = bus.lower().partition(":")
    try:
        runs = (_DEVICES / f"{domain[-4:]}:{rest}" / "local_cpulist").read_text(encoding="utf-8").strip().split(",")
        ends = [tuple(map(int, run.split("-"))) for run in runs]
    except (OSError, ValueError):
        return set()
    return {core for run in ends for core in range(run[0], run[-1] + 1)}


def _count() -> int:
    return len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0
