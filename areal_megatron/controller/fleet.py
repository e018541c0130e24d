"""The engines of a run: which of them serve, were lost, came back, were added or drained, and which lack weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Container, Mapping
from typing import Any, Protocol

from areal_megatron.config import Config
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.engine import Engine, connect, connector, room_of
from areal_megatron.controller.service import Refusal
from areal_megatron.controller.updates import EngineUpdates
from areal_megatron.engine.client import EngineClient, EngineError
from areal_megatron.observe.status import EngineState
from areal_megatron.observe.timeline import Timeline
from areal_megatron.process.lateness import now, within
from areal_megatron.protocol import Delivered, Links, NotYet, Publish, Sending
from areal_megatron.run.folder import RunError, RunFolder
from areal_megatron.run.process_names import engine_index, engine_name

log = logging.getLogger(__name__)
_POLL_S = 0.5
_ATTEMPTS = 3


class EngineEvents(Protocol):
    """Receives news of the engines; the controller does."""

    def lost(self, engine: Engine) -> None:
        """The engine was lost, or is drained: what runs on it is to be sampled elsewhere."""

    def committed(self, version: int) -> None:
        """Every engine that serves has `version` or a later one."""


class EngineVersions(Protocol):
    """The part of Schedule that Fleet needs: the version that was published last, and those that engines serve."""

    version: int

    @property
    def engines(self) -> Container[int]: ...
    def add_engine(self, engine: int, version: int) -> None: ...
    def committed(self, engine: int, version: int) -> None: ...


class Fleet:
    """Connects to the engines and looks after them; one that is lost gets nothing until another process serves."""

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        hf_config: Mapping[str, Any],
        schedule: EngineVersions,
        changed: Changed,
        events: EngineEvents,
    ):
        """`changed` is notified of what may allow another admission."""
        self._config, self._run, self._hf_config, self._schedule = config, run, hf_config, schedule
        self._changed, self._events = changed, events
        self._connect = connector(config, run)
        self._fresh = not run.start.checkpoint and not config.engines_start_empty
        """Whether engines begin with the weights of version 0, with which the run begins."""
        self.engines: list[Engine] = []
        self._updates: dict[int, EngineUpdates] = {}
        self._connected = asyncio.Event()
        self._published = -1
        self._announced: dict[str, str] = {}
        """Endpoints of engines that are new or gone, as the run folder said last."""
        self._to_drain: set[str] = set()
        self._gone: set[int] = set()
        """Engines that are lost or drained."""

    async def connect(self) -> None:
        """Waits until every engine of the config serves. Raises EngineError or RunError if one does not within
        rollout.start_timeout_s."""
        deadline = now() + self._config.rollout.start_timeout_s
        indices = range(self._config.rollout.engines)
        for index in indices:
            await asyncio.to_thread(self._run.endpoint, engine_name(index), max(0.0, deadline - now()))
        engines = [connect(self._config, self._run, index, self._changed) for index in indices]
        await asyncio.gather(*(e.wait_until_ready(max(1.0, deadline - now())) for e in engines))
        for engine in engines:
            await self._take_in(engine, fresh=self._fresh)
        self._connected.set()

    async def run(self) -> None:
        """Looks after the engines for ever. Raises EngineError if all are lost and none is started again within
        rollout.start_timeout_s."""
        async with asyncio.TaskGroup() as tasks:

            def look_after(engine: Engine) -> None:
                tasks.create_task(self._look_after(engine))
                tasks.create_task(self._updates[engine.index].run())

            for engine in self.engines:
                look_after(engine)
            while True:
                await asyncio.to_thread(self._look)
                for name in self._announced:
                    if (engine := await self._added(name)) is not None:
                        look_after(engine)
                for engine in self.engines:
                    self._drain(engine)
                await asyncio.sleep(_POLL_S)

    def _look(self) -> None:
        """Looks into the run folder, whose disk may hang, for engines that are new, back, or to be drained."""
        serving, announced = {engine.name for engine in self.engines if not engine.gone}, {}
        try:
            for name in set(self._run.announced_engines()) - serving:
                with contextlib.suppress(RunError):  # it has just been removed
                    announced[name] = self._run.endpoint(name)
            to_drain = self._run.to_drain()
        except OSError as e:
            log.warning("engines that join or leave are seen later: %s", e)
        else:
            self._announced, self._to_drain = announced, to_drain

    async def settled(self) -> None:
        """Returns when every published version was committed or has failed; nobody waits for trials."""
        for engine in self.engines:
            if engine.unreached:
                self._updates[engine.index].cut("the run is over")
        await asyncio.gather(*(updates.settled() for updates in self._updates.values()))

    async def close(self) -> None:
        for engine in self.engines:
            await engine.client.close()

    async def is_lost(self, engine: Engine, client: EngineClient, reason: EngineError) -> bool:
        """Returns whether a request to this client failed because its process is gone; then the engine is lost."""
        if not engine.gone and engine.client is client:
            try:
                await client.check_health(self._config.rollout.silence_s)
                return False
            except EngineError:
                if engine.client is client:  # no other process has taken its place meanwhile
                    self._lose(engine, reason)
        return True

    async def publish(self, message: Publish) -> Links | NotYet:
        """Returns the links that are to carry the version, or NotYet while engines start; a version published again
        goes only to engines without it."""
        with contextlib.suppress(TimeoutError):
            await within(self._config.machine.ask_again_s, self._connected.wait())
        if not self._connected.is_set():
            return NotYet()
        again, self._published = message.version == self._published, message.version
        present = [engine for engine in self.engines if not engine.gone]
        some_reached = not all(engine.unreached for engine in present)
        links = []
        for engine in present:
            updates = self._updates[engine.index]
            if (updates.lacks(message.version) or not again) and (updates.is_due or not some_reached):
                links.append(updates.publish(message, trial=engine.unreached and some_reached))
        return Links(links)

    def delivered(self, message: Delivered) -> None:
        if message.engine not in self._updates:
            raise Refusal(f"there is no engine {message.engine}")
        self._updates[message.engine].delivered(message)

    def cut(self, message: Sending) -> Links:
        """Returns the links whose engine will never commit the version on its way."""
        return Links([link for link in message.links if self._updates[link.engine].is_cut(link.generation)])

    def bring_weights(self, publish_again: Callable[[], bool]) -> None:
        """Has the current version published again if an engine serves without any, or is due for a trial. Raises
        EngineError after many attempts, if no engine has weights to generate with.

        `publish_again` returns False if the next version is on its way.
        """
        version = self._schedule.version
        if self._published != version:
            return
        lacking = [
            engine
            for engine in self.engines
            if (updates := self._updates[engine.index]).lacks(version)
            and (engine.version < 0 or engine.unreached)
            and updates.is_due
        ]
        tried = [engine.name for engine in lacking if self._updates[engine.index].failed_in_a_row > _ATTEMPTS]
        if tried and not self._schedule.engines:
            raise EngineError(
                f"{', '.join(tried)} did not get version {version}, and no other engine serves; see above"
            )
        if lacking:
            publish_again()

    def account(self, elapsed: float) -> dict[str, float]:
        """Returns figures of the last `elapsed` seconds and of the last commits."""
        serving = [engine for engine in self.engines if not engine.gone]
        idle, full = ([take(e) for e in serving] for take in (Engine.take_idle_s, Engine.take_full_s))
        last = [updates.last for updates in self._updates.values() if updates.last]
        account = {
            key: max(update[key] for update in last) for key in ("publish_s", "commit_s", "weights_changed") if last
        }
        account |= {"weights_bytes": sum(update["weights_bytes"] for update in last)} if last else {}
        return account | {
            "engines_serving": len(serving),
            "engines_unreached": sum(engine.unreached for engine in serving),
            "engine_idle_share": min(1.0, sum(idle) / max(len(idle), 1) / elapsed),
            "engine_full_share": min(1.0, sum(full) / max(len(full), 1) / elapsed),
            "engine_lag_max": max((self._schedule.version - engine.version for engine in serving), default=0),
            "prefilled_again": sum(updates.take_prefilled_again() for updates in self._updates.values()),
            "link_failures": sum(updates.failures for updates in self._updates.values()),
        }

    async def _take_in(self, engine: Engine, fresh: bool) -> None:
        """Adds one that serves; unless it is fresh from the model that the run begins with, it needs weights first.

        Raises EngineError if it does not do as it is told.
        """
        if not fresh:
            engine.version = -1
            await engine.client.take_over()  # it may have lived with the incarnation before
        self.engines.append(engine)
        self._updates[engine.index] = EngineUpdates(
            self._config, self._hf_config, engine, self._committed, self._is_dispensable
        )
        if fresh:
            self._schedule.add_engine(engine.index, engine.version)

    async def _added(self, name: str) -> Engine | None:
        """Takes in an engine that somebody has started for this run, if it is a new one that serves."""
        index = engine_index(name)
        if index in self._updates or (found := await self._serving(name)) is None:
            return None
        engine = Engine(index, found, Timeline(self._run.timeline(name), name), self._changed, room_of(self._config))
        engine.state = EngineState.READY
        try:
            await self._take_in(engine, fresh=False)
        except EngineError as e:
            log.warning("%s cannot be added yet: %s", name, e)
            engine.timeline.close()
            await found.close()
            return None
        log.warning("%s was added", name)
        return engine

    def _is_dispensable(self, engine: Engine) -> bool:
        """Returns whether another engine generates, and gets weights."""
        return any(
            other is not engine
            and other.index in self._schedule.engines
            and other.state != EngineState.TORN
            and not other.unreached
            for other in self.engines
        )

    def _drain(self, engine: Engine) -> None:
        """Takes the engine out, if somebody asks for that, once it has answered everything."""
        engine.draining = engine.name in self._to_drain and not engine.gone and self._has_another(engine)
        if engine.draining and not engine.busy:
            log.warning("%s is drained", engine.name)
            self._take_out(engine, EngineState.DRAINED, "it was drained")

    def _has_another(self, engine: Engine) -> bool:
        """Returns whether another engine stays: the last one has to generate."""
        return any(not (other is engine or other.gone or other.draining) for other in self.engines)

    async def _look_after(self, engine: Engine) -> None:
        rollout = self._config.rollout
        while True:
            try:
                await engine.watch(self._config.machine.peer_timeout_s, rollout.silence_s, len(self.engines))
            except EngineError as e:
                self._lose(engine, e)
            lost = now()
            while self._stays_away(engine) or not await self._is_back(engine):
                if len(self._gone) < len(self.engines):
                    lost = now()  # the others continue without it
                elif now() > lost + rollout.start_timeout_s:
                    timeout_s = rollout.start_timeout_s
                    raise EngineError(f"{engine.name} was lost and not started again within {timeout_s:.0f} s")
                await asyncio.sleep(_POLL_S)
            log.warning("%s is back", engine.name)
            if not self._schedule.version and self._fresh:
                engine.version = 0
                self._schedule.add_engine(engine.index, 0)
                self._changed.notify()

    def _stays_away(self, engine: Engine) -> bool:
        """Whether it is drained, and whoever asked for that still wants it."""
        return engine.state == EngineState.DRAINED and engine.name in self._to_drain

    async def _is_back(self, engine: Engine) -> bool:
        if (found := await self._serving(engine.name, besides=engine.client.endpoint)) is None:
            return False
        await engine.return_as(found)
        self._gone.discard(engine.index)
        return True

    async def _serving(self, name: str, besides: str = "") -> EngineClient | None:
        """A connection to the engine if it serves where it has announced itself, which is not `besides`."""
        endpoint = self._announced.get(name, besides)
        if endpoint == besides:
            return None
        found = self._connect(name, endpoint)
        try:
            await found.wait_until_healthy(0)
            return found
        except EngineError:
            await found.close()
            return None

    def _lose(self, engine: Engine, reason: EngineError) -> None:
        if not engine.gone:
            log.error("%s is lost: %s", engine.name, reason)
            self._take_out(engine, EngineState.LOST, str(reason))

    def _take_out(self, engine: Engine, state: EngineState, reason: str) -> None:
        engine.leave(state)
        self._gone.add(engine.index)
        self._updates[engine.index].cut(reason)
        self._events.lost(engine)

    def _committed(self, engine: Engine) -> None:
        index, version = engine.index, engine.version
        if index in self._schedule.engines:
            self._schedule.committed(index, version)
        else:
            self._schedule.add_engine(index, version)
        self._changed.notify()
        if all(engine.version >= version for engine in self.engines if not engine.gone and not engine.unreached):
            self._events.committed(version)
