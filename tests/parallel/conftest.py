"""Runs checks on real trainer ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.support.trainer_ranks import RANKS, RankFailed, TrainerRanks


@pytest.fixture(scope="session")
def forks():
    """Starts ranks, by forks of one process."""
    return TrainerRanks()


@pytest.fixture
def on_ranks(tmp_path, start_ranks):
    """start_ranks in a folder of the test's own."""
    return partial(start_ranks, tmp_path)


@pytest.fixture(scope="session")
def start_ranks(forks):
    """start_ranks(folder, check, world, **arguments): calls <module>.<check>(folder, rank, **arguments) on `world`
    ranks.

    The module is trainer_checks unless the check is named module:check. Fails with the output of the first rank that
    failed.
    """

    def run(folder: Path, check: str, world: int, **arguments) -> None:
        check = f"{RANKS}." + (check if ":" in check else f"trainer_checks:{check}")
        try:
            forks.run(folder, check, world, **arguments)
        except RankFailed as e:
            pytest.fail(str(e), pytrace=False)

    return run
