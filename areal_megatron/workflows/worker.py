"""A process that runs episodes of workflows: `python -m areal_megatron.workflows.worker`. Started by workers.py.

A frame on stdin or stdout is four bytes of length and a msgpack message. The first one that it reads is Begin, the
first that it writes Loaded. Its episodes ask the controller for answers of engines and for scores. What workflows print
goes to stderr.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from areal_megatron.config import Config, ConfigError
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.data.trajectory import decoder, encoder
from areal_megatron.engine.client import Completion, EngineClient
from areal_megatron.process.errors import printable, told
from areal_megatron.process.shown import guard
from areal_megatron.process.streams import log_to_stderr, take_stdin, take_stdout
from areal_megatron.reward.served import ServedModels
from areal_megatron.reward.worker import HEADER, Answer, Scored
from areal_megatron.reward.workers import RewardWorkers
from areal_megatron.run.folder import RunError, RunFolder
from areal_megatron.run.network import address
from areal_megatron.workflows.endpoint import AgentEndpoint
from areal_megatron.workflows.episode import EpisodeSpec
from areal_megatron.workflows.runner import EpisodeRunner
from areal_megatron.workflows.sampling import INTERRUPTED, Sampling
from areal_megatron.workflows.scoring import ScoredEpisode, Scorer
from areal_megatron.workflows.workflow import load_workflow

log = logging.getLogger(__name__)
_NICE = 10
"""How much the controller goes before, where workflows compute on its cores."""
_episode: ContextVar[int] = ContextVar("episode")
"""The number of the episode that the running task belongs to."""


class Begin(msgspec.Struct, tag=True):
    """What all episodes have in common."""

    configs: list[Config]
    """One for each environment."""
    workers: int
    """The number of workers of the run."""
    run: str = ""
    """The run's folder; empty: there is no run, and no model is served."""


class Loaded(msgspec.Struct, tag=True):
    """The worker's first message."""

    problem: str = ""
    """Why the workflows or the tokenizer cannot be loaded; empty: the worker is ready."""


class RunEpisode(msgspec.Struct, tag=True):
    number: int
    """Names the episode in further messages."""
    spec: EpisodeSpec


class Cancel(msgspec.Struct, tag=True):
    """Nobody waits for the episode any more."""

    number: int


class Ask(msgspec.Struct, tag=True):
    """An episode asks the engine for an answer, as GenerationRequest does. Answered with AnswerSampled."""

    number: int
    call: int
    """Names the call in its answer."""
    tokens: np.ndarray
    """int32 [n]"""
    max_tokens: int
    stop_tokens: list[int]
    request_id: str
    seed: int
    routes_from: int


class Withdraw(msgspec.Struct, tag=True):
    """An episode no longer waits for the answer to a call, such as one whose agent has closed its connection."""

    number: int
    call: int


class AnswerSampled(msgspec.Struct, tag=True):
    call: int
    completion: Completion


class Judge(msgspec.Struct, tag=True):
    """An episode asks for the score of its last answer. Answered with Judged."""

    number: int
    call: int
    response: str
    cut: bool


class Judged(msgspec.Struct, tag=True):
    call: int
    scored: Scored


class EpisodeEnded(msgspec.Struct, tag=True):
    """What an episode has come to; None: it was interrupted."""

    number: int
    episode: ScoredEpisode | None
    account: dict[str, int]
    """Counts of this worker since it began, by the names of the metrics."""


class WorkflowFailed(msgspec.Struct, tag=True):
    """The run is to end."""

    number: int
    problem: str
    by_config: bool
    """Whether the config is at fault."""


ToWorker = Begin | RunEpisode | Cancel | AnswerSampled | Judged
FromWorker = Loaded | Ask | Judge | Withdraw | EpisodeEnded | WorkflowFailed


class Frames:
    """Messages over a pair of streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any):
        """`kind`: the messages that are read."""
        self._reader, self._writer = reader, writer
        self._encode, self._decode = encoder().encode, decoder(kind).decode

    def send(self, message: msgspec.Struct) -> None:
        """Raises what encoding does, and ConnectionError where the other end is gone."""
        frame = self._encode(message)
        self._writer.write(HEADER.pack(len(frame)) + frame)

    async def receive(self) -> Any:
        """Returns the next message. Raises IncompleteReadError or OSError at the end of the stream."""
        (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        return self._decode(await self._reader.readexactly(length))


class _Calls:
    """The calls to the controller that wait for their answers."""

    def __init__(self, frames: Frames):
        self._frames, self._numbers = frames, itertools.count()
        self._waiting: dict[int, asyncio.Future] = {}

    async def ask(self, message: Ask | Judge) -> Any:
        message.call = next(self._numbers)
        answer = self._waiting[message.call] = asyncio.get_running_loop().create_future()
        try:
            self._frames.send(message)
            return await answer
        except asyncio.CancelledError:
            self._frames.send(Withdraw(message.number, message.call))
            raise
        finally:
            del self._waiting[message.call]

    def answer(self, call: int, value: Any) -> None:
        if call in self._waiting and not self._waiting[call].done():
            self._waiting[call].set_result(value)


class _Client:
    """In the place of an engine's client, for one episode: the controller asks the engine."""

    name = "the controller"

    def __init__(self, calls: _Calls, number: int):
        self._calls, self._number = calls, number
        self.interrupted = False

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        stop_tokens: list[int],
        request_id: str,
        seed: int,
        routes_from: int | None,
        **_: Any,
    ) -> list[Completion]:
        tokens = np.array(prompt, np.int32)
        asked = Ask(self._number, 0, tokens, max_tokens, stop_tokens, request_id, seed, routes_from or 0)
        completion = await self._calls.ask(asked)
        self.interrupted |= completion.finish_reason == INTERRUPTED
        return [completion]


