"""Updates that fail under way, as the controller drives them, with a web server in the engine's place."""

import asyncio
from types import SimpleNamespace

import pytest
from aiohttp import web

from areal_megatron.config import Config, DataConfig, ModelConfig, ReshardConfig, RolloutConfig
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.engine import Engine
from areal_megatron.controller.generation import Generation
from areal_megatron.controller.schedule import Schedule
from areal_megatron.controller.updates import EngineUpdates
from areal_megatron.engine.client import EngineClient, EngineError
from areal_megatron.observe.status import EngineState
from areal_megatron.observe.timeline import Timeline
from areal_megatron.protocol import Delivered, Publish

GROUP = 2


class Scene:
    """One engine with its link; `calls` are the routes that the engine was called on."""

    def __init__(self, folder, staging):
        self._folder = folder
        self.config = Config(
            name="t",
            updates=10,
            batch_size=4,
            model=ModelConfig("m"),
            data=DataConfig("d"),
            rollout=RolloutConfig(group_size=GROUP),
            reshard=ReshardConfig(staging=staging, timeout_s=5),
        )
        self.calls, self.committed, self.dead = [], [], asyncio.Event()
        self.dies_in = ""
        """A route that is never answered; the engine is dead then."""
        self.refuses = ""
        """A route that is answered with an error."""

    async def __aenter__(self):
        async def record(request):
            self.calls.append(request.path)
            if request.path == self.dies_in:
                self.dead.set()
                await asyncio.Event().wait()
            refused = self.dead.is_set() or request.path == self.refuses
            return web.json_response({"seconds": 0.1, "prefilled_again": 7}, status=500 if refused else 200)

        app = web.Application()
        app.router.add_route("*", "/{route:.*}", record)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        timeline = Timeline(self._folder / "timeline", "engine-0")
        self.engine = Engine(0, EngineClient("engine-0", f"http://127.0.0.1:{port}", "token", 5), timeline)
        self.engine.state = EngineState.READY
        self.link = EngineUpdates(self.config, {}, self.engine, lambda engine: self.committed.append(engine.version))
        self.running = asyncio.create_task(self.link.run())
        return self

    async def __aexit__(self, *_):
        self.running.cancel()
        await self.engine.client.close()
        await self._runner.cleanup()

    async def update(self, version, error="", changed=1.0):
        """Publishes a version, lets its delivery succeed or fail, and waits for what the link makes of it."""
        self.calls.clear()
        link = self.link.publish(Publish(version, "127.0.0.1:1"))
        while "/start_weight_update" not in self.calls:
            await asyncio.sleep(0.01)
        while_receiving = self.engine.state
        assert link.few_changes == (while_receiving == "ready" and self.config.reshard.staging == "streamed")
        self.link.delivered(Delivered(0, link.generation, version, 0.1, 100, error, changed))
        await self.link.settled()
        return while_receiving, link.generation

    def may_take_a_group(self):
        schedule = Schedule(batch_size=4, group_size=GROUP, max_staleness=0, updates=10)
        schedule.add_engine(0, 0)
        sampler = SimpleNamespace(engines=[self.engine])
        generation = Generation(self.config, schedule, sampler, [], Changed())
        return next(generation._free_engines(), None) is self.engine


def test_a_streamed_update_that_fails_tears_its_engine_until_a_whole_version_has_come(tmp_path):
    async def play():
        async with Scene(tmp_path, "streamed") as scene:
            assert scene.may_take_a_group()
            assert await scene.update(1) == ("receiving", 1)
            assert (scene.engine.state, scene.committed) == ("ready", [1])

            await scene.update(2, error="a trainer died")
            assert (scene.engine.state, scene.engine.version, scene.link.failures) == ("torn", 1, 1)
            assert not {"/resume", "/commit"} & set(scene.calls) and "/pause" in scene.calls
            with pytest.raises(EngineError, match="every engine holds a mixture of versions"):
                scene.may_take_a_group()

            assert await scene.update(3) == ("receiving", 2)
            assert (scene.engine.state, scene.committed) == ("ready", [1, 3])
            assert scene.calls[-1] == "/commit" and scene.calls.count("/init_weight_transfer_engine") == 1
            assert scene.may_take_a_group()

    asyncio.run(asyncio.wait_for(play(), 300))


def test_a_first_version_that_fails_while_it_streams_in_does_not_end_the_run(tmp_path):
    """The engine began without weights, so that no batch depends on it: the trainers can publish the version again."""

    async def play():
        async with Scene(tmp_path, "streamed") as scene:
            scene.engine.version = -1
            await scene.update(0, error="a trainer was slow")
            assert (scene.engine.state, scene.engine.version) == ("torn", -1)
            assert not scene.may_take_a_group()
            await scene.update(0)
            assert scene.committed == [0] and scene.may_take_a_group()

    asyncio.run(asyncio.wait_for(play(), 300))


def test_a_full_update_that_fails_costs_nothing_but_the_version(tmp_path):
    async def play():
        async with Scene(tmp_path, "full") as scene:
            assert await scene.update(1) == ("ready", 1)
            await scene.update(2, error="a trainer died")
            assert (scene.engine.state, scene.engine.version, scene.committed) == ("ready", 1, [1])
            assert not {"/pause", "/commit"} & set(scene.calls) and scene.may_take_a_group()
            assert await scene.update(3) == ("ready", 2)
            assert scene.committed == [1, 3]

    asyncio.run(asyncio.wait_for(play(), 300))


