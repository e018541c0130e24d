"""Which engines are lost, are back, or leave, with web servers in the engines' places."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web

from areal_megatron.config import Config, DataConfig, ModelConfig, RolloutConfig
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.fleet import Fleet
from areal_megatron.controller.schedule import Schedule
from areal_megatron.engine.client import EngineError
from areal_megatron.run.folder import RunFolder
from tests.support.routes import served


class Server:
    """The routes of an engine. It may be `dead` to those who ask for its load, and silent about its health."""

    def __init__(self):
        self.dead, self.silent, self.asked = False, False, asyncio.Event()

    def serving(self):
        return served(self._answer)

    async def _answer(self, request):
        if request.path == "/health" and self.silent:
            self.asked.set()
            await asyncio.Event().wait()
        return web.Response(text="vllm:generation_tokens_total 1\n", status=500 if self.dead else 200)


class Losses(list):
    """The names of the engines that were lost or drained."""

    def __init__(self, schedule):
        self._schedule = schedule

    def lost(self, engine):
        self.append(engine.name)
        if engine.index in self._schedule.engines:
            self._schedule.remove_engine(engine.index)

    def committed(self, version): ...


@asynccontextmanager
async def fleet_of(folder, *servers):
    """A fleet that runs, its losses, its run, and where the servers are; the last one is not announced."""
    run = RunFolder(folder / "run")
    run.create()
    rollout = RolloutConfig(group_size=2, engines=len(servers) - 1)
    config = Config(name="run", updates=9, batch_size=4, model=ModelConfig("m"), data=DataConfig("d"), rollout=rollout)
    schedule = Schedule(batch_size=4, group_size=2, max_staleness=4, updates=9)
    async with AsyncExitStack() as stack:
        places = [await stack.enter_async_context(server.serving()) for server in servers]
        for index, place in enumerate(places[:-1]):
            run.announce(f"engine-{index}", place)
        losses = Losses(schedule)
        fleet = Fleet(config, run, {}, schedule, Changed(), losses)
        await fleet.connect()
        running = asyncio.create_task(fleet.run())
        try:
            yield fleet, losses, run, places
        finally:
            if running.done():
                running.result()
            running.cancel()
            await fleet.close()


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def test_an_engine_that_is_back_is_not_lost_for_what_its_predecessor_did_not_answer(tmp_path):
    async def play():
        first, other, next_one = Server(), Server(), Server()
        async with fleet_of(tmp_path, first, other, next_one) as (fleet, losses, run, places):
            engine, client = fleet.engines[0], fleet.engines[0].client
            first.silent = True
            asked = asyncio.create_task(fleet.is_lost(engine, client, EngineError("the connection broke")))
            await first.asked.wait()
            first.dead = True
            await until(lambda: losses)
            run.announce("engine-0", places[-1])
            await until(lambda: not engine.gone)
            assert await asyncio.wait_for(asked, 10)
            assert not engine.gone and losses == ["engine-0"]

    asyncio.run(play())


def test_the_last_engine_generates_though_it_was_to_leave(tmp_path):
    async def play():
        first, second, next_one = Server(), Server(), Server()
        async with fleet_of(tmp_path, first, second, next_one) as (fleet, losses, run, _):
            engine = fleet.engines[1]
            engine.occupy(1)
            run.drain("engine-1").parent.mkdir()
            run.drain("engine-1").touch()
            await until(lambda: engine.draining)
            first.dead = True
            await until(lambda: losses)
            await until(lambda: not engine.draining)
            engine.release(1)
            await asyncio.sleep(1)
            assert not engine.gone and losses == ["engine-0"]

    asyncio.run(play())
