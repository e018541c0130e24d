"""Runs episodes of workflows in worker processes: what a workflow or an agent computes holds up no other request.

The controller asks engines and reward workers for them. A worker that ends, or that a workflow has held up for too
long, is replaced; its episodes begin again in others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from areal_megatron.config import Config, ConfigError
from areal_megatron.engine.client import Completion, EngineError
from areal_megatron.process.errors import printable
from areal_megatron.process.lateness import within
from areal_megatron.reward.workers import default_count
from areal_megatron.run.folder import RunError
from areal_megatron.workflows.episode import EpisodeSpec
from areal_megatron.workflows.sampling import INTERRUPTED, GenerationRequest, Sampling, generate
from areal_megatron.workflows.scoring import ScoredEpisode, Scorer
from areal_megatron.workflows.transcript import Transcript
from areal_megatron.workflows.worker import (
    AnswerSampled,
    Ask,
    Begin,
    Cancel,
    EpisodeEnded,
    Frames,
    FromWorker,
    Judge,
    Judged,
    Loaded,
    RunEpisode,
    Withdraw,
    WorkflowFailed,
)
from areal_megatron.workflows.workflow import KEY

log = logging.getLogger(__name__)
_START_TIMEOUT_S = 120.0
_RETRY_S = 1.0
_DEATHS = 3
"""An episode has failed when this number of workers have died with it; the last one had no other episode."""


class EpisodeWorkers:
    """The workers of a run, which its environments share. An episode is run by the one that has the fewest.

    Example:
        workers = EpisodeWorkers(config.by_environment())
        await workers.start()
        episode = await workers.run(sampling, spec, scorer)  # None: it was interrupted
        await workers.close()
    """

    def __init__(self, configs: Sequence[Config], output: Path | None = None, run: Path | str = ""):
        """`configs`: one for each environment; `run`: the folder of the run that serves models to them. What workflows
        print is appended to the file `output`; None: it goes to stderr."""
        self._configs, self._count = configs, configs[0].rollout.workflow_workers or default_count()
        self._output, self._run = output, str(run)
        self._workers: list[_Worker] = []
        self._apart: set[_Worker] = set()
        """Workers of a single episode each."""
        self._free_apart = asyncio.Semaphore(self._count)
        self._some = asyncio.Event()
        """Set while there is a worker."""
        self._replacing: set[asyncio.Task] = set()
        self._closed = False
        self._counted = Counter()
        """What workers that are gone have counted."""

    async def start(self) -> None:
        """Starts the processes. Raises ConfigError if a workflow cannot be loaded."""
        await asyncio.gather(*(self._add() for _ in range(self._count)))

    def account(self) -> dict[str, int]:
        """Returns what was counted since the start, by the names of the metrics."""
        found = Counter({"workflow_failures": 0, "refused_calls": 0, "workflow_deaths": 0})
        for counts in (self._counted, *(worker.account for worker in (*self._workers, *self._apart))):
            found.update(counts)
        return dict(found)

    async def run(self, sampling: Sampling, spec: EpisodeSpec, scorer: Scorer) -> ScoredEpisode | None:
        """Returns the episode, None if it was interrupted; it has failed if workers die with it again and again.

        Raises EngineError if a request fails for the last time, ConfigError if no episode at all gets an answer, and
        what RewardWorkers.judge raises.
        """
        problem = ""
        for deaths in range(_DEATHS):
            try:
                if deaths == _DEATHS - 1:
                    return await self._run_apart(sampling, spec, scorer)
                await self._some.wait()
                worker = min(self._workers, key=lambda one: len(one.running))
                return await worker.run(sampling, spec, scorer)
            except _WorkerDiedError as e:
                problem = f"{spec.prompt.place}: {e}"
                # the engine may still be ending the requests that were withdrawn
                spec = replace(spec, request_id=f"{spec.request_id}-again")
            except _NotSentError as e:
                problem = str(e)
                log.warning("%s", printable(problem, 500))
                break
        self._counted["workflow_failures"] += 1
        context = Transcript(spec.prompt.tokens, spec.version).with_observation(sampling.stop_tokens[:1])
        return ScoredEpisode((context,), scorer.reward(0.0, 1, False, False, failure=problem), ((),))

    async def _run_apart(self, sampling: Sampling, spec: EpisodeSpec, scorer: Scorer) -> ScoredEpisode | None:
        """Runs an episode in a worker of its own: the others may have died of another episode."""
        async with self._free_apart:
            worker = await self._started()
            self._apart.add(worker)
            try:
                return await worker.run(sampling, spec, scorer)
            finally:
                self._counted["workflow_deaths"] += worker.ended
                self._counted.update(worker.account)
                self._apart.remove(worker)
                await worker.kill()

    async def close(self) -> None:
        self._closed = True
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in (*self._workers, *self._apart)))

    async def _add(self, again: bool = False) -> None:
        worker = await (self._started() if again else self._start())
        self._workers.append(worker)
        self._some.set()
        worker.on_end = partial(self._replace, worker)

    def _replace(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._counted.update(worker.account)
        if not self._workers:
            self._some.clear()
        if not self._closed:
            self._counted["workflow_deaths"] += 1
            self._replacing.add(task := asyncio.ensure_future(self._add(again=True)))
            task.add_done_callback(self._replacing.discard)

    async def _start(self) -> _Worker:
        return await _Worker.start(self._configs, self._count, self._output, self._run)

    async def _started(self) -> _Worker:
        """Returns a worker that has started, however often that is tried."""
        while True:
            try:
                return await self._start()
            except (OSError, ConfigError) as e:  # no process or memory is left for the moment
                log.warning("a worker of episodes cannot be started again yet: %s", e)
                await asyncio.sleep(_RETRY_S)


class WorkflowRunner:
    """Runs the workflow of one environment in the run's workers, as SingleTurn runs single turns."""

    resumes = False
    """Whether answers that were interrupted can be continued."""

    def __init__(self, workers: EpisodeWorkers, scorer: Scorer):
        self._workers, self._scorer = workers, scorer

    async def sample(
        self, sampling: Sampling, spec: EpisodeSpec, n: int, interrupted: Sequence[Completion] = ()
    ) -> list[ScoredEpisode] | None:
        """Returns n episodes, the k-th with seed + k; None if they were interrupted. There are no answers that were
        `interrupted`: episodes begin again.

        Raises what EpisodeWorkers.run does.
        """
        specs = [replace(spec, request_id=f"{spec.request_id}-{k}", seed=spec.seed + k) for k in range(n)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._workers.run(sampling, own, self._scorer)) for own in specs]
        except ExceptionGroup as e:
            if failed := e.subgroup((EngineError, ConfigError, RunError)):
                raise failed.exceptions[0] from None
            raise
        found = [ended for task in tasks if (ended := task.result()) is not None]
        return found if len(found) == n else None


