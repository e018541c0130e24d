"""The controller of a run: `python -m areal_megatron.rollout.controller --run RUN_DIR`.

One asyncio process without torch. It samples from the engines under the schedule, scores the answers, serves
batches to the trainers, drives the weight updates and evaluates. It ends with code 0 after the trainers' Bye and
the last evaluation, with code 1 and one line that names the process if anything fails, with code 2 for wrong input.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from areal_megatron import checkpoint_folder
from areal_megatron.address import address
from areal_megatron.config import Config, ConfigError, load
from areal_megatron.data.flops import SequenceFlops
from areal_megatron.data.prompts import read_prompts
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.observe.metrics import MetricsWriter, write_status
from areal_megatron.observe.timeline import Timeline
from areal_megatron.reshard.architectures import read_config
from areal_megatron.reward.workers import RewardWorkers
from areal_megatron.rollout import fleet, state
from areal_megatron.rollout.batches import Batches
from areal_megatron.rollout.client import EngineClient, EngineError
from areal_megatron.rollout.evaluation import Evaluation
from areal_megatron.rollout.fleet import LOST, Engine
from areal_megatron.rollout.generation import Generation
from areal_megatron.rollout.links import EngineLink
from areal_megatron.rollout.protocol import (
    Bye,
    Checkpoint,
    Delivered,
    Links,
    NextBatch,
    Ok,
    Publish,
    Refused,
    Reply,
    Request,
    Saved,
    Trained,
    Written,
)
from areal_megatron.rollout.schedule import Schedule
from areal_megatron.rollout.scoring import Scorer
from areal_megatron.rollout.service import Service
from areal_megatron.rollout.startup import Startup
from areal_megatron.run import Run, RunError, from_command_line

log = logging.getLogger(__name__)
_STATUS_S = 0.5
_ATTEMPTS = 3
_SHARE_OF_CONCURRENT_EVALUATION = 0.25
PROCESS = "controller"


class Controller:
    """Wires schedule, engines, rewards, batches and links together and lives through the phases of a run."""

    def __init__(self, config: Config, run: Run):
        self.config, self.run = config, run
        tokenizer = Tokenizer(config.model.path)
        prompts = read_prompts(config, "train", tokenizer)
        held_out = read_prompts(config, "eval", tokenizer) if config.data.eval else []
        self.hf_config = read_config(config.model.path)
        self.start = run.start
        self.schedule = Schedule(batch_size=config.batch_size, group_size=config.rollout.group_size,
                                 max_staleness=config.rollout.max_staleness,
                                 updates=config.updates - (self.start.batches - self.start.version))  # fmt: skip
        self.timeline = Timeline(run.timeline(PROCESS), PROCESS)
        self.metrics = MetricsWriter(run)
        self.rewards = RewardWorkers(config.reward)
        scorer = Scorer(config.reward, tokenizer, self.rewards)
        self.engines: list[Engine] = []
        self.links: list[EngineLink] = []
        self.generation = Generation(config, self.schedule, self.engines, prompts, tokenizer.stop_tokens, scorer,
                                     self.timeline, on_finished=lambda: self.batches.try_form(),
                                     is_lost=self._is_lost)  # fmt: skip
        self.batches = Batches(config, self.schedule, self.generation, SequenceFlops.of(self.hf_config),
                               self.start.batches)  # fmt: skip
        self.evaluation = Evaluation(config, self.engines, held_out, tokenizer.stop_tokens, scorer, self.timeline,
                                     self._is_lost)  # fmt: skip
        self.service = Service(address(config.machine.host), run.token, self._handle)
        self.phase = "starting engines"
        self.startup = Startup(self.start.time)
        self._connected = asyncio.Event()
        self._bye = asyncio.Event()
        self._last_update: dict[str, Any] = {}
        self._last_update_at = self._started_at = time.monotonic()
        self._tasks: asyncio.TaskGroup | None = None
        self._evaluations: set[asyncio.Task] = set()
        self._published = -1
        self._returned: Counter[int] = Counter()
        """Engines that were started again and have no version yet: how often the trainers were asked for it."""
        self._written_state: tuple[int, asyncio.Future | None] = (-1, None)
        """Version of the checkpoint asked for last, and the writing of this process's part."""
        if self.start.checkpoint:
            saved = state.read(Path(self.start.checkpoint) / "controller.msgpack", len(prompts), config.seed)
            self.generation.restore(saved)
            self.rewards.failures = saved.reward_failures
        if self.start.incarnation:  # of what came before, the versions up to this one count; without a checkpoint none
            version = self.start.version if self.start.checkpoint else -1
            self.metrics.write("resume", version, {"incarnation": self.start.incarnation})

    async def live(self) -> None:
        """From the first engine to the last evaluation. Raises EngineError, RunError or ConfigError."""
        await self.rewards.start()
        self.run.announce(PROCESS, self.service.endpoint)
        async with asyncio.TaskGroup() as self._tasks:
            background = [self._tasks.create_task(self.service.run()), self._tasks.create_task(self._keep_status())]
            bye = self._tasks.create_task(self._bye.wait())
            await self._connect()
            for engine, link in zip(self.engines, self.links, strict=True):
                background.append(self._tasks.create_task(self._look_after(engine)))
                background.append(self._tasks.create_task(link.run()))
            if not self.start.version:
                self.phase = "evaluating"
                await asyncio.wait([self._begin_evaluation(0), bye], return_when=asyncio.FIRST_COMPLETED)
            self.phase = "training"
            self.batches.begin()
            generating = self._tasks.create_task(self.generation.run())
            await bye
            generating.cancel()
            self.schedule.end("the run ended")
            await asyncio.gather(*(link.settled() for link in self.links))
            if not self.batches.stopping:
                self.phase = "final evaluation"
                await self._begin_evaluation(self.schedule.version)
            self.phase = "stopped" if self.batches.stopping else "done"
            self._write_status()
            for task in (*background, *(self._evaluations if self.batches.stopping else ())):
                task.cancel()

    async def close(self) -> None:
        self.service.close()
        await self.rewards.close()
        for engine in self.engines:
            await engine.client.close()
        self.metrics.close()

    async def _connect(self) -> None:
        """Waits until every engine serves."""
        timeout_s = self.config.machine.timeout_s
        deadline = time.monotonic() + timeout_s
        indices = range(self.config.rollout.engines)
        for index in indices:
            await asyncio.to_thread(self.run.endpoint, f"engine-{index}", max(0.0, deadline - time.monotonic()))
        engines = [fleet.connect(self.config, self.run, index) for index in indices]
        self.engines += engines
        await asyncio.gather(*(e.wait_until_ready(max(1.0, deadline - time.monotonic())) for e in engines))
        for engine in engines:
            if self.start.checkpoint:
                await engine.client.take_over()  # it may have lived with the incarnation before
                engine.version = -1  # whatever weights it has, it gets no request before the resumed ones
            else:
                self.schedule.add_engine(engine.index, engine.version)
            self.links.append(EngineLink(self.config, self.hf_config, engine, self._committed, self.generation.wake))
        self.startup.mark("engines")
        self._connected.set()

    async def _handle(self, message: Request) -> Reply:
        match message:
            case NextBatch():
                self.startup.mark("trainers")
                return await self.batches.next(message)
            case Trained():
                return self._trained(message)
            case Publish():
                self.startup.mark("trainers")
                await self._connected.wait()
                return self._publish(message)
            case Delivered():
                if not 0 <= message.engine < len(self.links):
                    return Refused(f"there is no engine {message.engine}")
                self.links[message.engine].delivered(message)
                return Ok()
            case Checkpoint():
                return self._save(message)
            case Written():
                return await self._written(message)
            case Saved():
                self.metrics.write("checkpoint", message.version, {"stall_s": message.stall_s, "seconds": message.seconds,
                                                                   "failed": int(bool(message.error))})  # fmt: skip
                return Ok()
            case Bye():
                self._bye.set()
                return Ok()
        return Refused(f"{type(message).__name__} is not for the controller")

    async def _look_after(self, engine: Engine) -> None:
        """Watches it for ever. Raises EngineError if it is lost and not started again within machine.timeout_s."""
        timeout_s = self.config.machine.timeout_s
        while True:
            try:
                await engine.watch(timeout_s, self.generation.wake)
            except EngineError as e:
                self._lose(engine, e)
            deadline = time.monotonic() + timeout_s
            while not await self._is_back(engine):
                if time.monotonic() > deadline:
                    raise EngineError(f"{engine.name} was lost and not started again within {timeout_s:.0f} s")
                await asyncio.sleep(_STATUS_S)
            log.warning("%s is back", engine.name)
            if self.schedule.version or self.start.checkpoint:
                self._returned[engine.index] = 0
            else:
                engine.version = 0
                self.schedule.add_engine(engine.index, 0)
                self.generation.wake()

    async def _is_back(self, engine: Engine) -> bool:
        found = fleet.find(self.config, self.run, engine.name)
        try:
            if found.endpoint == engine.client.endpoint:
                raise EngineError("it has not announced itself again")
            await found.wait_until_healthy(0)
        except EngineError:
            await found.close()
            return False
        await engine.return_as(found)
        return True

    def _lose(self, engine: Engine, reason: EngineError) -> None:
        if engine.state != LOST:
            log.error("%s is lost: %s", engine.name, reason)
            engine.lose()
            self._returned.pop(engine.index, None)
            self.links[engine.index].cut(str(reason))
            self.generation.lose(engine)

    async def _is_lost(self, engine: Engine, client: EngineClient, reason: EngineError) -> bool:
        if engine.state != LOST and engine.client is client:
            try:
                await client.wait_until_healthy(0)
                return False
            except EngineError:
                self._lose(engine, reason)
        return True

    def _publish(self, message: Publish) -> Links:
        """A version that is published again goes to those who lack it."""
        again, self._published = message.version == self._published, message.version
        taking = [link for link, engine in zip(self.links, self.engines, strict=True)
                  if (link.lacks(message.version) if again else engine.state != LOST)]  # fmt: skip
        return Links([link.publish(message) for link in taking])

    def _bring_weights(self) -> None:
        """To engines that were started again, unless the next version is on its way."""
        version = self.schedule.version
        lacking = [index for index in self._returned if self.links[index].lacks(version)]
        if not lacking or not self.batches.publish_again():
            return
        self._returned.update(lacking)
        if tried := [self.engines[index].name for index in lacking if self._returned[index] > _ATTEMPTS]:
            raise EngineError(f"{', '.join(tried)} did not get version {version} after being started again; see above")

    def _trained(self, message: Trained) -> Reply:
        account = self.batches.trained(message)
        if isinstance(account, Refused):
            return account
        now = time.monotonic()
        elapsed, self._last_update_at = now - self._last_update_at, now
        idle = [engine.take_idle_s() for engine in self.engines]
        last = [link.last for link in self.links if link.last]
        account |= {key: max(update[key] for update in last) for key in ("publish_s", "commit_s") if last}
        account |= {"weights_bytes": sum(update["weights_bytes"] for update in last)} if last else {}
        account |= {
            "engine_idle_share": min(1.0, sum(idle) / len(idle) / elapsed),
            "engine_lag_max": max(self.schedule.version - engine.version for engine in self.engines),
            "groups_filtered": self.schedule.counts["filtered"],
            "groups_skipped": self.schedule.counts["skipped"],
            "prompts_too_long": self.generation.prompts_too_long,
            "reward_failures": self.rewards.failures,
            "link_failures": sum(link.failures for link in self.links),
        }
        self._last_update = account
        self.metrics.write("update", self.schedule.version, account)
        if self.startup.mark("first_batch"):
            self.metrics.write("start", self.schedule.version, self.startup.figures())
        self.generation.wake()
        return Ok()

    def _save(self, message: Checkpoint) -> Reply:
        if self.batches.number != message.batches or self.schedule.version != message.version:
            return Refused(f"the controller is at batch {self.batches.number} of version {self.schedule.version}, "
                           f"the checkpoint at batch {message.batches} of version {message.version}")  # fmt: skip
        saved = msgspec.structs.replace(self.generation.save(), reward_failures=self.rewards.failures)
        path = checkpoint_folder.partial(self.run, message.version) / "controller.msgpack"
        writing = asyncio.to_thread(state.write, saved, path)  # its groups no longer change; generation goes on
        self._written_state = message.version, asyncio.ensure_future(writing)
        return Ok()

    async def _written(self, message: Written) -> Reply:
        version, writing = self._written_state
        if version != message.version:
            return Refused(f"there is no checkpoint of version {message.version} to write")
        try:
            await writing
        except OSError as e:
            return Refused(f"the controller's state cannot be written: {e.strerror}")
        return Ok()

    def _committed(self, engine: int, version: int) -> None:
        self._returned.pop(engine, None)
        if engine in self.schedule.engines:
            self.schedule.committed(engine, version)
        else:
            self.schedule.add_engine(engine, version)
        self.generation.wake()
        every = self.config.eval_every
        newest = all(e.version >= version for e in self.engines)
        if every and version and version % every == 0 and version < self.schedule.updates and newest:
            self._begin_evaluation(version, _SHARE_OF_CONCURRENT_EVALUATION)

    def _begin_evaluation(self, version: int, share: float = 1.0) -> asyncio.Task:
        self._evaluations.add(task := self._tasks.create_task(self._evaluate(version, share)))
        task.add_done_callback(self._evaluations.discard)
        return task

    async def _evaluate(self, version: int, share: float) -> None:
        values = await self.evaluation.run(version, share)
        if values is not None:
            self.metrics.write("eval", version, values)

    async def _keep_status(self) -> None:
        while True:
            self._write_status()
            if self.run.stop.exists() and not self._bye.is_set():
                self.phase = "stopping"
                self.batches.stop()
            self._bring_weights()
            await asyncio.sleep(_STATUS_S)

    def _write_status(self) -> None:
        write_status(self.run, {
            "phase": self.phase,
            "version": self.schedule.version,
            "updates": self.config.updates,
            "elapsed_s": time.monotonic() - self._started_at,
            "engines": [engine.status() for engine in self.engines],
            "buffer_groups": len(self.schedule.finished),
            "running_groups": len(self.schedule.running),
            "last": self._last_update,
        })  # fmt: skip


async def control(config: Config, run: Run) -> None:
    """Lives until the run is over or SIGTERM asks for an end; then raises CancelledError."""
    controller = Controller(config, run)
    life = asyncio.create_task(controller.live())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, life.cancel)
    try:
        await life
    finally:
        await controller.close()


def first_cause(error: BaseException) -> BaseException:
    """The first error inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def main() -> int:
    run, _ = from_command_line("areal_megatron.rollout.controller")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(control(load(run.config), run))
    except asyncio.CancelledError:
        print(f"{PROCESS}: stopped by SIGTERM", file=sys.stderr)
        return 128 + signal.SIGTERM
    except BaseException as e:
        cause = first_cause(e)
        if not isinstance(cause, ConfigError | EngineError | RunError):
            raise
        print(f"error: {cause}", file=sys.stderr)
        return 2 if isinstance(cause, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
