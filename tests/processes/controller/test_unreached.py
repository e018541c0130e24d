"""An engine whose network carries requests but no weights, beside one that is whole, with a real publisher."""

import asyncio
import json
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import torch
from aiohttp import web

from areal_megatron.config import Config, DataConfig, MachineConfig, ModelConfig, ReshardConfig, RolloutConfig
from areal_megatron.controller import updates
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.fleet import Fleet
from areal_megatron.controller.schedule import Schedule
from areal_megatron.engine.client import EngineError
from areal_megatron.observe.timeline import Timeline
from areal_megatron.protocol import Delivered, NotYet, Publish
from areal_megatron.reshard import engine_layout, trainer_layout
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.messages import EngineReady
from areal_megatron.reshard.outlet import TrainerRank
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.publish import Publisher
from areal_megatron.reshard.reception import Inlet, Reception
from areal_megatron.reshard.session import LinkInfo
from areal_megatron.reshard.staging import Full, Shard
from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.run.folder import RunFolder
from tests.support.link_store import open_store
from tests.support.reshard_oracle import CONFIG
from tests.support.routes import served

BUCKET = 4000
"""Elements of a message: dozens of them."""
TIMEOUT_S = 2.0
TRIAL_S = 1.5
STEP_S = 0.5


class StandInEngine:
    """The routes of an engine around the real end of a link. While it is `broken` it joins the link and says that it is
    ready, but no trainer gets through, as where a firewall is between the ports of the links. With a `complaint` it
    also says at once that it has given up, as where connections are refused."""

    def __init__(self, broken=False, complaint=""):
        shapes = engine_layout.layout(CONFIG, EngineSizes(), 0).parameters
        self.parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self._shard = Shard(self.parameters, Full.reserve(self.parameters), EngineSizes(), 0)
        self.broken, self.complaint, self.version = broken, complaint, -1
        self._inlet = self._update = None
        self.joined = 0

    @asynccontextmanager
    async def serving(self):
        async with served(self._answer) as address:
            yield address
        self._end_link()

    def _end_link(self):
        if self._inlet:
            self._inlet.end()

    async def _answer(self, request):
        body, reply = await request.read(), {"seconds": 0.0}
        match request.path:
            case "/metrics":
                return web.Response(text="vllm:num_requests_running 0\nvllm:generation_tokens_total 1\n")
            case "/init_weight_transfer_engine":
                self.joined += 1
                self._end_link()
                info = LinkInfo(**json.loads(body)["init_info"] | {"bucket_elements": BUCKET})
                self._inlet = Inlet(self._shard, info, log=lambda _: None)
            case "/start_weight_update" if self.broken:
                await asyncio.to_thread(self._inlet._joining.join)
                self._inlet.link.carrier._listener._greet = lambda *_: None  # who connects is never answered
                self._inlet.link.say("ready/1/0", EngineReady(self._inlet.digest, "", None))
                if self.complaint:
                    self._inlet.link.say_failed(1, self.complaint)
            case "/start_weight_update":
                self._update = Reception(self._inlet, after=self._update)
            case "/commit":
                if problem := await asyncio.to_thread(self._update.problem):
                    return web.json_response({"error": problem}, status=500)
                self._update.commit()
                self.version = int(json.loads(body)["version"])
        return web.json_response(reply)


class Events:
    def lost(self, engine): ...

    def committed(self, version): ...


@dataclass
class Published:
    """One update of trainers, in seconds."""

    engines: list[int]
    """Which it was published to."""
    read: float
    """From its publish until parameters might change."""
    held: float
    """For how much of that a trainer had nothing to do."""


