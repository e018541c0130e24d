"""The controller of a run: `python -m areal_megatron.controller.controller --run RUN_DIR`.

One asyncio process without torch. Ends with code 0 after the trainers' Bye and the last evaluation (a replay: without
engines and evaluations, see replay.py), with code 1 and one line that names the process if anything fails, with code 2
for wrong input. The life of a group, and who waits for what:

    cursor, or a group to admit again
      │   Generation.run waits for `changed` until an engine has room and Schedule.may_admit (Eq. 3) allows a group
      ▼
    RUNNING ── the engine is lost: admitted again · the run is to stop: INTERRUPTED, saved, resumed by the next launch
      │   Generation._run_group waits for the engine's answers (Sampler.sample), then for the reward workers
      ▼
    scored ── useless: filtered · fewer than two rewards known: skipped
      │
      ▼
    FINISHED
      │   Batches.run waits for `changed` until trainers have asked and Schedule.form_batch finds all deadlines feasible
      ▼
    TRAINING
      │   each replica's NextBatch waits in Batches.next for its part; then the trainers are at work until Trained
      ▼
    trained (version + 1), or skipped if every optimizer step was
      │   Publish ─► EngineUpdates.run, one task an engine, waits for the trainers' Delivered, then for the commit
      ▼
    the engine samples from the new version: Schedule.committed

`changed` (changed.py) is notified by every event that may end a wait for it: a finished group, a request leaving an
engine, a poll of an engine's counters, an engine lost, back or torn, Trained, and a commit.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.config import Config, ConfigError
from areal_megatron.config.config_file import load
from areal_megatron.controller import state
from areal_megatron.controller.batches import Batches
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.driven import Driven
from areal_megatron.controller.engine import Engine
from areal_megatron.controller.environment import Environments
from areal_megatron.controller.evaluation import Evaluation, EvaluationQueue
from areal_megatron.controller.fleet import Fleet
from areal_megatron.controller.generation import Generation
from areal_megatron.controller.probe import Probe
from areal_megatron.controller.replay import Replay
from areal_megatron.controller.sampler import Sampler
from areal_megatron.controller.schedule import Schedule
from areal_megatron.controller.service import Refusal, Service
from areal_megatron.controller.teacher import Teachers
from areal_megatron.data.drawing import goes_on
from areal_megatron.data.dumps import forget
from areal_megatron.data.prompts import Prompt, read_prompts
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.engine.client import EngineError
from areal_megatron.models.architecture import read_config
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.observe.background import close_all
from areal_megatron.observe.metrics import MetricsWriter, StatusWriter
from areal_megatron.observe.shown_answers import AnswersWriter
from areal_megatron.observe.startup import Startup
from areal_megatron.observe.status import Status
from areal_megatron.observe.timeline import Timeline
from areal_megatron.process.errors import first_cause
from areal_megatron.process.lateness import attended_time
from areal_megatron.process.shown import guard
from areal_megatron.process.streams import log_to_stderr
from areal_megatron.protocol import (
    Answer,
    Bye,
    CheckpointBegin,
    CheckpointDone,
    CheckpointWritten,
    Delivered,
    NextBatch,
    NotWritten,
    Ok,
    Publish,
    Reply,
    Request,
    Sending,
    Trained,
)
from areal_megatron.reward.answers import problem_with_answers
from areal_megatron.run import descriptors
from areal_megatron.run.folder import RunError, RunFolder, from_command_line
from areal_megatron.run.network import address
from areal_megatron.run.process_names import CONTROLLER
from areal_megatron.workflows.sampling import Decoding

log = logging.getLogger(__name__)
_STATUS_S = 0.5
_YOUNGER_COLLECTIONS = 1000
"""Garbage collections before a full one, which stops the event loop for 0.8 s with 96,000 answers in flight."""


class Controller:
    """Wires the parts together and lives through the phases of a run."""

    def __init__(self, config: Config, run: RunFolder, schedule: type[Schedule] = Schedule):
        """schedule: the rule by which groups are admitted and batches formed."""
        self.config, self.run = config, run
        tokenizer = Tokenizer(config.model.path)
        prompts = read_prompts(config, "train", tokenizer, problem_with_answers)
        held_out = read_prompts(config, "eval", tokenizer, problem_with_answers)
        self.hf_config = read_config(config.model.path)
        self.start = run.start
        self.schedule = schedule(
            batch_size=config.batch_size,
            group_size=config.rollout.group_size,
            max_staleness=config.rollout.max_staleness,
            updates=config.updates - (self.start.batches - self.start.version),
        )
        self.timeline = Timeline(run.timeline(CONTROLLER), CONTROLLER)
        self.metrics, self.status = MetricsWriter(run), StatusWriter(run)
        self.answers = AnswersWriter(run, self.metrics)
        self.environments = Environments(config.by_environment(), run)
        self.changed = Changed()
        self.fleet = Fleet(config, run, self.hf_config, self.schedule, self.changed, events=self)
        self.sampler = Sampler(
            engines=self.fleet.engines,
            is_lost=self.fleet.is_lost,
            stop_tokens=tokenizer.stop_tokens,
            environments=self.environments.all,
            timeline=self.timeline,
            evaluation=Decoding(config.eval.temperature, config.eval.top_p, config.eval.top_k),
        )
        self.teachers = Teachers(config, run) if config.teachers else None
        self.generation = Generation(
            config, self.schedule, self.sampler, prompts, self.changed, tokenizer, self.teachers
        )
        self.evaluations = EvaluationQueue(
            Evaluation(config, self.sampler, held_out, self.changed, tokenizer.decode, self.answers),
            partial(self.metrics.write, "eval"),
            config.eval.every,
            self.start.version,
        )
        self.probe = Probe(config, self.fleet.engines, self.changed)
        self.batches = Batches(
            config,
            self.schedule,
            self.generation.take,
            SequenceFlops.of(self.hf_config),
            first=self.start.batches,
            dumps=run.trajectories if config.rollout.dump else None,
            probe=self.probe,
            environment_of={p.id: config.environments[p.environment].name for p in prompts if config.environments},
        )
        self.service = Service(address(config.machine.host), run.keys, self._handle)
        self.phase = "starting engines"
        self.startup = Startup(self.start.time)
        self._bye = asyncio.Event()
        self._last_update_at = self._started_at = time.monotonic()
        self._late_s = 0.0
        self._tasks: asyncio.TaskGroup | None = None
        self._written_state: tuple[int, asyncio.Future | None] = (-1, None)
        """Version of the checkpoint asked for last, and the writing of the controller's part."""
        self._continue(prompts)

    def _continue(self, prompts: Sequence[Prompt]) -> None:
        """Goes on where the checkpoint that the run begins with was written, if it begins with one."""
        start, drawing = self.start, self.generation.drawing
        forget(self.run.trajectories, start.batches)
        if start.checkpoint:
            saved = state.read(Path(start.checkpoint) / "controller.msgpack")
            own = start.after is not None
            if not goes_on(saved, drawing, prompts, start.checkpoint, own, log.warning):
                saved = saved.anew(drawing)
            self.generation.restore(saved)
            self.environments.restore(saved.reward_failures, saved.answers_refused)
        if start.incarnation:  # what came before counts up to this version; without a checkpoint, nothing does
            version = start.version if start.checkpoint else -1
            self.metrics.write("resume", version, {"incarnation": start.incarnation})

    async def live(self) -> None:
        """Runs from the first engine to the last evaluation. Raises EngineError, RunError or ConfigError."""
        gc.set_threshold(*gc.get_threshold()[:2], _YOUNGER_COLLECTIONS)
        await self.environments.start()
        self.run.announce(CONTROLLER, self.service.endpoint)
        async with asyncio.TaskGroup() as self._tasks:
            background = [self._tasks.create_task(self.service.run()), self._tasks.create_task(self._keep_status())]
            bye = self._tasks.create_task(self._bye.wait())
            await self.fleet.connect()
            gc.freeze()  # the prompts and the engines' clients stay: no collection need look at them
            self.startup.mark("engines")
            background += [self._tasks.create_task(self.fleet.run()), self._tasks.create_task(self.evaluations.run())]
            if not self.start.version:
                background += [self._tasks.create_task(self._evaluate_first())]
            self.phase = "training"
            self.batches.begin()
            background += [self._tasks.create_task(self.batches.run(self.changed))]
            background += [self._tasks.create_task(self.probe.run())]
            generating = self._tasks.create_task(self.generation.run())
            await bye
            generating.cancel()
            await asyncio.wait([generating])  # a group may just have been scored: the schedule must still know it
            self.schedule.close("the run ended")
            await self.fleet.settled()
            if not self.batches.stopping:
                self.phase = "final evaluation"
                await self.evaluations.finish(self.schedule.version)
            self.phase = "stopped" if self.batches.stopping else "done"
            self._write_status()
            for task in background:
                task.cancel()

    async def close(self) -> None:
        self.service.close()
        await self.environments.close()
        if self.teachers:
            await self.teachers.close()
        await self.fleet.close()
        timelines = [engine.timeline for engine in self.fleet.engines]
        await asyncio.to_thread(close_all, [self.status, self.answers, self.metrics, self.timeline, *timelines])

    async def _handle(self, message: Request) -> Answer:
        match message:
            case NextBatch():
                self.startup.mark("trainers")
                return await self.batches.next(message)
            case Trained():
                await self.batches.dumped()  # written during the training: at most one dump is in memory
                return self._trained(message)
            case Publish():
                self.startup.mark("trainers")
                return await self.fleet.publish(message)
            case Delivered():
                self.fleet.delivered(message)
                return Ok()
            case Sending():
                return self.fleet.cut(message)
            case CheckpointBegin():
                return await self._save(message)
            case CheckpointWritten():
                return await self._written(message)
            case CheckpointDone():
                self.metrics.write("checkpoint", message.version, message.figures)
                return Ok()
            case Bye():
                self._bye.set()
                return Ok()
        raise Refusal(f"{type(message).__name__} is not for the controller")

    def _trained(self, message: Trained) -> Reply:
        account = self.batches.trained(message)
        now = time.monotonic()
        elapsed, self._last_update_at = now - self._last_update_at, now
        account |= self.generation.account()
        account |= self.fleet.account(elapsed) | {
            "batches_ahead": self.schedule.ahead,
            "groups_filtered": self.schedule.counts["filtered"],
            "groups_skipped": self.schedule.counts["skipped"],
            "prompts_too_long": self.generation.prompts_too_long,
            "status_failures": self.status.failures,
            "evaluations_left_out": self.evaluations.left_out,
        }
        account |= self.environments.account(elapsed)
        late, self._late_s = self._late_s, attended_time().late_s
        account["controller_late_s"] = self._late_s - late
        self.metrics.write("update", self.schedule.version, account)
        if self.startup.mark("first_batch"):
            self.metrics.write("start", self.schedule.version, self.startup.figures())
        self.changed.notify()
        return Ok()

    async def _save(self, message: CheckpointBegin) -> Reply:
        if self.batches.number != message.batches or self.schedule.version != message.version:
            raise Refusal(
                f"the controller is at batch {self.batches.number} of version {self.schedule.version}, "
                f"the checkpoint at batch {message.batches} of version {message.version}"
            )
        if self.batches.stopping:
            await self.generation.interrupt()
        saved = msgspec.structs.replace(
            self.generation.save(),
            reward_failures=self.environments.failures,
            answers_refused=self.environments.refused,
        )
        path = checkpoint_folder.partial(self.run, message.version) / "controller.msgpack"
        writing = asyncio.to_thread(state.write, saved, path)  # its groups no longer change, while generation continues
        self._written_state = message.version, asyncio.ensure_future(writing)
        return Ok()

    async def _written(self, message: CheckpointWritten) -> Reply:
        version, writing = self._written_state
        if writing is None or version != message.version:
            raise Refusal(f"there is no checkpoint of version {message.version} to write")
        try:
            await writing
        except OSError as e:
            return NotWritten(e.strerror or str(e))
        await asyncio.to_thread(self.metrics.flush)  # a resumed run has the line of every update before its checkpoint
        return Ok()

    def lost(self, engine: Engine) -> None:
        self.generation.lose(engine)

    def committed(self, version: int) -> None:
        if version < self.schedule.updates:  # the last one is evaluated when the run is over
            self.evaluations.reached(version)

    async def _evaluate_first(self) -> None:
        while not self.schedule.engines:  # those that begin without weights get version 0 from the trainers
            await self.changed.wait()
        self.evaluations.add(0)

    async def _keep_status(self) -> None:
        while True:
            self._write_status()
            if await asyncio.to_thread(self.run.is_to_stop) and not self._bye.is_set():
                self.phase = "stopping"
                self.batches.stop()
            self.fleet.bring_weights(self.batches.publish_again)
            await asyncio.sleep(_STATUS_S)

    def _write_status(self) -> None:
        self.status.write(
            Status(
                phase=self.phase,
                version=self.schedule.version,
                updates=self.config.updates,
                elapsed_s=time.monotonic() - self._started_at,
                engines=[engine.status for engine in self.fleet.engines],
                buffer_groups=len(self.schedule.finished),
                running_groups=len(self.schedule.running),
                training_groups=len(self.schedule.training),
                filtered_groups=self.schedule.counts["filtered"],
            )
        )


async def control(config: Config, run: RunFolder, schedule: type[Schedule]) -> None:
    """Runs a controller until the run is over; raises CancelledError if SIGTERM ends it before."""
    kinds = {"replay": Replay, "driven": Driven}
    controller = kinds[config.mode](config, run) if config.mode in kinds else Controller(config, run, schedule)
    life = asyncio.create_task(controller.live())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, life.cancel)
    try:
        await life
    finally:
        await controller.close()


def main(schedule: type[Schedule] = Schedule) -> int:
    guard()
    run, _ = from_command_line("areal_megatron.controller.controller")
    log_to_stderr()
    try:
        config = load(run.config)
        if config.has_engines:
            descriptors.check(config, descriptors.raise_limit())
        asyncio.run(control(config, run, schedule))
    except asyncio.CancelledError:
        print(f"{CONTROLLER}: stopped by SIGTERM", file=sys.stderr)
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
