"""What becomes of the groups of engines that are lost, or that do not answer, with web servers in their places."""

import asyncio
from contextlib import AsyncExitStack

from aiohttp import web

from areal_megatron.controller import generation
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.engine import Engine
from areal_megatron.controller.generation import Generation
from areal_megatron.controller.schedule import Schedule
from areal_megatron.engine.client import EngineClient
from areal_megatron.observe.status import EngineState
from tests.support.routes import served
from tests.unit.workflows.test_seeds import PROMPTS, Asked, setting


def test_a_run_stops_though_engines_do_not_answer(tmp_path, monkeypatch):
    """Trainers wait for the checkpoint no longer than machine.peer_timeout_s, which is the clients' limit too."""
    monkeypatch.setattr(generation, "_INTERRUPT_S", 1.0)
    asked = []

    async def play():
        async with AsyncExitStack() as stack:

            async def silent(request):
                asked.append(request.path)
                await asyncio.Event().wait()

            async def whole(request):
                asked.append("whole")
                return web.Response()

            config, sampler = setting(tmp_path, Asked())
            timeline = sampler.engines.pop().timeline
            for index, answer in enumerate((silent, silent, whole, silent)):
                client = EngineClient(f"engine-{index}", await stack.enter_async_context(served(answer)), "token", 60)
                stack.push_async_callback(client.close)
                sampler.engines.append(Engine(index, client, timeline))
            sampler.engines[3].leave(EngineState.LOST)
            schedule = Schedule(batch_size=4, group_size=2, max_staleness=2, updates=3)
            subject = Generation(config, schedule, sampler, PROMPTS[:3], Changed())
            await asyncio.wait_for(subject.interrupt(), 10)
            assert not subject.save().again

    asyncio.run(play())
    assert sorted(asked) == ["/inference/v1/abort_requests"] * 2 + ["whole"]


def test_an_engine_that_is_lost_before_its_group_has_begun_holds_nothing(tmp_path):
    """It could not be drained later, since it would still owe answers."""

    async def play():
        async with AsyncExitStack() as stack:

            async def answer(request):
                await asyncio.Event().wait()

            config, sampler = setting(tmp_path, Asked())
            client = EngineClient("engine-0", await stack.enter_async_context(served(answer)), "token", 60)
            stack.push_async_callback(client.close)
            engine = sampler.engines[0] = Engine(0, client, sampler.timeline)
            schedule, changed = Schedule(batch_size=4, group_size=2, max_staleness=0, updates=3), Changed()
            subject = Generation(config, schedule, sampler, PROMPTS[:3], changed)
            running = asyncio.create_task(subject.run())
            await asyncio.sleep(0.01)
            for begun in (False, True):
                schedule.add_engine(0, 0)
                changed.notify()
                while not engine.busy:
                    await asyncio.sleep(0)
                if begun:
                    await asyncio.sleep(0.01)
                engine.leave(EngineState.LOST)
                subject.lose(engine)
                await asyncio.sleep(0.1)
                assert not engine.busy and not engine.running and not schedule.running
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(play())
