"""Scores answers in worker processes, which are killed and replaced when they take too long.

An answer that takes too long is scored once more, by a new worker and with the whole limit, before it counts as wrong:
its worker may have had no processor, or the machine may have been paused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from areal_megatron.config import ConfigError, RewardConfig
from areal_megatron.errors import printable
from areal_megatron.lateness import now, within
from areal_megatron.reward.worker import HEADER, Answer, Ready, Scored
from areal_megatron.run import RunError

log = logging.getLogger(__name__)
_START_TIMEOUT_S = 120
_TRIES = 2
_RETRY_S = 1.0
_REMIND_S = 60.0
_decode_ready = msgspec.msgpack.Decoder(Ready).decode
_decode_scored = msgspec.msgpack.Decoder(Scored).decode


def default_count() -> int:
    """Returns the number of workers of a run: a quarter of the cores that this process may use, from 1 to 32."""
    return min(32, max(1, len(os.sched_getaffinity(0)) // 4))


class RewardWorkers:
    """A pool of reward workers. Callers wait for a free one, so no more is queued than there are callers.

    Example:
        workers = RewardWorkers(Reward(function="math"))
        await workers.start()
        await workers.score([Answer(prompt="2+3=", response="\\\\boxed{5}", answer="5")])  # [1.0]
        await workers.close()
    """

    def __init__(self, config: RewardConfig, model: str | Path = "", count: int = 0):
        """`model` is the folder whose tokenizer decodes answers that are given as token ids; `count` is the number of
        processes, 0 for `default_count`."""
        self._config, self._model, self._count = config, str(model), count or default_count()
        self._free: asyncio.Queue[_Worker] = asyncio.Queue()
        self._workers: set[_Worker] = set()
        self.failures = 0
        """The number of answers whose scoring raised, took too long, or returned no finite number."""
        self._away_since: float | None = None
        self._reminded = 0.0
        self.refused = 0
        """The number of answers whose form the reward function did not accept."""

    async def start(self) -> None:
        """Starts the processes. Raises ConfigError if the reward function cannot be loaded."""
        for worker in await asyncio.gather(*(self._new_worker() for _ in range(self._count))):
            self._free.put_nowait(worker)

    async def score(self, answers: Sequence[Answer]) -> list[float]:
        """Returns the score of each answer, in order; a failure scores 0.0 (wrong) and is counted in `failures`.

        Raises RunError if the service of rewards is away for reward.away_s.
        """
        return [scored.score for scored in await self.judge(answers)]

    async def judge(self, answers: Sequence[Answer]) -> list[Scored]:
        """Returns the score of each answer as `score` does, with the reward function's feedback."""
        problems = [_problem_of_sending(answer) for answer in answers]
        if any(problems):
            judged = iter(await self.judge([answer for answer, bad in zip(answers, problems, strict=True) if not bad]))
            return [self._counted(Scored(0.0, problem)) if problem else next(judged) for problem in problems]
        worker = await self._free.get()
        scores: list[Scored] = []
        tries = 1
        try:
            while len(scores) < len(answers):
                if worker.dead:
                    worker = await self._replace(worker)
                worker.ask(answers[len(scores) :])
                while len(scores) < len(answers) and not worker.dead:
                    if (scored := await self._next_score(worker, tries)) is not None:
                        scores.append(scored)
                    tries = 1 if scored is not None else tries + 1
        except (asyncio.CancelledError, RunError):
            await worker.kill()  # it would still write scores that nobody reads
            raise
        finally:
            self._free.put_nowait(worker)
        return scores

    async def close(self) -> None:
        await asyncio.gather(*(worker.kill() for worker in self._workers))

    async def _next_score(self, worker: _Worker, tries: int) -> Scored | None:
        """Returns the score of the answer that the worker is at, for the `tries`-th time; None: ask another worker."""
        limit = self._config.timeout_s
        try:
            while (scored := await within(limit, worker.next_scored())).away:
                self._wait_for_service(scored.problem)
            self._away_since = None
        except TimeoutError:
            await worker.kill()
            if tries < _TRIES:
                return None
            scored = Scored(0.0, f"{self._config.function} took longer than reward.timeout_s={limit:g} s, twice")
        except (asyncio.IncompleteReadError, OSError):
            await worker.kill()
            scored = Scored(0.0, f"{self._config.function} ended its worker process with code {worker.exit_code}")
        if scored.last:
            await worker.kill()
        return self._counted(scored)

    def _wait_for_service(self, problem: str) -> None:
        """Raises RunError if the service of rewards has been away for longer than reward.away_s."""
        if self._away_since is None:
            self._away_since, self._reminded = now(), now() - _REMIND_S
        away_s = now() - self._away_since
        if away_s > self._config.away_s:
            raise RunError(f"reward.function: away for {away_s:.0f} s (reward.away_s): {printable(problem, 500)}")
        if now() - self._reminded >= _REMIND_S:
            self._reminded = now()
            log.warning("answers have waited %.0f s for their scores: %s", away_s, printable(problem, 500))

    def _counted(self, scored: Scored) -> Scored:
        self.refused += scored.refused
        if scored.problem:
            self.failures += 1
            if self.failures <= 10 or self.failures % 1000 == 0:
                log.warning("reward failure %d: %s", self.failures, printable(scored.problem, 1000))
        return scored

    async def _replace(self, worker: _Worker) -> _Worker:
        self._workers.discard(worker)
        while True:
            try:
                return await self._new_worker()
            except OSError as e:  # no descriptor, process or memory is left for the moment
                log.warning("a reward worker cannot be started again yet: %s", e)
                await asyncio.sleep(_RETRY_S)

    async def _new_worker(self) -> _Worker:
        worker = await _Worker.start(self._config.function, self._config.timeout_s, self._model)
        self._workers.add(worker)
        return worker


def _problem_of_sending(answer: Answer) -> str:
    try:
        msgspec.msgpack.encode(answer)
    except (UnicodeEncodeError, TypeError, OverflowError) as e:
        return f"{answer.where or 'an answer'}: cannot be sent to a reward worker: {e}"
    return ""


class _Worker:
    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process
        self.dead = False

    @classmethod
    async def start(cls, function: str, timeout_s: float, model: str) -> _Worker:
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, "-m", "areal_megatron.reward.worker", function, str(timeout_s), model]
        worker = cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))
        try:
            ready = _decode_ready(await within(_START_TIMEOUT_S, worker._read()))
        except (TimeoutError, asyncio.IncompleteReadError):
            await worker.kill()
            raise ConfigError(
                f"reward.function: {function} did not load within {_START_TIMEOUT_S} s; its output is above"
            ) from None
        if ready.problem:
            await worker.kill()
            raise ConfigError(ready.problem)
        return worker

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    def ask(self, answers: Sequence[Answer]) -> None:
        frame = msgspec.msgpack.encode(answers)
        self._process.stdin.write(HEADER.pack(len(frame)) + frame)

    async def next_scored(self) -> Scored:
        return _decode_scored(await self._read())

    async def kill(self) -> None:
        self.dead = True
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def _read(self) -> bytes:
        stream = self._process.stdout
        (length,) = HEADER.unpack(await stream.readexactly(HEADER.size))
        return await stream.readexactly(length)
