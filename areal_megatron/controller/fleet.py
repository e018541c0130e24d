"""The engines of a run: which of them serve, were lost, came back, were added or drained, and which lack weights."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from areal_megatron.config import Config
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.engine import Engine, connect, find
from areal_megatron.controller.schedule import Schedule
from areal_megatron.controller.service import Refusal
from areal_megatron.controller.updates import EngineUpdates
from areal_megatron.engine.client import EngineClient, EngineError
from areal_megatron.observe.status import EngineState
from areal_megatron.protocol import Delivered, Links, Publish, Sending
from areal_megatron.run import Run, engine_index, engine_name

log = logging.getLogger(__name__)
_POLL_S = 0.5
_ATTEMPTS = 3


class EngineEvents(Protocol):
    """Receives news of the engines; the controller does."""

    def lost(self, engine: Engine) -> None:
        """The engine was lost, or is drained: what runs on it is to be sampled elsewhere."""

    def committed(self, version: int) -> None:
        """Every engine that serves has `version` or a later one."""


class Fleet:
    """Connects to the engines and looks after them; one that is lost gets nothing until another process serves."""

    def __init__(
        self,
        config: Config,
        run: Run,
        hf_config: Mapping[str, Any],
        schedule: Schedule,
        changed: Changed,
        events: EngineEvents,
    ):
        """`changed` is notified of what may allow another admission."""
        self._config, self._run, self._hf_config, self._schedule = config, run, hf_config, schedule
        self._changed, self._events = changed, events
        self._resumed = bool(run.start.checkpoint)
        self.engines: list[Engine] = []
        self._links: dict[int, EngineUpdates] = {}
        self._connected = asyncio.Event()
        self._published = -1
        self._lacking: Counter[int] = Counter()
        """How often the trainers were asked for a version, by engine that serves and has none."""

    async def connect(self) -> None:
        """Waits until every engine of the config serves."""
        timeout_s = self._config.machine.peer_timeout_s
        deadline = time.monotonic() + timeout_s
        indices = range(self._config.rollout.engines)
        for index in indices:
            await asyncio.to_thread(self._run.endpoint, engine_name(index), max(0.0, deadline - time.monotonic()))
        engines = [connect(self._config, self._run, index, self._changed) for index in indices]
        await asyncio.gather(*(e.wait_until_ready(max(1.0, deadline - time.monotonic())) for e in engines))
        for engine in engines:
            await self._take_in(engine, fresh=not self._resumed)
        self._connected.set()

    async def run(self) -> None:
        """Looks after the engines for ever. Raises EngineError if all are lost and none is started again within
        machine.peer_timeout_s."""
        async with asyncio.TaskGroup() as tasks:

            def look_after(engine: Engine) -> None:
                tasks.create_task(self._look_after(engine))
                tasks.create_task(self._links[engine.index].run())

            for engine in self.engines:
                look_after(engine)
            while True:
                for name in self._run.announced_engines():
                    if (engine := await self._added(name)) is not None:
                        look_after(engine)
                for engine in self.engines:
                    self._drain(engine)
                await asyncio.sleep(_POLL_S)

    async def settled(self) -> None:
        """Returns when every published version was committed or has failed."""
        await asyncio.gather(*(link.settled() for link in self._links.values()))

    async def close(self) -> None:
        for engine in self.engines:
            await engine.client.close()

    async def is_lost(self, engine: Engine, client: EngineClient, reason: EngineError) -> bool:
        """Returns whether a request to this client failed because its process is gone; then the engine is lost."""
        if not engine.gone and engine.client is client:
            try:
                await client.wait_until_healthy(0)
                return False
            except EngineError:
                self._lose(engine, reason)
        return True

    async def publish(self, message: Publish) -> Links:
        """Returns the links that are to carry the version; one that is published again goes to those who lack it."""
        await self._connected.wait()
        again, self._published = message.version == self._published, message.version
        taking = [
            self._links[e.index]
            for e in self.engines
            if (self._links[e.index].lacks(message.version) if again else not e.gone)
        ]
        return Links([link.publish(message) for link in taking])

    def delivered(self, message: Delivered) -> None:
        if message.engine not in self._links:
            raise Refusal(f"there is no engine {message.engine}")
        self._links[message.engine].delivered(message)

    def cut(self, message: Sending) -> Links:
        """Returns those of the links whose engine will never commit what is on its way."""
        return Links([link for link in message.links if self._links[link.engine].is_cut(link.generation)])

    def bring_weights(self, publish_again: Callable[[], bool]) -> None:
        """Has the current version published again if an engine serves without; raises EngineError after many attempts.

        `publish_again` returns False if the next version is on its way.
        """
        version = self._schedule.version
        lacking = [index for index in self._lacking if self._links[index].lacks(version)]
        if not lacking or not publish_again():
            return
        self._lacking.update(lacking)
        if tried := [engine_name(index) for index in lacking if self._lacking[index] > _ATTEMPTS]:
            raise EngineError(f"{', '.join(tried)} did not get version {version} after being started again; see above")

    def account(self, elapsed: float) -> dict[str, float]:
        """Returns figures of the last `elapsed` seconds and of the last commits."""
        serving = [engine for engine in self.engines if not engine.gone]
        idle = [engine.take_idle_s() for engine in serving]
        last = [link.last for link in self._links.values() if link.last]
        account = {key: max(update[key] for update in last) for key in ("publish_s", "commit_s") if last}
        account |= {"weights_bytes": sum(update["weights_bytes"] for update in last)} if last else {}
        return account | {
            "engines_serving": len(serving),
            "engine_idle_share": min(1.0, sum(idle) / max(len(idle), 1) / elapsed),
            "engine_lag_max": max((self._schedule.version - engine.version for engine in serving), default=0),
            "link_failures": sum(link.failures for link in self._links.values()),
        }

    async def _take_in(self, engine: Engine, fresh: bool) -> None:
        """Adds one that serves; unless it is fresh from the model that the run begins with, it needs weights first."""
        self.engines.append(engine)
        self._links[engine.index] = EngineUpdates(self._config, self._hf_config, engine, self._committed)
        if fresh:
            self._schedule.add_engine(engine.index, engine.version)
            return
        engine.version = -1
        await engine.client.take_over()  # it may have lived with the incarnation before

    async def _added(self, name: str) -> Engine | None:
        """Takes in an engine that somebody has started for this run, if it is a new one that serves."""
        index = engine_index(name)
        if index in self._links:
            return None
        if (found := await self._serving(name)) is None:
            return None
        await found.close()
        log.warning("%s was added", name)
        engine = connect(self._config, self._run, index, self._changed)
        engine.state = EngineState.READY
        await self._take_in(engine, fresh=False)
        self._lacking[index] = 0
        return engine

    def _drain(self, engine: Engine) -> None:
        """Takes the engine out once somebody has asked for that and it has answered everything."""
        others = [other for other in self.engines if other is not engine and not other.gone and not other.draining]
        if engine.gone or not others or not self._run.drain(engine.name).exists():
            return
        engine.draining = True
        if not engine.busy:
            log.warning("%s is drained", engine.name)
            self._take_out(engine, EngineState.DRAINED, "it was drained")

    async def _look_after(self, engine: Engine) -> None:
        timeout_s = self._config.machine.peer_timeout_s
        while True:
            try:
                await engine.watch(timeout_s)
            except EngineError as e:
                self._lose(engine, e)
            lost = time.monotonic()
            while engine.state == EngineState.DRAINED or not await self._is_back(engine):
                if not all(other.gone for other in self.engines):
                    lost = time.monotonic()  # the others continue without it
                elif time.monotonic() > lost + timeout_s:
                    raise EngineError(f"{engine.name} was lost and not started again within {timeout_s:.0f} s")
                await asyncio.sleep(_POLL_S)
            log.warning("%s is back", engine.name)
            if self._schedule.version or self._resumed:
                self._lacking[engine.index] = 0
            else:
                engine.version = 0
                self._schedule.add_engine(engine.index, 0)
                self._changed.notify()

    async def _is_back(self, engine: Engine) -> bool:
        if (found := await self._serving(engine.name, besides=engine.client.endpoint)) is None:
            return False
        await engine.return_as(found)
        return True

    async def _serving(self, name: str, besides: str = "") -> EngineClient | None:
        """A connection to the engine if it serves where it has announced itself, which is not `besides`."""
        found = find(self._config, self._run, name)
        try:
            if found.endpoint != besides:
                await found.wait_until_healthy(0)
                return found
        except EngineError:
            pass
        await found.close()
        return None

    def _lose(self, engine: Engine, reason: EngineError) -> None:
        if not engine.gone:
            log.error("%s is lost: %s", engine.name, reason)
            self._take_out(engine, EngineState.LOST, str(reason))

    def _take_out(self, engine: Engine, state: EngineState, reason: str) -> None:
        engine.leave(state)
        self._lacking.pop(engine.index, None)
        self._links[engine.index].cut(reason)
        self._events.lost(engine)

    def _committed(self, engine: Engine) -> None:
        index, version = engine.index, engine.version
        self._lacking.pop(index, None)
        if index in self._schedule.engines:
            self._schedule.committed(index, version)
        else:
            self._schedule.add_engine(index, version)
        self._changed.notify()
        if all(engine.version >= version for engine in self.engines if not engine.gone):
            self._events.committed(version)
