"""Weight updates as the controller drives them: one link per engine, each on its own, in the background.

The trainers publish a version; each engine receives it into staging while it generates, and once the trainers
report the delivery it commits under a short pause. With `streamed` staging the pause begins before the first
message, unless few changes are expected (session.FEW_CHANGES). A failed link costs a new generation at the next
version and leaves its engine behind, or, if weights were streaming in, `torn`: it stays paused and gets no request
until it has a whole version again. The others do not notice.

An engine that several generations in a row have failed to reach, while another generates, is *unreached*: its network
carries requests but no weights. Each further update would hold the trainers up to reshard.timeout_s. So updates leave
it out, but for trials at growing intervals, for which no optimizer step waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from areal_megatron.config import Config
from areal_megatron.controller.engine import Engine
from areal_megatron.engine.client import EngineError
from areal_megatron.observe.status import EngineState
from areal_megatron.process.lateness import within
from areal_megatron.protocol import Delivered, Publish
from areal_megatron.reshard.session import FEW_CHANGES, LinkRef, init_body

log = logging.getLogger(__name__)
_UNREACHED_AFTER = 2
"""Generations in a row."""
_FIRST_TRIAL_S = 60.0
_LONGEST_TRIAL_S = 3600.0


@dataclass(eq=False)
class _Update:
    version: int
    generation: int
    store: str
    opens_generation: bool
    generates: bool
    """Whether the engine generates until all has arrived."""
    delivered: asyncio.Future[Delivered] = field(default_factory=asyncio.Future)


class EngineUpdates:
    """The updates of one engine, one after the other."""

    def __init__(
        self,
        config: Config,
        hf_config: Mapping[str, Any],
        engine: Engine,
        on_committed: Callable[[Engine], None],
        is_dispensable: Callable[[Engine], bool] = lambda _: False,
    ):
        """`on_committed` is called when the engine has `engine.version`; `is_dispensable` says whether others generate
        without it."""
        self._config, self._hf_config, self._engine = config, hf_config, engine
        self._on_committed, self._is_dispensable = on_committed, is_dispensable
        self._updates: asyncio.Queue[_Update] = asyncio.Queue()
        self._unfinished: list[_Update] = []
        self._generation = 0
        self._usable = False
        self._trial_s, self._next_trial = _FIRST_TRIAL_S, 0.0
        self.failed_in_a_row = 0
        """Generations that failed since the last commit of this process of the engine."""
        self.failures = 0
        self.last: dict[str, float] = {}
        """publish_s, commit_s (how long the engine was paused), weights_bytes and weights_changed of the last
        commit."""
        self._changed = 1.0
        """The share of elements that the last update sent; 1 if it failed."""
        self._prefilled_again = 0

    @property
    def is_due(self) -> bool:
        """Whether the engine is to get the next version: always, unless it is unreached and its trial is still to
        come."""
        return not self._engine.unreached or (not self._unfinished and time.monotonic() >= self._next_trial)

    def publish(self, message: Publish, trial: bool = False) -> LinkRef:
        """Enters a version as the next to receive and returns the link that is to carry it."""
        opens_generation = not self._usable
        if opens_generation:
            self._generation += 1
            self._usable = True
        reshard = self._config.reshard
        may_send_changes = self._config.may_send_changes(at_other_site=bool(self._engine.site))
        few = may_send_changes and self._changed <= FEW_CHANGES and not opens_generation
        few_changes = reshard.staging == "streamed" and few
        generates = reshard.staging == "full" or few
        update = _Update(message.version, self._generation, message.store, opens_generation, generates)
        self._unfinished.append(update)
        self._updates.put_nowait(update)
        index, generation, site = self._engine.index, self._generation, self._engine.site
        return LinkRef(index, generation, trial, may_send_changes, few_changes, site)

    def delivered(self, message: Delivered) -> None:
        for update in self._unfinished:
            is_meant = (update.generation, update.version) == (message.generation, message.version)
            if is_meant and not update.delivered.done():
                update.delivered.set_result(message)

    def take_prefilled_again(self) -> int:
        """Returns the tokens that the engine has prefilled again after updates, by the commits since the last call."""
        taken, self._prefilled_again = self._prefilled_again, 0
        return taken

    async def run(self) -> None:
        """Works through the published versions for ever."""
        while True:
            update = await self._updates.get()
            try:
                if update.generation == self._generation and self._usable:
                    await self._carry_out(update)
            except EngineError as e:
                self._fail(update, str(e))
            finally:
                self._unfinished.remove(update)
                self._updates.task_done()

    def lacks(self, version: int) -> bool:
        """Returns whether the engine could take `version`, and neither has it nor is about to get it."""
        under_way = any(update.version == version for update in self._unfinished)
        return not self._engine.gone and self._engine.version < version and not under_way

    def cut(self, reason: str) -> None:
        """The engine is lost: what is under way has failed, and the next version opens a new generation."""
        self._usable = False
        self._begin_count()
        for update in self._unfinished:
            if not update.delivered.done():
                update.delivered.set_exception(EngineError(reason))
                update.delivered.exception()  # nobody may be waiting for it yet

    def is_cut(self, generation: int) -> bool:
        """Returns whether nothing that is under way in this generation will ever be committed."""
        return generation != self._generation or not self._usable

    async def settled(self) -> None:
        """Returns when every published version was committed or has failed."""
        await self._updates.join()

    async def _carry_out(self, update: _Update) -> None:
        client, config = self._engine.client, self._config
        if update.opens_generation:
            await client.join_link(
                init_body(
                    config=config,
                    engine=self._engine.index,
                    generation=update.generation,
                    store=update.store,
                    hf_config=self._hf_config,
                    at_other_site=bool(self._engine.site),
                )
            )
        start = None
        if not update.generates:
            start = self._stop_for(EngineState.RECEIVING)
            await client.pause(clear_cache=False)
        await client.start_update()
        try:
            # The trainers give up after timeout_s and say so; longer silence means that one is dead. All limits that
            # are derived from timeout_s: reshard/transport.py.
            delivered = await within(2 * config.reshard.timeout_s, update.delivered)
        except TimeoutError:
            raise EngineError(
                f"the trainers did not report the delivery of version {update.version} to "
                f"{self._engine.name} within {2 * config.reshard.timeout_s:.0f} s"
            ) from None
        if delivered.error:
            await client.abandon_update()
            self._fail(update, delivered.error)
            return
        if start is None:
            start = self._stop_for(EngineState.COMMITTING)
        stood_s = await self._commit(update)
        end = time.time_ns()
        self._engine.timeline.event("commit", start, end, version=update.version)
        if not self._usable:
            raise EngineError(f"{self._engine.name} was lost while it committed version {update.version}")
        commit_s = stood_s if update.generates else (end - start) / 1e9
        self._changed = delivered.changed
        self.last = {
            "publish_s": delivered.seconds,
            "commit_s": commit_s,
            "weights_bytes": delivered.bytes,
            "weights_changed": delivered.changed,
        }
        self._engine.version = update.version
        if self._engine.unreached:
            log.warning("weights reach %s again", self._engine.name)
        self._begin_count()
        self._on_committed(self._engine)

    def _stop_for(self, state: EngineState) -> int:
        """Returns when the stop began, in ns of the wall clock."""
        if self._engine.gone:
            raise EngineError(f"{self._engine.name} was lost")
        self._engine.state = state
        return time.time_ns()

    async def _commit(self, update: _Update) -> float:
        """Returns for how many seconds the engine was paused."""
        client = self._engine.client
        try:
            committed = await client.commit(update.version, clear_cache=self._config.rollout.kv_policy == "recompute")
        except EngineError:
            with contextlib.suppress(EngineError):  # the first says more
                await client.abandon_update()
            if update.generates:  # it has whole weights, the old ones
                await client.resume()
                self._resume()
            raise
        self._resume()
        self._prefilled_again += committed.prefilled_again
        return committed.seconds

    def _resume(self) -> None:
        if not self._engine.gone:
            self._engine.state = EngineState.READY

    def _fail(self, update: _Update, reason: str) -> None:
        self.failures += 1
        self._changed = 1.0
        if self._engine.state == EngineState.RECEIVING:
            self._engine.tear()
        if update.generation == self._generation:
            self._usable = False
        log.error(
            "%s stays at version %d: version %d did not arrive in generation %d: %s",
            self._engine.name,
            self._engine.version,
            update.version,
            update.generation,
            reason,
        )
        if not self._engine.gone:
            self._count_failure()

    def _count_failure(self) -> None:
        self.failed_in_a_row += 1
        if self.failed_in_a_row < _UNREACHED_AFTER or not (
            self._engine.unreached or self._is_dispensable(self._engine)
        ):
            return
        if self._engine.unreached:
            self._trial_s = min(2 * self._trial_s, _LONGEST_TRIAL_S)
        self._engine.unreached, self._next_trial = True, time.monotonic() + self._trial_s
        log.error(
            "%s answers, but weights did not reach it %d times in a row: updates leave it out; next trial in %.0f s",
            self._engine.name,
            self.failed_in_a_row,
            self._trial_s,
        )

    def _begin_count(self) -> None:
        self._engine.unreached, self.failed_in_a_row, self._trial_s = False, 0, _FIRST_TRIAL_S
