"""The controller of a run that a program drives (mode=driven): it passes the program's orders on, and samples for it.

There is no schedule, no data and no reward: what is sampled and trained when, and how stale it may be, is the
program's. Orders are carried out one after the other, by all trainer ranks; sampling goes on beside them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.config import Config, ConfigError
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.engine import Engine
from areal_megatron.controller.fleet import Fleet
from areal_megatron.controller.service import Refusal, Service
from areal_megatron.data.routes import Routing
from areal_megatron.data.trajectory import LossPart, Trajectory
from areal_megatron.engine.client import Completion, EngineClient, EngineError, RequestRefused, ScoredText
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.observe.background import close_all
from areal_megatron.observe.metrics import MetricsWriter, StatusWriter
from areal_megatron.observe.status import EngineState, Status
from areal_megatron.packing.partition import split
from areal_megatron.protocol import (
    LONGEST_BYTES,
    Answer,
    Await,
    Bye,
    CheckpointBegin,
    CheckpointDone,
    CheckpointWritten,
    Delivered,
    EncodedLoss,
    Finish,
    GetReady,
    GivePrompt,
    GiveSamples,
    LoadVersion,
    LossReply,
    NextOrder,
    NotYet,
    Ok,
    OrderDone,
    ProgramReply,
    ProgramRequest,
    Publish,
    PublishVersion,
    Request,
    SampledAnswer,
    SaveAdapter,
    SaveVersion,
    ScoreText,
    Sending,
    Stop,
    TakeStep,
    Ticket,
    TurnTo,
    encode_loss,
)
from areal_megatron.run.folder import RunFolder
from areal_megatron.run.network import address
from areal_megatron.run.process_names import CONTROLLER
from areal_megatron.workflows.sampling import Decoding, GenerationRequest, Sampling, cache_salt, generate

_STATUS_S = 0.5
Found = TypeVar("Found")
_Simple = TakeStep | PublishVersion | SaveVersion | LoadVersion | TurnTo | SaveAdapter
"""An order that is the same for all replicas."""
_Parts = list[EncodedLoss | _Simple]
"""An order as each replica gets it."""


class Serving:
    """Stands in for a schedule: which version was published last, and which one each engine has."""

    def __init__(self, version: int):
        self.version = version
        self.engines: dict[int, int] = {}

    def committed(self, engine: int, version: int) -> None:
        self.engines[engine] = version

    add_engine = committed


class Driven:
    """Runs until the program ends it, and the trainers have said Bye. Raises EngineError or RunError."""

    def __init__(self, config: Config, run: RunFolder):
        self._config, self._run = config, run
        self._version = self._saved = run.start.version
        """The versions of the trainers and of their last checkpoint."""
        self._folder = run.start.checkpoint
        self._serving, self._changed = Serving(self._version), Changed()
        described = read_config(config.model.path)
        self._flops, self._vocabulary = SequenceFlops.of(described), described["vocab_size"]
        sizes = architecture(described).dimensions
        self._routing = (
            Routing(sizes.layers, sizes.experts, described["num_experts_per_tok"], sizes.dense_layers)
            if sizes.experts
            else None
        )
        self._fleet = Fleet(config, run, described, self._serving, self._changed, events=self)
        self._service = Service(address(config.machine.host), run.keys, self._handle, LONGEST_BYTES)
        self._metrics, self._status = MetricsWriter(run), StatusWriter(run)
        if run.start.incarnation:
            version = self._version if run.start.checkpoint else -1
            self._metrics.write("resume", version, {"incarnation": run.start.incarnation})
        self._started_at, self._bye, self._ending = time.monotonic(), asyncio.Event(), False
        self._turn, self._news = asyncio.Lock(), Changed()
        self._number = 0
        """The number of the order that is carried out, or comes next."""
        self._parts: _Parts | None = None
        self._done: asyncio.Future[OrderDone] | None = None
        self._gradients = 0
        """Gradients that were computed since the last step."""
        self._learned: dict[str, float] = {}
        """Metrics of the last one."""
        self._trainers = asyncio.Event()
        """Set when the trainers have asked for their first order."""
        self._adapter = 0
        """The one that is trained."""
        self._left: dict[int, tuple[int, dict[str, float]]] = {}
        """Gradients and metrics of the others."""
        self._lost_checkpoint = ""
        self._tickets = itertools.count()
        self._asked: dict[int, asyncio.Task[ProgramReply]] = {}

    async def live(self) -> None:
        """Runs until the trainers' Bye."""
        self._run.announce(CONTROLLER, self._service.endpoint)
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._service.run()), tasks.create_task(self._keep_status())]
            await self._fleet.connect()
            background.append(tasks.create_task(self._fleet.run()))
            await self._bye.wait()
            await self._fleet.settled()
            for task in (*background, *self._asked.values()):
                task.cancel()
        self._write_status("done")

    async def close(self) -> None:
        self._service.close()
        await self._fleet.close()
        timelines = [engine.timeline for engine in self._fleet.engines]
        await asyncio.to_thread(close_all, [self._status, self._metrics, *timelines])

    def lost(self, engine: Engine) -> None:
        self._serving.engines.pop(engine.index, None)
        self._changed.notify()

    def committed(self, version: int) -> None:
        """Every engine has `version`: nobody waits for that here."""

    async def _handle(self, message: Request) -> Answer:
        match message:
            case NextOrder():
                self._trainers.set()
                return await self._next(message)
            case OrderDone():
                return self._order_done(message)
            case Publish():
                return await self._fleet.publish(message)
            case Delivered():
                self._fleet.delivered(message)
                return Ok()
            case Sending():
                return self._fleet.cut(message)
            case CheckpointBegin() | CheckpointWritten():  # nothing of this process is saved
                return Ok()
            case CheckpointDone():
                self._lost_checkpoint = message.error
                self._metrics.write("checkpoint", message.version, message.figures)
                return Ok()
            case Bye():
                self._bye.set()
                return Ok()
            case Await():
                return await self._outcome(message)
        if isinstance(message, ProgramRequest):
            ticket = next(self._tickets)
            self._asked[ticket] = asyncio.create_task(self._attend(message))
            return Ticket(ticket)
        raise Refusal(f"{type(message).__name__} is not for a run that a program drives")

    async def _outcome(self, message: Await) -> ProgramReply | NotYet:
        if message.ticket not in self._asked:
            raise Refusal(f"nothing was asked for under number {message.ticket}, or it was told already")
        done, _ = await asyncio.wait([self._asked[message.ticket]], timeout=self._config.machine.ask_again_s)
        return self._asked.pop(message.ticket).result() if done else NotYet()

    async def _attend(self, message: ProgramRequest) -> ProgramReply:
        try:
            return msgspec.structs.replace(await self._carry_out(message), version=self._version)
        except ConfigError as e:
            return ProgramReply(version=self._version, wrong=str(e))
        except EngineError as e:
            return ProgramReply(version=self._version, failed=str(e))
        except (ValueError, TypeError, ArithmeticError) as e:  # what a program asked for, and no check foresaw
            return ProgramReply(version=self._version, failed=f"{type(message).__name__}: {type(e).__name__}: {e}")

    async def _carry_out(self, message: ProgramRequest) -> ProgramReply:
        match message:
            case GetReady():
                await self._trainers.wait()
                await self._until(lambda: len(self._able()) > 0)
            case GivePrompt():
                self._check(message.tokens)
                return ProgramReply(version=0, answers=[_told(answer) for answer in await self._sample(message)])
            case ScoreText():
                self._check(message.tokens)
                return await self._score(message)
            case Finish():
                async with self._turn:
                    self._ending = True
                    self._news.notify()
            case GiveSamples():
                self._check(*(sample.prompt for sample in message.samples), *(s.response for s in message.samples))
                self._check_routes(message.samples)
                return await self._compute(message)
            case TakeStep():
                return await self._step(message)
            case PublishVersion():
                return ProgramReply(version=0, metrics=await self._publish())
            case SaveVersion():
                return await self._save()
            case LoadVersion():
                await self._load(message)
            case TurnTo():
                await self._turn_to(message)
            case SaveAdapter():
                async with self._turn:
                    await self._order(message)
        return ProgramReply(version=0)

    def _check(self, *texts: Sequence[int] | np.ndarray) -> None:
        """Raises ConfigError for tokens that would end the process which looks them up."""
        tokens = np.concatenate(texts)
        for extreme in (tokens.min(), tokens.max()):
            if not 0 <= extreme < self._vocabulary:
                raise ConfigError(f"token {extreme}: the model has 0 to {self._vocabulary - 1}")

    def _check_routes(self, samples: Sequence[Trajectory]) -> None:
        """Raises ConfigError for routes that would end the trainers."""
        if self._routing is None:
            return
        for sample in samples:
            if problem := self._routing.problem(sample):
                raise ConfigError(f"sample {sample.uid}: routes: {problem}")

    async def _compute(self, message: GiveSamples) -> ProgramReply:
        async with self._turn:
            more, seed = self._gradients > 0, self._config.seed + self._number
            parts = await asyncio.to_thread(loss_parts, message, self._config, self._version, seed, self._flops)
            replies = [LossReply(part, message.settings, message.learns, more) for part in parts]
            done = await self._have_done(await asyncio.to_thread(lambda: [*map(encode_loss, replies)]))
            if message.learns:
                self._gradients += 1
                self._learned = done.metrics
        return ProgramReply(version=0, metrics=done.metrics, logprobs=done.logprobs)

    async def _step(self, message: TakeStep) -> ProgramReply:
        async with self._turn:
            if not self._gradients:
                raise ConfigError("step: there is no gradient to step by, call forward_backward first")
            done = await self._order(message)
            self._gradients = 0
            self._version += done.applied
            metrics = self._learned | done.metrics
            self._metrics.write("update", self._version, metrics)
        return ProgramReply(version=0, metrics=metrics)

    async def _publish(self) -> dict[str, float]:
        begun = time.monotonic()
        async with self._turn:
            self._serving.version = self._version
            await self._order(PublishVersion(self._version))
            await self._fleet.settled()
        if all(version < self._version for version in self._serving.engines.values()):
            raise EngineError(f"version {self._version} reached no engine; see the log of the controller")
        return self._fleet.account(time.monotonic() - begun)

    async def _save(self) -> ProgramReply:
        async with self._turn:
            if self._saved != self._version or not self._folder:
                self._lost_checkpoint = ""
                await self._order(SaveVersion(self._version))
                if self._lost_checkpoint:
                    return ProgramReply(version=0, failed=self._lost_checkpoint)
                self._saved = self._version
                self._folder = str(self._run.checkpoints / f"version-{self._version:06d}")
        return ProgramReply(version=0, folder=self._folder)

    async def _load(self, message: LoadVersion) -> None:
        folder = Path(message.folder)
        await asyncio.to_thread(checkpoint_folder.read, folder)
        async with self._turn:
            await self._order(message)
            self._version, self._gradients = self._version + 1, 0

    async def _turn_to(self, message: TurnTo) -> None:
        async with self._turn:
            if message.adapter == self._adapter and not message.new:
                return
            await self._order(msgspec.structs.replace(message, has_gradient=self._gradients > 0))
            self._left[self._adapter] = self._gradients, self._learned
            self._adapter = message.adapter
            self._gradients, self._learned = (0, {}) if message.new else self._left.get(message.adapter, (0, {}))
            self._version += 1  # these are other weights

    async def _sample(self, asked: GivePrompt) -> list[Completion]:
        how = {"decoding": Decoding(asked.temperature, asked.top_p, asked.top_k), "adapter": asked.adapter}
        name = f"ask-{next(self._tickets)}"
        request = GenerationRequest(asked.tokens, asked.max_tokens, asked.stop_tokens, name, asked.seed)

        def sample(client: EngineClient, salt: str | None) -> Awaitable[list[Completion]]:
            return generate(Sampling(client, self._config.rollout, [], salt, **how), request, asked.n)

        return await self._of_an_engine(sample, asked.n, asked.adapter)

    async def _score(self, asked: ScoreText) -> ProgramReply:
        how = {"request_id": f"score-{next(self._tickets)}", "top_k": asked.top_k, "adapter": asked.adapter}

        def score(client: EngineClient, salt: str | None) -> Awaitable[ScoredText]:
            return client.score(asked.tokens, cache_salt=salt, **how)

        found = await self._of_an_engine(score, 1, asked.adapter)
        likely = found.likely_tokens.ravel(), found.likely_logprobs.ravel()
        return ProgramReply(version=0, logprobs=found.logprobs, likely_tokens=likely[0], likely_logprobs=likely[1])

    async def _of_an_engine(
        self, ask: Callable[[EngineClient, str | None], Awaitable[Found]], trajectories: int, adapter: str
    ) -> Found:
        """Returns the answer of the engine with the fewest requests; of another one if that is lost. `ask` gets the
        salt of the engine's prefix cache. Raises ConfigError for what an engine refuses."""
        while True:
            await self._until(lambda: len(self._able(adapter)) > 0)
            engine = min(self._able(adapter), key=lambda e: e.running)
            client = engine.client
            engine.occupy(trajectories)
            try:
                return await ask(client, cache_salt(self._config.rollout, engine.version))
            except RequestRefused as e:
                raise ConfigError(str(e)) from None
            except EngineError as e:
                if not await self._fleet.is_lost(engine, client, e):
                    raise
            finally:
                engine.release(trajectories)

    def _able(self, adapter: str = "") -> list[Engine]:
        """The engines that generate; with an adapter from its folder those without weights of the trainers can, too."""
        there = [e for e in self._fleet.engines if not e.draining and not e.gone and e.state != EngineState.TORN]
        return [e for e in there if adapter or e.index in self._serving.engines]

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    async def _order(self, order: _Simple) -> OrderDone:
        return await self._have_done([order] * self._config.trainer.dp)

    async def _have_done(self, parts: _Parts) -> OrderDone:
        """Has all trainers carry out an order. To be called by whoever has the turn."""
        self._parts, self._done = parts, asyncio.get_running_loop().create_future()
        self._news.notify()
        return await self._done

    async def _next(self, message: NextOrder) -> EncodedLoss | _Simple | Stop | NotYet:
        if not 0 <= message.replica < self._config.trainer.dp or message.number not in (self._number, self._number + 1):
            raise Refusal(f"order {message.number} of replica {message.replica} is not next: that is {self._number}")
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.machine.ask_again_s):
                while message.number != self._number or not self._parts:
                    if self._ending and message.number == self._number:
                        return Stop()
                    await self._news.wait()
                return self._parts[message.replica]
        return NotYet()

    def _order_done(self, message: OrderDone) -> Ok:
        if message.number != self._number or self._done is None:
            raise Refusal(f"order {message.number} is not being carried out: that is {self._number}")
        self._number, self._parts = self._number + 1, None
        self._done.set_result(message)
        self._done = None
        self._news.notify()
        return Ok()

    async def _keep_status(self) -> None:
        while True:
            if await asyncio.to_thread(self._run.is_to_stop):
                self._ending = True
                self._news.notify()
            self._write_status("ending" if self._ending else "driven")
            if self._trainers.is_set():
                self._fleet.bring_weights(self._publish_again)
            await asyncio.sleep(_STATUS_S)

    def _publish_again(self) -> bool:
        """Has an engine that was started again get the version that was published last, if trainers still have it."""
        if self._turn.locked() or self._ending or self._version != self._serving.version:
            return False
        ticket = next(self._tickets)
        self._asked[ticket] = again = asyncio.create_task(self._bring())
        again.add_done_callback(lambda _: self._asked.pop(ticket))
        return True

    async def _bring(self) -> ProgramReply:
        async with self._turn:
            if self._version == self._serving.version:
                await self._order(PublishVersion(self._version))
        return ProgramReply(version=self._version)

    def _write_status(self, phase: str) -> None:
        self._status.write(
            Status(
                phase=phase,
                version=self._version,
                updates=self._config.updates,
                elapsed_s=time.monotonic() - self._started_at,
                engines=[engine.status for engine in self._fleet.engines],
            )
        )


def loss_parts(
    message: GiveSamples, config: Config, version: int, seed: int, flops: SequenceFlops | None = None
) -> list[LossPart]:
    """Splits samples, whose uids count from 0, over the replicas, as a batch with one mini-batch."""
    trainer = config.trainer
    parts = split(
        message.samples,
        version=version,
        replicas=trainer.dp,
        minibatches=1,
        cap=trainer.microbatch_tokens,
        seed=seed,
        flops=flops,
        multiple=trainer.microbatch_multiple,
        share_prompts=trainer.share_prompts,
    )
    at = np.cumsum([0, *(len(own) for own in message.advantages)]).tolist()
    return [
        LossPart(
            part=part,
            loss=message.loss,
            advantages=[message.advantages[t.uid] for t in part.trajectories],
            weights=[message.weights[t.uid] for t in part.trajectories] if message.weights else [],
            at=[at[t.uid] for t in part.trajectories],
            tokens=at[-1],
        )
        for part in parts
    ]


def _told(answer: Completion) -> SampledAnswer:
    return SampledAnswer(answer.tokens, answer.logprobs, answer.versions, answer.finish_reason, answer.routes)
