"""Scores answers in worker processes, which are killed and replaced when they take too long.

What fails is tried again by another worker, after a pause: the service that it asks may be ill, the worker may have had
no processor or no memory. A failure says nothing about an answer, so it is never a score. What a function of the user
raises by mistake ends the run instead: it would fail for other answers, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import msgspec

from areal_megatron.config import ConfigError, RewardConfig
from areal_megatron.process.errors import printable, worth_a_line
from areal_megatron.process.lateness import now, pauses, within
from areal_megatron.reward.function import PURE
from areal_megatron.reward.worker import HEADER, Answer, AnswerGroup, Ready, Scored
from areal_megatron.run.folder import RunError

log = logging.getLogger(__name__)
_READ_BYTES = 2**16
_START_TIMEOUT_S = 120
_RETRY_S = 1.0
_REMIND_S = 60.0
_decode_ready = msgspec.msgpack.Decoder(Ready).decode
_decode_scored = msgspec.msgpack.Decoder(Scored).decode


def default_count() -> int:
    """Returns the number of workers where reward.workers is 0: a quarter of this process's cores, from 1 to 32."""
    return min(32, max(1, len(os.sched_getaffinity(0)) // 4))


class RewardWorkers:
    """A pool of reward workers. Callers wait for a free one, so no more is queued than there are callers.

    Example:
        workers = RewardWorkers(RewardConfig(function="math", workers=4))
        await workers.start()
        await workers.judge([Answer(prompt="2+3=", response="\\\\boxed{5}", answer="5")])  # [Scored(score=1.0)]
        await workers.close()
    """

    def __init__(
        self,
        config: RewardConfig,
        model: str | Path = "",
        run: str | Path = "",
        output: str | Path | None = None,
        stand_ins: Iterable[str] = (),
    ):
        """`model` is the folder whose tokenizer decodes answers that are given as token ids; `run` the run's,
        for the functions to ask its served models; `stand_ins` names these where there is no run yet.
        What the functions print is appended to the file `output`; None: it goes to stderr."""
        self._config, self._count = config, config.workers or default_count()
        self._places, self._output = (str(model), str(run), ",".join(stand_ins)), output
        self._free: asyncio.Queue[_Worker] = asyncio.Queue()
        self._workers: set[_Worker] = set()
        self.failures = 0
        """The number of answers without a score, since all tries raised, took too long or returned no finite number."""
        self._pauses = self.retries = 0
        """The number of answers and groups that were tried again, each time counted."""
        self._away_since: float | None = None
        self._reminded = 0.0
        self.refused = 0
        """The number of answers whose form the reward function did not accept."""
        self.takes_row = False
        """Whether the reward function wants `Answer.row`; known after `start`."""
        self._at_work, self._worked_s, self._counted_at = 0, 0.0, time.monotonic()

    async def start(self) -> None:
        """Starts the processes. Raises ConfigError if the reward function cannot be loaded."""
        for worker in await asyncio.gather(*(self._new_worker() for _ in range(self._count))):
            self._free.put_nowait(worker)
            self.takes_row = worker.takes_row

    async def judge(self, answers: Sequence[Answer]) -> list[Scored]:
        """Returns the score of each answer, in order.

        What fails is tried again for reward.retry_s; what fails for good has a `problem` and is counted in `failures`.
        An answer that a built-in function cannot finish, twice, is refused: its own text is the reason. Raises RunError
        if the service of rewards is away for reward.away_s, ConfigError for one of MISTAKES in a function of the user.
        """
        for answer in () if self.takes_row else answers:
            answer.row = None
        problems = [problem_of_sending(answer) for answer in answers]
        if any(problems):
            judged = iter(await self.judge([answer for answer, bad in zip(answers, problems, strict=True) if not bad]))
            return [self._counted(Scored(problem=problem)) if problem else next(judged) for problem in problems]
        pure = self._config.function in PURE
        scores = await self._tried(answers, 0.0 if pure else self._config.retry_s)
        return [self._counted(_refused(one) if pure and one.problem and not one.killed else one) for one in scores]

    async def terms(self, group: AnswerGroup) -> Scored:
        """Returns what the group function adds to the rewards of a group's answers; it fails as in `judge`, with all
        the answers."""
        problem = problem_of_sending(group)
        (scored,) = [Scored(problem=problem)] if problem else await self._tried([group], self._config.retry_s)
        return self._counted(scored, len(group.members))

    async def _tried(self, requests: Sequence[Answer | AnswerGroup], limit_s: float) -> list[Scored]:
        """Returns the result of each request; those that fail are tried again. Raises ConfigError for a mistake."""
        scores = await self._asked(requests)
        for pause_s in pauses(limit_s):
            failed = [k for k, scored in enumerate(scores) if scored.problem and not scored.never]
            if not failed:
                break
            self.retries += len(failed)
            self._pauses += 1
            if worth_a_line(self._pauses):
                problem = printable(scores[failed[0]].problem, 1000)
                log.warning("rewards of %d answers are tried again in %g s: %s", len(failed), pause_s, problem)
            await asyncio.sleep(pause_s)
            for k, scored in zip(failed, await self._asked([requests[k] for k in failed]), strict=True):
                scores[k] = scored
        return scores

    async def _asked(self, requests: Sequence[Answer | AnswerGroup]) -> list[Scored]:
        scores = await self.ask_once(requests)
        for request, scored in zip(requests, scores, strict=True):
            key = "group_function" if isinstance(request, AnswerGroup) else "function"
            if scored.raised and (self._config.is_own or key == "group_function"):
                name = getattr(self._config, key)
                problem = printable(f"{name} has a mistake in {scored.place}: {scored.problem}", 1000)
                raise ConfigError(f"reward.{key}: {problem}; correct it and go on with resume=auto")
        return scores

    async def ask_once(self, requests: Sequence[Answer | AnswerGroup]) -> list[Scored]:
        """Returns the result of each request, by one worker after the other; nothing is tried again. Raises RunError if
        the service of rewards is away for reward.away_s."""
        worker = await self._free.get()
        self._count_work(1)
        scores: list[Scored] = []
        try:
            while len(scores) < len(requests):
                if worker.dead:
                    worker = await self._replace(worker)
                worker.ask(requests[len(scores) :])
                while len(scores) < len(requests) and not worker.dead:
                    scores.append(await self._next_score(worker, requests[len(scores)]))
        except (asyncio.CancelledError, RunError):
            await worker.kill()  # it would still write scores that nobody reads
            raise
        finally:
            self._count_work(-1)
            self._free.put_nowait(worker)
        return scores

    def take_worked(self) -> float:
        """Returns for how many seconds a worker had answers to score, the mean over all, and begins another sum."""
        self._count_work(0)
        worked_s, self._worked_s = self._worked_s, 0.0
        return worked_s / self._count

    def _count_work(self, more: int) -> None:
        """Adds up the work since it was called last; from now on `more` further workers have some."""
        now_s = time.monotonic()
        self._worked_s += self._at_work * (now_s - self._counted_at)
        self._at_work, self._counted_at = self._at_work + more, now_s

    async def close(self) -> None:
        await asyncio.gather(*(worker.kill() for worker in self._workers))

    async def _next_score(self, worker: _Worker, request: Answer | AnswerGroup) -> Scored:
        """Returns the result of the request that the worker is at."""
        limit = self._config.timeout_s
        name = self._config.group_function if isinstance(request, AnswerGroup) else self._config.function
        name = f"{request.where}: {name}" if request.where else name
        try:
            since = None
            while (scored := worker.heard() or await within(limit, worker.next_scored())).away:
                since = now() if since is None else since
                self._wait_for_service(scored.problem)
                if now() - since > self._config.away_s:  # and others have had their scores meanwhile
                    await worker.kill()
                    problem = f"{scored.problem}, for {self._config.away_s:g} s (reward.away_s), but not for others"
                    return Scored(problem=problem, never=True)
            self._away_since = None
        except TimeoutError:
            await worker.kill()
            scored = Scored(problem=f"{name} took longer than reward.timeout_s={limit:g} s", ended=True)
        except (asyncio.IncompleteReadError, OSError):
            await worker.kill()
            problem = f"{name} ended its worker process with code {worker.exit_code}"
            scored = Scored(problem=problem, killed=worker.exit_code == -signal.SIGKILL, ended=True)
        if scored.last:
            await worker.kill()
        return scored

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

    def _counted(self, scored: Scored, answers: int = 1) -> Scored:
        self.refused += scored.refused
        if scored.problem:
            self.failures += answers
            if worth_a_line(self.failures // answers):
                log.warning("reward failure %d: %s", self.failures, printable(scored.problem, 1000))
        return scored

    async def _replace(self, worker: _Worker) -> _Worker:
        self._workers.discard(worker)
        while True:
            try:
                return await self._new_worker()
            except (OSError, _NotLoaded) as e:  # no descriptor, process or memory is left for the moment
                log.warning("a reward worker cannot be started again yet: %s", e)
                await asyncio.sleep(_RETRY_S)

    async def _new_worker(self) -> _Worker:
        worker = await _Worker.start(self._config, self._places, self._output)
        self._workers.add(worker)
        return worker


def problem_of_sending(request: Answer | AnswerGroup) -> str:
    """Returns why a request cannot be sent to a worker, such as a number of more than 64 bits in its row; or ""."""
    try:
        msgspec.msgpack.encode(request)
    except (UnicodeEncodeError, TypeError, OverflowError) as e:
        return f"{request.where or 'an answer'}: cannot be sent to a reward worker: {e}"
    return ""


def _refused(scored: Scored) -> Scored:
    log.info("an answer is refused that could not be graded: %s", printable(scored.problem, 1000))
    return Scored(feedback="The final answer is too much to work out.", refused=True, last=scored.last)


class _NotLoaded(ConfigError):
    """A worker process has ended, or took too long, before it had loaded its functions."""


class _Worker:
    def __init__(self, process: asyncio.subprocess.Process):
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self.dead = self.takes_row = False
        self._unread = bytearray()

    @classmethod
    async def start(cls, config: RewardConfig, places: Sequence[str], output: str | Path | None) -> _Worker:
        pipe, function = asyncio.subprocess.PIPE, config.function
        given = [function, config.group_function, str(config.timeout_s), *places]
        command = [sys.executable, "-m", "areal_megatron.reward.worker", *given]
        with open(output, "ab") if output else nullcontext() as stderr:
            worker = cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=stderr))
        try:
            ready = _decode_ready(await within(_START_TIMEOUT_S, worker._read()))
        except (TimeoutError, asyncio.IncompleteReadError) as e:
            await worker.kill()
            late = isinstance(e, TimeoutError)
            how = f"did not load within {_START_TIMEOUT_S} s" if late else f"ended with code {worker.exit_code}"
            raise _NotLoaded(f"reward.function: the worker process of {function} {how}; its output is above") from None
        if ready.problem:
            await worker.kill()
            raise ConfigError(ready.problem)
        worker.takes_row = ready.takes_row
        return worker

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    def ask(self, requests: Sequence[Answer | AnswerGroup]) -> None:
        frame = msgspec.msgpack.encode(requests)
        self._stdin.write(HEADER.pack(len(frame)) + frame)

    def heard(self) -> Scored | None:
        """Returns the next result if it is there already: waiting for each would take turns of a busy event loop."""
        frame = self._frame()
        return None if frame is None else _decode_scored(frame)

    async def next_scored(self) -> Scored:
        return _decode_scored(await self._read())

    async def kill(self) -> None:
        self.dead = True
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)  # asyncio's own loses the exit code of one that has ended
        await self._process.wait()

    async def _read(self) -> bytes:
        while (frame := self._frame()) is None:
            if not (more := await self._stdout.read(_READ_BYTES)):
                raise asyncio.IncompleteReadError(bytes(self._unread), None)
            self._unread += more
        return frame

    def _frame(self) -> bytes | None:
        """Takes a whole message off what was read."""
        if len(self._unread) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self._unread)[0]
        if len(self._unread) < end:
            return None
        frame = bytes(self._unread[HEADER.size : end])
        del self._unread[:end]
        return frame