class Training:
    """A trainer rank that publishes every version, works for STEP_S, and waits until its parameters may change."""

    def __init__(self, folder, fleet, schedule, store):
        self._fleet, self._schedule, self._loop = fleet, schedule, asyncio.get_running_loop()
        self._open, self._store = store, f"127.0.0.1:{store.port}"
        shapes = trainer_layout.layout(CONFIG, MegatronSizes(), 0).parameters
        self._live = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self._timeline = Timeline(folder / "timeline.jsonl", "trainer-0")
        self._publisher = Publisher(
            TrainerRank(
                parameters=lambda: self._live,
                planner=Planner(CONFIG, MegatronSizes(), EngineSizes(), BUCKET),
                rank=0,
                dtype=torch.float32,
                store=self._store,
                on_delivered=self._delivered,
                timeline=self._timeline,
                reshard=ReshardConfig(timeout_s=TIMEOUT_S, update="full"),
            )
        )

    def _delivered(self, engine, generation, version, seconds, received, error):
        message = Delivered(engine, generation, version, seconds, received.bytes, error, received.changed)
        self._loop.call_soon_threadsafe(self._fleet.delivered, message)

    async def update(self) -> Published:
        """Trains and publishes another version, and makes the step that follows."""
        self._schedule.version += 1
        return await self.publish()

    async def publish(self):
        """As `update`, with the version that there is."""
        version = self._schedule.version
        for tensor in self._live.values():
            tensor.fill_(version)
        while isinstance(links := await self._fleet.publish(Publish(version, self._store)), NotYet):
            pass
        links = links.links
        begin = time.monotonic()
        self._publisher.publish(version, links)
        await asyncio.sleep(STEP_S)
        done = time.monotonic()
        await asyncio.to_thread(self._publisher.wait_until_read)
        read = time.monotonic()
        await asyncio.sleep(0.2)  # for the reports to arrive
        return Published([link.engine for link in links], read - begin, read - done)

    def close(self):
        self._publisher.close()
        self._timeline.close()


@asynccontextmanager
async def scene(folder, engines, first=2, first_weights="model"):
    """A fleet with `first` engines from the start; the others are to be announced."""
    run = RunFolder(folder / "run")
    run.create()
    config = Config(
        name="run",
        updates=100,
        batch_size=4,
        model=ModelConfig("m", "float32"),
        data=DataConfig("d"),
        machine=MachineConfig(peer_timeout_s=20),
        rollout=RolloutConfig(group_size=2, engines=first, max_staleness=100, first_weights=first_weights),
        reshard=ReshardConfig(timeout_s=TIMEOUT_S, update="full"),
    )
    schedule = Schedule(batch_size=4, group_size=2, max_staleness=100, updates=100)
    async with engines[0].serving() as one, engines[1].serving() as two:
        endpoints = [one, two]
        for index in range(first):
            run.announce(f"engine-{index}", endpoints[index])
        fleet = Fleet(config, run, CONFIG, schedule, Changed(), Events())
        await fleet.connect()
        running, training = asyncio.create_task(fleet.run()), Training(folder, fleet, schedule, open_store())
        try:
            yield run, fleet, training, endpoints
        finally:
            if running.done():
                running.result()
            running.cancel()
            await asyncio.to_thread(training.close)
            await fleet.close()
            for engine in fleet.engines:
                engine.timeline.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(updates, "_FIRST_TRIAL_S", TRIAL_S)


def test_an_engine_that_weights_do_not_reach_holds_the_trainers_twice_and_no_more(tmp_path):
    async def play():
        whole, broken = StandInEngine(), StandInEngine(broken=True)
        async with scene(tmp_path, [whole, broken]) as (_, fleet, training, _):
            updates = [await training.update() for _ in range(2)]
            assert min(update.read for update in updates) > TIMEOUT_S - 0.5, "the fault holds the step that follows"
            assert fleet.engines[1].status.state == "unreached" and fleet.account(1)["engines_unreached"] == 1

            updates = [await training.update() for _ in range(8)]
            assert max(update.held for update in updates) < 0.5, "neither the updates nor the trials hold anybody up"
            tried = [number for number, update in enumerate(updates) if 1 in update.engines]
            assert tried and tried[0] > 0 and all(0 in update.engines for update in updates)
            assert len(tried) < 4 and broken.joined == 2 + len(tried), "now and then"
            assert whole.version == fleet.engines[0].version == 10

            broken.broken = False
            deadline = time.monotonic() + 30
            while fleet.engines[1].unreached:
                assert time.monotonic() < deadline
                assert (await training.update()).held < 0.5
            await training.update()
            assert broken.version == whole.version == fleet.engines[1].version
            held = {value for tensor in broken.parameters.values() for value in tensor.unique().tolist()}
            assert held == {0.0, float(whole.version)}, "whole and of one version; 0 is the vocabulary's padding"
            assert fleet.engines[1].status.state == "ready"

    asyncio.run(asyncio.wait_for(play(), 300))