class _Judge:
    """In the place of reward workers, which are the controller's."""

    def __init__(self, calls: _Calls):
        self._calls = calls

    async def judge(self, answers: Sequence[Answer]) -> list[Scored]:
        asked = [Judge(_episode.get(), 0, answer.response, answer.cut) for answer in answers]
        return [await self._calls.ask(message) for message in asked]


class Worker:
    """Runs the episodes that the controller asks for, as many at a time as it likes."""

    def __init__(self, begin: Begin, frames: Frames):
        """Raises ConfigError if a workflow or the tokenizer cannot be loaded."""
        self._frames, self._calls, self._configs = frames, _Calls(frames), begin.configs
        self._tokenizer = Tokenizer(begin.configs[0].model.path)
        self._runners: list[EpisodeRunner | None] = []
        for own in begin.configs:
            judge = cast(RewardWorkers, _Judge(self._calls))  # it has what scores one answer
            scorer = Scorer(own.reward, judge, own.rollout.max_new_tokens)
            workflow, share = load_workflow(own.rollout), -(-own.batch_size // begin.workers)
            served = ServedModels(own.served_models, RunFolder(begin.run)) if begin.run else None
            endpoint = self._endpoint(own, begin.run)
            given = self._tokenizer, scorer, share, served, endpoint
            self._runners.append(EpisodeRunner(own, workflow, *given) if workflow else None)
        self._tasks: dict[int, asyncio.Task] = {}

    def _endpoint(self, config: Config, run: str) -> AgentEndpoint:
        if config.rollout.endpoint == "loopback":
            return AgentEndpoint(self._tokenizer)
        return AgentEndpoint(self._tokenizer, address(config.machine.host), RunFolder(run).credentials_of_agents)

    async def run(self) -> None:
        """Runs until the controller closes the stream."""
        while True:
            match await self._frames.receive():
                case RunEpisode() as asked:
                    task = self._tasks[asked.number] = asyncio.ensure_future(self._episode(asked))
                    task.add_done_callback(lambda _, number=asked.number: self._tasks.pop(number))
                case Cancel(number):
                    if number in self._tasks:
                        self._tasks[number].cancel()
                case AnswerSampled(call, completion):
                    self._calls.answer(call, completion)
                case Judged(call, scored):
                    self._calls.answer(call, scored)

    async def _episode(self, asked: RunEpisode) -> None:
        _episode.set(asked.number)
        number, environment = asked.number, asked.spec.prompt.environment
        client = _Client(self._calls, number)
        rollout, stop_tokens = self._configs[environment].rollout, self._tokenizer.stop_tokens
        engine, chosen = cast(EngineClient, client), self._runners[environment]  # it has what samples
        assert chosen is not None
        sampling = Sampling(engine, rollout, stop_tokens, None, may_interrupt=lambda: client.interrupted)
        try:
            found = await chosen.sample(sampling, asked.spec)
            account = Counter()
            for runner in filter(None, self._runners):
                account.update(runner.account())
            self._frames.send(EpisodeEnded(number, found, dict(account)))
        except (ConfigError, RunError) as e:
            self._frames.send(WorkflowFailed(number, printable(str(e)), isinstance(e, ConfigError)))
        except Exception as e:  # the controller is not to wait for ever
            log.exception("an episode ends the run")
            self._frames.send(WorkflowFailed(number, printable(told(e)), by_config=False))


class HeldUp:
    """Ends this process with code 1 and a traceback when one task has held up the event loop for `limit_s` seconds.

    A thread looks at which task runs; the clock itself needs no interpreter, which the task may hold.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float):
        self._loop, self._limit_s, self._turns = loop, limit_s, 0
        self._turn()
        threading.Thread(target=self._watch, name="held up", daemon=True).start()

    def _turn(self) -> None:
        self._turns += 1
        self._loop.call_later(min(1.0, self._limit_s / 4), self._turn)

    def _watch(self) -> None:
        seen = None
        while True:
            at = asyncio.current_task(self._loop), self._turns
            if at != seen or at[0] is None:
                faulthandler.dump_traceback_later(self._limit_s, exit=True)
                seen = at
            time.sleep(min(1.0, self._limit_s / 4))


def _let_go(*streams: int) -> None:
    """In a process that a workflow forks, which may live on: the controller is to see how its streams end here."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in streams:
        os.dup2(nothing, stream)


def _give_way() -> None:
    """Has all threads of this process give way to the controller: after it has loaded, for which a run waits, and which
    on busy cores would take minutes."""
    if sys.platform == "linux":
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, int(thread), os.getpriority(os.PRIO_PROCESS, int(thread)) + _NICE)


async def serve() -> None:
    """Runs a worker on stdin and stdout."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    source, output = take_stdin(), take_stdout()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, output)
    os.register_at_fork(after_in_child=partial(_let_go, source.fileno(), output.fileno()))
    frames = Frames(reader, asyncio.StreamWriter(transport, protocol, None, loop), ToWorker)
    begin = await frames.receive()
    try:
        worker = Worker(begin, frames)
    except ConfigError as e:
        frames.send(Loaded(str(e)))
        await asyncio.sleep(0)
        transport.close()
        return
    _give_way()
    frames.send(Loaded())
    HeldUp(loop, begin.configs[0].rollout.workflow_timeout_s)
    await worker.run()


def main() -> None:
    guard()
    log_to_stderr()
    if sys.platform == "linux":
        # one that is stuck in the user's code would not notice that its controller died
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        # out of memory, the kernel ends workers before the controller, which replaces them
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    try:
        asyncio.run(serve())
    except (asyncio.IncompleteReadError, OSError):  # the controller has closed the stream, or is gone
        os._exit(0)  # threads of the workflows may go on


if __name__ == "__main__":
    main()