@pytest.mark.parametrize(
    ("staging", "state", "last"), [("full", "ready", "/resume"), ("streamed", "torn", "/finish_weight_update")]
)
def test_an_engine_that_refuses_a_commit_goes_on_only_with_whole_weights(tmp_path, staging, state, last):
    async def play():
        async with Scene(tmp_path, staging) as scene:
            scene.refuses = "/commit"
            await scene.update(1)
            assert (scene.engine.state, scene.committed, scene.link.failures) == (state, [], 1)
            assert "/update_weights" in scene.calls and scene.calls[-1] == last
            scene.refuses = ""
            assert await scene.update(2) == ("receiving" if staging == "streamed" else "ready", 2)
            assert (scene.engine.state, scene.committed) == ("ready", [2]) and scene.link.last["commit_s"] > 0

    asyncio.run(asyncio.wait_for(play(), 300))


def test_a_streamed_engine_generates_while_few_changes_arrive_and_keeps_its_weights_if_they_fail(tmp_path):
    async def play():
        async with Scene(tmp_path, "streamed") as scene:
            assert await scene.update(1, changed=0.01) == ("receiving", 1)
            assert await scene.update(2, changed=0.01) == ("ready", 1)
            assert "/pause" not in scene.calls and scene.calls[-1] == "/commit"
            assert scene.committed == [1, 2] and scene.link.last["commit_s"] == 0.1, "as the engine says"

            assert await scene.update(3, error="more changes came than there is room for") == ("ready", 1)
            assert (scene.engine.state, scene.engine.version, scene.link.failures) == ("ready", 2, 1)
            assert not {"/pause", "/commit", "/resume"} & set(scene.calls) and scene.may_take_a_group()
            assert await scene.update(4, changed=0.01) == ("receiving", 2), "what changes is known no more"

            scene.refuses = "/commit"
            assert await scene.update(5, changed=0.01) == ("ready", 2)
            assert (scene.engine.state, scene.engine.version, scene.link.failures) == ("ready", 4, 2)
            assert "/update_weights" in scene.calls and scene.calls[-1] == "/resume" and scene.may_take_a_group()
            scene.refuses = ""
            assert await scene.update(6, changed=0.01) == ("receiving", 3)
            assert await scene.update(7, changed=0.03) == ("ready", 3)
            assert await scene.update(8, changed=0.01) == ("receiving", 3), "too much had changed"
            assert scene.committed == [1, 2, 4, 6, 7, 8] and scene.engine.state == "ready"
            assert (scene.link.take_prefilled_again(), scene.link.take_prefilled_again()) == (6 * 7, 0)

    asyncio.run(asyncio.wait_for(play(), 300))


def test_a_lost_engine_lacks_nothing_until_it_is_back_and_then_opens_another_epoch(tmp_path):
    async def play():
        async with Scene(tmp_path, "full") as scene:
            await scene.update(1)
            assert not scene.link.lacks(1) and scene.link.lacks(2)
            scene.calls.clear()
            first = scene.link.publish(Publish(2, "127.0.0.1:1"))
            while "/start_weight_update" not in scene.calls:
                await asyncio.sleep(0.01)
            assert not scene.link.lacks(2), "it is on its way"
            assert not scene.link.is_cut(first.generation)
            scene.engine.leave(EngineState.LOST)
            scene.link.cut("it was killed")
            await scene.link.settled()
            assert (scene.committed, scene.link.failures, scene.engine.state) == ([1], 1, "lost")
            assert not scene.link.lacks(2) and scene.link.is_cut(first.generation)
            scene.link.delivered(Delivered(0, first.generation, 2, 0.1, 100))  # too late

            scene.engine.state = EngineState.READY
            assert scene.link.lacks(2)
            assert await scene.update(2) == ("ready", first.generation + 1)
            assert scene.committed == [1, 2] and not scene.link.lacks(2)
            assert scene.link.is_cut(first.generation) and not scene.link.is_cut(first.generation + 1)

    asyncio.run(asyncio.wait_for(play(), 300))


@pytest.mark.parametrize("route", ["/start_weight_update", "/commit"])
def test_a_link_that_is_cancelled_ends_though_its_engine_dies_in_that_moment(tmp_path, route):
    """As where one signal ends the whole job: it is cancelled in a call, and every later one fails."""

    async def play():
        async with Scene(tmp_path, "full") as scene:
            scene.dies_in = route
            update = asyncio.create_task(scene.update(1))
            await scene.dead.wait()
            scene.running.cancel()
            await asyncio.wait([scene.running], timeout=5)
            assert scene.running.cancelled()
            update.cancel()

    asyncio.run(asyncio.wait_for(play(), 300))


def test_an_engine_may_be_lost_after_trainers_that_reported_nothing(tmp_path):
    """The wait for their report has ended, and its end must not be told a second time."""

    async def play():
        async with Scene(tmp_path, "full") as scene:
            scene.config.reshard.timeout_s = 0.1
            link = scene.link.publish(Publish(1, "127.0.0.1:1"))
            await asyncio.wait_for(scene.link.settled(), 30)
            assert scene.link.failures == 1
            scene.link.cut("the process has ended")
            scene.link.delivered(Delivered(0, link.generation, 1, 0.1, 100))  # too late
            scene.config.reshard.timeout_s = 5
            assert await scene.update(2) == ("ready", link.generation + 1)
            assert scene.committed == [2]

    asyncio.run(asyncio.wait_for(play(), 300))
