"""Runs checks on real trainer ranks: one process each, gloo between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

TIMEOUT_S = 240


@pytest.fixture
def on_ranks(tmp_path):
    """on_ranks(check, world, **arguments): calls <module>.<check>(folder, rank, **arguments) on `world` ranks.

    The module is trainer_checks unless the check is named module:check.

    Fails with the output of the first rank that failed; the others are ended.
    """

    def run(check: str, world: int, **arguments) -> None:
        program = [
            sys.executable,
            str(Path(__file__).parent / "trainer_rank.py"),
            check if ":" in check else f"trainer_checks:{check}",
            str(tmp_path),
            json.dumps(arguments),
        ]
        outputs = [(tmp_path / f"rank-{rank}.out").open("w+") for rank in range(world)]
        ranks = [
            subprocess.Popen([*program, str(rank)], stdout=output, stderr=subprocess.STDOUT, env=_environment())
            for rank, output in enumerate(outputs)
        ]
        try:
            failed = _first_failure(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if failed is not None:
            outputs[failed].seek(0)
            pytest.fail(f"rank {failed} of {world} in {check}:\n{outputs[failed].read()[-6000:]}", pytrace=False)

    return run


def _environment() -> dict[str, str]:
    tools = str(Path(__file__).parents[2] / "tools")
    return {
        **os.environ,
        "PYTHONPATH": tools,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def _first_failure(ranks: list[subprocess.Popen]) -> int | None:
    deadline = time.monotonic() + TIMEOUT_S
    waiting = dict(enumerate(ranks))
    while waiting:
        for rank, process in list(waiting.items()):
            if process.poll() is not None:
                del waiting[rank]
                if process.returncode:
                    return rank
        if time.monotonic() > deadline:
            return min(waiting)
        time.sleep(0.05)
    return None
