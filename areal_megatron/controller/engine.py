"""An engine as the controller sees it: what it is doing, which version it has, how idle it was."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from areal_megatron.config import Config
from areal_megatron.controller.changed import Changed
from areal_megatron.engine.client import EngineClient, EngineError, Load
from areal_megatron.observe.status import EngineState, EngineStatus
from areal_megatron.observe.timeline import Timeline
from areal_megatron.process.lateness import now
from areal_megatron.run.folder import RunFolder
from areal_megatron.run.process_names import engine_name

log = logging.getLogger(__name__)
_POLL_S = 2.0
_POLLS_PER_S = 400
"""The most that all engines together are asked for their counters: of thousands, each is asked less often."""
_ARRIVES_S = 0.2
"""How long a request may take to show up in the engine's counters: until then it would look ended."""
_ONCE_MORE_S = 10.0
"""How long an engine that has not told its load may take when it is asked once more."""


class Engine:
    """One engine. `version` is what the controller has seen it commit; the engine itself is never behind that."""

    def __init__(
        self,
        index: int,
        client: EngineClient,
        timeline: Timeline,
        changed: Changed | None = None,
        room: float = math.inf,
    ):
        """`room`: with more trajectories than this it is full."""
        self.index, self.name, self.client, self.timeline = index, client.name, client, timeline
        self.changed = changed or Changed()
        """Notified when the engine may have room for another request, and when it is torn."""
        self.version = 0
        self.state = EngineState.STARTING
        self.losses = 0
        """How often it has died or stopped answering."""
        self.draining = False
        """It gets no further prompt."""
        self.unreached = False
        """Weights do not reach it (updates.py)."""
        self._unfinished = 0
        self._started = 0
        self._ended = 0
        self.tokens_per_s = 0.0
        self._idle_since: float | None = time.monotonic()
        self._idle_s = 0.0
        self._room, self._waiting = room, 0
        self._full_s, self._tallied = 0.0, time.monotonic()

    @property
    def running(self) -> int:
        """Trajectories on it, training and evaluation.

        A group answers as a whole, when its longest answer ends: until then the engine's own counters, polled
        now and then, tell how many of its answers have ended and left room for others.
        """
        return min(self._unfinished, self._started - self._ended)

    @property
    def busy(self) -> bool:
        """Whether it owes an answer."""
        return self._unfinished > 0

    @property
    def site(self) -> str:
        """host:port of its server if it is at another site, or "": only such a one speaks TLS."""
        scheme, _, address = self.client.endpoint.partition("://")
        return address if scheme == "https" else ""

    @property
    def gone(self) -> bool:
        return self.state.gone

    @property
    def status(self) -> EngineStatus:
        return EngineStatus(
            name=self.name,
            state=self._shown_state,
            version=self.version,
            running=self.running,
            losses=self.losses,
            tokens_per_s=round(self.tokens_per_s, 1),
        )

    @property
    def _shown_state(self) -> EngineState:
        if self.unreached and not self.gone:
            return EngineState.UNREACHED
        return EngineState.WAITING if self.state == EngineState.READY and self.version < 0 else self.state

    def occupy(self, trajectories: int) -> None:
        """Counts `trajectories` as running here until `release`."""
        if self._idle_since is not None:
            self._idle_s += time.monotonic() - self._idle_since
            self._idle_since = None
        self._tally()
        self._unfinished += trajectories
        self._started += trajectories

    def release(self, trajectories: int) -> None:
        self._tally()
        self._unfinished -= trajectories
        if not self._unfinished:
            self._idle_since = time.monotonic()
        self.changed.notify()

    def take_idle_s(self) -> float:
        """Seconds without a running request since the last call."""
        now = time.monotonic()
        idle, self._idle_s = self._idle_s, 0.0
        if self._idle_since is not None:
            idle += now - self._idle_since
            self._idle_since = now
        return idle

    def take_full_s(self) -> float:
        """Seconds since the last call in which it had no room for another group, or kept requests waiting for memory,
        as far as the controller knows."""
        self._tally()
        full, self._full_s = self._full_s, 0.0
        return full

    def _tally(self) -> None:
        """Counts the time until now; to be called before what it runs changes."""
        now = time.monotonic()
        if self.running > self._room or (self._waiting and self.running):
            self._full_s += now - self._tallied
        self._tallied = now

    def tear(self) -> None:
        """A streamed update has failed half-way."""
        self.state = EngineState.TORN
        self.changed.notify()

    def leave(self, state: EngineState) -> None:
        """The engine is LOST or DRAINED: it holds no version, and gets nothing until another process takes its
        place."""
        self.state, self.version, self.tokens_per_s = state, -1, 0.0
        self.losses += state == EngineState.LOST

    async def return_as(self, client: EngineClient) -> None:
        """Another process serves in its place."""
        await self.client.close()
        self.client, self.state, self._ended, self.draining = client, EngineState.READY, self._started, False

    async def wait_until_ready(self, timeout_s: float) -> None:
        await self.client.wait_until_healthy(timeout_s)
        self.state = EngineState.READY

    async def watch(self, timeout_s: float, silence_s: float, engines: int = 1) -> None:
        """Polls the counters of the engine, one of `engines`, until it is gone. Raises EngineError if it dies, says
        nothing for silence_s or samples nothing for timeout_s."""
        poll_s = max(_POLL_S, engines / _POLLS_PER_S)
        await asyncio.sleep(poll_s * (self.index % engines) / engines)  # all at once would hold everything else up
        tokens, seen, progress = None, now(), now()
        while not self.gone:
            started = self._started
            await asyncio.sleep(_ARRIVES_S)
            load = await self._load(silence_s)
            at = now()
            held = load.running + load.waiting
            self._tally()
            self._waiting = load.waiting
            self._ended = started - held
            self.changed.notify()
            if tokens is not None:
                self.tokens_per_s = (load.generated_tokens - tokens) / (at - seen)
            if load.generated_tokens != tokens or not held or self.state == EngineState.RECEIVING:
                progress = at
            elif at - progress > timeout_s:
                raise EngineError(f"{self.name} holds {held} requests but has sampled nothing for {timeout_s:.0f} s")
            tokens, seen = load.generated_tokens, at
            await asyncio.sleep(poll_s - _ARRIVES_S)

    async def _load(self, silence_s: float) -> Load:
        try:
            return await self.client.load(silence_s)
        except EngineError as e:  # perhaps only of the connection, which may have broken while this process was away
            log.warning("%s is asked once more: %s", self.name, e)
            return await self.client.load(min(silence_s, _ONCE_MORE_S))


def connect(config: Config, run: RunFolder, index: int, changed: Changed | None = None) -> Engine:
    """The engine of this index, where it has announced itself last. Raises RunError if it has not."""
    name = engine_name(index)
    client = connector(config, run)(name, run.endpoint(name))
    return Engine(index, client, Timeline(run.timeline(name), name), changed, room_of(config))


def room_of(config: Config) -> int:
    """Returns the most trajectories with which an engine takes another group."""
    return config.rollout.max_running - config.rollout.group_size


def connector(config: Config, run: RunFolder) -> Callable[[str, str], EngineClient]:
    """Returns what makes a connection to the engine of a name that has announced itself at an endpoint.

    It has read the run's secret and credentials already: a controller that was replaced unnoticed must not know the
    next one's. Raises ConfigError if others may use them.
    """
    token, tls = run.token, run.credentials.calling()
    return lambda name, endpoint: EngineClient(name, endpoint, token, config.machine.peer_timeout_s, tls)
