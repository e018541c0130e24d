"""Runs checks on real trainer ranks: one process each, gloo between them."""

from __future__ import annotations

import multiprocessing
import time
from functools import partial
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.support.ranks import trainer_rank

TIMEOUT_S = 240
RANKS = "tests.support.ranks"


@pytest.fixture(scope="session")
def forks():
    """Starts ranks by forking a process that has imported torch, megatron-core and the checks: importing them takes
    longer than most checks."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # looking for a GPU must not open it before the fork
        "TRANSFORMERS_VERBOSITY": "error",
    }
    context = multiprocessing.get_context("forkserver")
    checks = sorted(path.stem for path in Path(trainer_rank.__file__).parent.glob("*_checks.py"))
    context.set_forkserver_preload([f"{RANKS}.{module}" for module in ("trainer_rank", *checks)])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        forkserver.ensure_running()  # with that environment, which other tests of this process do not get
    return context


@pytest.fixture
def on_ranks(tmp_path, start_ranks):
    """start_ranks in a folder of the test's own."""
    return partial(start_ranks, tmp_path)


@pytest.fixture(scope="session")
def start_ranks(forks):
    """start_ranks(folder, check, world, **arguments): calls <module>.<check>(folder, rank, **arguments) on `world`
    ranks.

    The module is trainer_checks unless the check is named module:check.

    Fails with the output of the first rank that failed; the others are ended.
    """

    def run(folder: Path, check: str, world: int, **arguments) -> None:
        check = f"{RANKS}." + (check if ":" in check else f"trainer_checks:{check}")
        outputs = [folder / f"rank-{rank}.out" for rank in range(world)]
        ranks = [
            forks.Process(target=trainer_rank.main, args=(check, folder, rank, arguments, output))
            for rank, output in enumerate(outputs)
        ]
        for process in ranks:
            process.start()
        try:
            failed = _first_failure(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        if failed is not None:
            pytest.fail(f"rank {failed} of {world} in {check}:\n{outputs[failed].read_text()[-6000:]}", pytrace=False)

    return run


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