def test_an_engine_that_gives_up_holds_the_trainers_for_a_moment(tmp_path, monkeypatch):
    """The trainer's own thread stays inside a message until the timeout: nobody waits for it, nor the next update."""
    monkeypatch.setattr(sys.modules[__name__], "TIMEOUT_S", 15.0)

    async def play():
        whole, broken = StandInEngine(), StandInEngine(broken=True, complaint="connection refused")
        async with scene(tmp_path, [whole, broken]) as (_, fleet, training, _):
            updates = [await training.update() for _ in range(4)]
            assert max(update.held for update in updates) < 5 and broken.joined == 2
            assert fleet.engines[1].status.state == "unreached" and whole.version == 4
            broken.complaint = ""

    asyncio.run(asyncio.wait_for(play(), 300))


def test_an_added_engine_that_trainers_cannot_reach_does_not_end_the_run(tmp_path):
    """It serves, so it is taken in and lacks weights; strangers' files beside it are no engines."""

    async def play():
        whole, broken = StandInEngine(), StandInEngine(broken=True)
        async with scene(tmp_path, [whole, broken], first=1) as (run, fleet, training, endpoints):
            for name in ("engine-1.bak", "engine-", "engine-x", "engine-1.1", ".engine-1.77", "engine-0~"):
                run.announce(name, "not an endpoint")
            await training.update()
            run.announce("engine-1", endpoints[1])
            asked = 0

            def publish_again():
                nonlocal asked
                asked += 1
                return True

            deadline = time.monotonic() + 40
            while len(fleet.engines) < 2 or not fleet.engines[1].unreached:
                assert time.monotonic() < deadline
                fleet.bring_weights(publish_again)
                await training.update()
            assert asked and fleet.engines[1].status.state == "unreached"
            for _ in range(6):  # many more than an engine without weights may fail while it is the only one
                fleet.bring_weights(publish_again)
                assert (await training.update()).held < 0.5
            assert [engine.name for engine in fleet.engines] == ["engine-0", "engine-1"]
            assert whole.version == fleet.engines[0].version and fleet.engines[1].version == -1

    asyncio.run(asyncio.wait_for(play(), 300))


def test_an_engine_that_begins_without_weights_is_asked_nothing_before_they_have_arrived(tmp_path):
    """Neither at the launch nor when it dies and comes back: it would answer from random weights."""

    async def play():
        whole, broken = StandInEngine(), StandInEngine(broken=True)
        async with scene(tmp_path, [whole, broken], first_weights="trainers") as (run, fleet, training, _):
            schedule = fleet._schedule
            assert [engine.status.state for engine in fleet.engines] == ["waiting for weights"] * 2
            assert [engine.version for engine in fleet.engines] == [-1, -1] and not schedule.engines
            await training.publish()
            while not schedule.engines:
                await asyncio.sleep(0.02)
            assert schedule.engines == {0: 0} and whole.version == 0
            while not fleet._updates[1].failures:
                await asyncio.sleep(0.02)
            assert schedule.engines == {0: 0}
            assert [engine.status.state for engine in fleet.engines] == ["ready", "waiting for weights"]
            fleet._lose(fleet.engines[0], EngineError("it died"))
            schedule.remove_engine(0)  # the controller does, as it is told of the loss
            async with whole.serving() as elsewhere:
                run.announce("engine-0", elsewhere)
                while fleet.engines[0].gone:
                    await asyncio.sleep(0.02)
                await asyncio.sleep(1)
                assert not schedule.engines and fleet.engines[0].status.state == "waiting for weights"

    asyncio.run(asyncio.wait_for(play(), 300))
