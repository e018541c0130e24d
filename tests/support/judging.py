"""What tests of reward workers share."""

import pytest

from areal_megatron.process import lateness


@pytest.fixture
def short_pauses(monkeypatch):
    """What fails is tried again at once."""
    monkeypatch.setattr(lateness, "_FIRST_PAUSE_S", 0.05)


async def scores_of(pool, answers):
    """Returns the scores of answers, None for those that have none."""
    return [None if scored.problem else scored.score for scored in await pool.judge(answers)]
