"""The end of a run: groups that are under way then are skipped, whatever they are about to become."""

import asyncio
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from areal_megatron.controller.controller import Controller
from areal_megatron.controller.sampler import Sampler
from tests.support.engines import make_run

WAIT_S = 60


@contextmanager
def one_engine(run, root):
    """A stand-in for an engine, which the run knows; answers have 24 tokens."""
    command = [sys.executable, root / "tools" / "bench" / "standin_engines.py", "1", "0.05", "24", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        run.announce("engine-0", f"http://127.0.0.1:{engine.stdout.readline().strip()}/0")
        try:
            yield
        finally:
            engine.kill()


@pytest.mark.parametrize("steps", range(5))
def test_a_group_may_be_scored_in_the_moment_in_which_the_run_ends(world, tmp_path, request, monkeypatch, steps):
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

    with one_engine(run, request.config.rootpath):
        schedule = asyncio.run(whole())
    assert not schedule.running and not schedule.finished
    assert set(schedule.dispositions.values()) == {"skipped: the run ended"}
