"""Several ranks on one device: forks of a process that has imported the step, each with an environment of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0
"""Longest time of the ranks of one measurement, if it names no other."""


def environment(rank: int) -> dict[str, str]:
    """Returns what lets ranks of one GPU form an NCCL communicator: each seems to be on a host of its own, and between
    hosts there are only sockets."""
    return {
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def on_ranks(
    function: Callable[..., Any],
    world: int,
    *arguments: Any,
    folder: Path,
    settings: Mapping[str, str] | None = None,
    killed: Collection[int] = (),
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:
    """Calls function(rank, *arguments) on each rank; returns what they return, which must be JSON.

    `folder`: a new one, for their outputs. `settings`: variables of their environment. `killed`: ranks that kill
    themselves; None stands for what they return. Raises RuntimeError for a rank that fails, with the last line of its
    output, and after `timeout_s`; then all are ended.
    """
    folder.mkdir(parents=True)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # looking for a GPU must not open it before the fork
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([each.__module__ for each in (function, *arguments) if callable(each)])
    processes = [
        context.Process(target=_run, args=(function, rank, arguments, dict(settings or {}), folder), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        _wait(dict(enumerate(processes)), set(killed), folder, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [
        None if rank in killed else json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
        for rank in range(world)
    ]


def as_found(function: Callable[..., Iterator[Any]], world: int, *arguments: Any, folder: Path) -> Iterator[Any]:
    """Yields what function(rank, *arguments) yields on rank 0, as it does. All ranks call it, as in `on_ranks`."""
    path, seen = folder / "found.jsonl", 0
    with ThreadPoolExecutor(1) as pool:
        ranks = pool.submit(on_ranks, _write_each, world, function, str(path), *arguments, folder=folder)
        while True:
            over = ranks.done()
            lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
            yield from map(json.loads, lines[seen:])
            seen = len(lines)
            if over:
                break
            time.sleep(0.02)
        ranks.result()


def _write_each(rank: int, function: Callable[..., Iterator[Any]], path: str, *arguments: Any) -> None:
    for found in function(rank, *arguments):
        if rank == 0:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")


def _wait(running: dict[int, Any], killed: set[int], folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while running:
        for rank, process in list(running.items()):
            if process.exitcode is None:
                continue
            del running[rank]
            if process.exitcode and rank not in killed:
                raise RuntimeError(f"rank {rank}: {_last_line(folder / f'{rank}.out')}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank {min(running)} has not ended after {timeout_s:.0f} s")
        time.sleep(0.02)


def _last_line(output: Path) -> str:
    lines = [line for line in output.read_text(errors="replace", encoding="utf-8").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def _run(function: Callable[..., Any], rank: int, arguments: tuple, settings: dict[str, str], folder: Path) -> None:
    os.environ.update(environment(rank) | settings)
    descriptor = os.open(folder / f"{rank}.out", os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    (folder / f"{rank}.json").write_text(json.dumps(function(rank, *arguments)), encoding="utf-8")
