"""The end of a run: groups that are under way then are skipped, whatever they are about to become."""

import asyncio
import time

import pytest

from areal_megatron.controller.controller import Controller
from areal_megatron.controller.sampler import Sampler
from tests.support.engines import make_run, standin_engine

WAIT_S = 60


@pytest.mark.parametrize("steps", range(5))
def test_a_group_may_be_scored_in_the_moment_in_which_the_run_ends(world, tmp_path, monkeypatch, steps):
    """`steps` are those of the event loop from the trainers' Bye to the score."""
    run, config = make_run(tmp_path / "run", world)
    config.reward.function = "tests.support.rewards:coarse"
    run.begin()

    async def whole():
        controller = Controller(config, run)
        score, waiting = asyncio.Event(), []

        async def with_terms(self, prompt, sampled):
            waiting.append(prompt.id)
            await score.wait()
            return sampled

        monkeypatch.setattr(Sampler, "with_terms", with_terms)
        life = asyncio.create_task(controller.live())
        begun = time.monotonic()
        while not waiting and not life.done() and time.monotonic() < begun + WAIT_S:
            await asyncio.sleep(0.02)
        assert waiting
        controller._bye.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        score.set()
        try:
            await asyncio.wait_for(life, WAIT_S)
        finally:
            await controller.close()
        return controller.schedule

    with standin_engine(run):
        schedule = asyncio.run(whole())
    assert not schedule.running and not schedule.finished
    assert set(schedule.dispositions.values()) == {"skipped: the run ended"}
