"""Starts checks on real trainer ranks: one process each, gloo between them, forked from one that has imported all."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.support.ranks import trainer_rank

TIMEOUT_S = 240
RANKS = "tests.support.ranks"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONFAULTHANDLER": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # looking for a GPU must not open it before the fork
    "TRANSFORMERS_VERBOSITY": "error",
}


class RankFailed(RuntimeError):
    """A rank of a check failed, or took too long; the message is what it and its libraries printed."""


class TrainerRanks:
    """A process that has imported torch, megatron-core and the checks, of which ranks are forks: importing them takes
    longer than most checks."""

    def __init__(self):
        self._context = multiprocessing.get_context("forkserver")
        modules = sorted(path.stem for path in Path(trainer_rank.__file__).parent.glob("*_*.py"))
        # The trainer first, as in a run: it decides how megatron-core is imported.
        self._context.set_forkserver_preload(["areal_megatron.trainer", *(f"{RANKS}.{module}" for module in modules)])
        with _environment():
            forkserver.ensure_running()  # with that environment, which nothing else of this process gets

    def start(self, function: Callable[..., None], *arguments) -> BaseProcess:
        """Calls the function, of one of those modules, in a fork; Connections among the arguments are passed on."""
        process = self._context.Process(target=function, args=arguments)
        process.start()
        return process

    def run(self, folder: Path, check: str, world: int, **arguments) -> None:
        """Calls <module>.<check>(folder, rank, **arguments) on `world` ranks; `check` is "module:check".

        Raises RankFailed for the first rank that failed; the others are ended.
        """
        outputs = [folder / f"rank-{rank}.out" for rank in range(world)]
        ranks = [
            self.start(trainer_rank.main, check, folder, rank, arguments, output) for rank, output in enumerate(outputs)
        ]
        try:
            failed = _first_failure(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        if failed is not None:
            raise RankFailed(f"rank {failed} of {world} in {check}:\n{outputs[failed].read_text()[-6000:]}")


@contextmanager
def _environment():
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _first_failure(ranks: list[BaseProcess]) -> int | None:
    deadline = time.monotonic() + TIMEOUT_S
    waiting = dict(enumerate(ranks))
    while waiting:
        for rank, process in list(waiting.items()):
            if process.exitcode is not None:
                del waiting[rank]
                if process.exitcode:
                    return rank
        if time.monotonic() > deadline:
            return min(waiting)
        time.sleep(0.05)
    return None