class _WorkerDiedError(Exception):
    """The worker process is gone; says how it ended."""


class _NotSentError(Exception):
    """A row cannot be sent, such as one with half a character or a number of more than 64 bits; says which."""


@dataclass(eq=False)
class _Running:
    """An episode that a worker runs, and what the controller does for it."""

    sampling: Sampling
    spec: EpisodeSpec
    scorer: Scorer
    result: asyncio.Future
    calls: dict[int, asyncio.Task] = field(default_factory=dict)


class _Worker:
    def __init__(self, process: asyncio.subprocess.Process, limit_s: float):
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._limit_s = process, process.stdin, limit_s
        self._frames = Frames(process.stdout, process.stdin, FromWorker)
        self._numbers = itertools.count()
        self.running: dict[int, _Running] = {}
        self.account: dict[str, int] = {}
        self.ended = False
        """Whether the process is gone."""
        self.on_end: Callable[[], None] = lambda: None
        """Called then, at once."""
        self._reading: asyncio.Task | None = None

    @classmethod
    async def start(cls, configs: Sequence[Config], workers: int, output: Path | None, run: str) -> _Worker:
        """Raises ConfigError if a workflow cannot be loaded, OSError if no process can be started."""
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, "-m", "areal_megatron.workflows.worker"]
        with open(output, "ab") if output else nullcontext() as stderr:
            process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=stderr)
        worker = cls(process, configs[0].rollout.workflow_timeout_s)
        problem = f"a worker of episodes did not load within {_START_TIMEOUT_S:.0f} s; its output is above"
        try:
            worker._frames.send(Begin(list(configs), workers, run))
            ready: Loaded = await within(_START_TIMEOUT_S, worker._frames.receive())
            problem = ready.problem
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:  # also where nobody waits for it any more
            if problem:
                await worker.kill()
        if problem:
            raise ConfigError(problem if problem.startswith(KEY) else f"{KEY}: {problem}")
        worker._reading = asyncio.ensure_future(worker._read())
        return worker

    async def run(self, sampling: Sampling, spec: EpisodeSpec, scorer: Scorer) -> ScoredEpisode | None:
        """Raises _WorkerDiedError, _NotSentError, and what EpisodeWorkers.run does."""
        number, result = next(self._numbers), asyncio.get_running_loop().create_future()
        running = self.running[number] = _Running(sampling, spec, scorer, result)
        try:
            try:
                self._send(RunEpisode(number, spec))
            except (UnicodeEncodeError, TypeError, OverflowError) as e:
                raise _NotSentError(f"{spec.prompt.where}: cannot be sent to a process of workflows: {e}") from None
            return await result
        finally:
            del self.running[number]
            for call in running.calls.values():
                call.cancel()
            if not result.done() or result.cancelled() or result.exception():
                self._send(Cancel(number))

    async def kill(self) -> None:
        await self._end()
        if self._reading:
            self._reading.cancel()

    async def _end(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)  # asyncio's own loses the exit code of one that has ended
        self._stdin.close()
        await self._process.wait()

    def _send(self, message: Any) -> None:
        with suppress(ConnectionError):  # it is gone, as the end of its stream will say
            self._frames.send(message)

    async def _read(self) -> None:
        try:
            while True:
                self._handle(await self._frames.receive())
        except (asyncio.IncompleteReadError, OSError):
            await self._process.wait()
        except msgspec.MsgspecError as e:
            log.error("a worker of episodes wrote what is no message: %s", e)
        finally:
            await self._end()
            problem = f"a workflow ended its process with code {self._process.returncode}"
            if self._process.returncode == 1:
                problem += (
                    f", or held it up for rollout.workflow_timeout_s={self._limit_s:g} s: then a traceback in the log "
                    "says where; call blocking code with `await asyncio.to_thread(…)`"
                )
            self.ended = True
            self.on_end()  # first: nobody is to come here again
            for running in self.running.values():
                if not running.result.done():
                    running.result.set_exception(_WorkerDiedError(problem))
            if self.running:
                log.warning("%s; its %d episodes begin again", printable(problem, 500), len(self.running))

    def _handle(self, message: Any) -> None:
        running = self.running.get(message.number)
        if isinstance(message, EpisodeEnded):
            self.account = message.account
        if running is None or running.result.done():  # nobody waits for it any more
            return
        match message:
            case EpisodeEnded():
                running.result.set_result(message.episode)
            case WorkflowFailed():
                kind = ConfigError if message.by_config else RunError
                running.result.set_exception(kind(message.problem))
            case Ask():
                self._serve(running, message.call, self._sample(running, message))
            case Judge():
                self._serve(running, message.call, self._judge(running, message))
            case Withdraw(_, call):
                if call in running.calls:
                    running.calls[call].cancel()

    def _serve(self, running: _Running, number: int, call: Coroutine) -> None:
        async def served() -> None:
            try:
                self._send(await call)
            except Exception as e:
                if not running.result.done():
                    running.result.set_exception(e)

        running.calls[number] = task = asyncio.ensure_future(served())
        task.add_done_callback(lambda _: running.calls.pop(number))

    async def _sample(self, running: _Running, asked: Ask) -> AnswerSampled:
        tokens = asked.tokens.tolist()
        request = GenerationRequest(
            tokens, asked.max_tokens, asked.stop_tokens, asked.request_id, asked.seed, asked.routes_from
        )
        if running.sampling.may_interrupt():  # nothing more is asked
            nothing = np.zeros(0, np.int32)
            return AnswerSampled(asked.call, Completion(nothing, nothing.astype(np.float32), nothing, INTERRUPTED))
        (completion,) = await generate(running.sampling, request)
        return AnswerSampled(asked.call, completion)

    async def _judge(self, running: _Running, asked: Judge) -> Judged:
        return Judged(asked.call, await running.scorer.judge(running.spec.prompt, asked.response, asked.cut))
