"""Evaluations of data.eval during a run: beside the training, which never waits for one, and one at a time.

An evaluation that is due is sent to the engines that have its version, or a later one, and takes eval.share of their
slots until it has all answers. Engines get new versions meanwhile, as always. So answers may be of later versions in
part, and the line in metrics.jsonl says of which. After the last update nothing else runs, and it takes all slots.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_megatron.config import Config
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.engine import Engine
from areal_megatron.controller.sampler import Sampler
from areal_megatron.data.files import file_names
from areal_megatron.data.prompts import Prompt
from areal_megatron.engine.client import EngineError
from areal_megatron.observe import estimates
from areal_megatron.observe.shown_answers import SHOWN, AnswersWriter, ShownAnswer, evenly
from areal_megatron.observe.status import EngineState
from areal_megatron.workflows.episode import EpisodeSpec
from areal_megatron.workflows.sampling import sampling_seed
from areal_megatron.workflows.scoring import ScoredEpisode

log = logging.getLogger(__name__)


class _AllLost(EngineError):
    """No engine that had the version is left."""


@dataclass(frozen=True)
class _Request:
    """Some of the n answers to a prompt, which an engine samples together."""

    prompt: Prompt
    first: int
    """The number of the first of these answers, from 0."""
    n: int


@dataclass(frozen=True)
class _Answer:
    """A scored answer, as `estimates.figures` takes it."""

    item: int
    source: int
    correct: bool
    truncated: bool
    tokens: int
    """The environment's included."""
    versions: np.ndarray
    """int32 [tokens that the model sampled]"""


class Evaluation:
    """Evaluates versions on the prompts of data.eval that fit."""

    def __init__(
        self,
        config: Config,
        sampler: Sampler,
        prompts: Sequence[Prompt],
        changed: Changed,
        decode: Callable[[list[int]], str],
        shown: AnswersWriter,
    ):
        """`changed` is notified when an engine may have room, or may be lost; `decode` gives the text of an answer's
        tokens, and `shown` keeps the first answers to SHOWN of the prompts."""
        self._config, self._sampler, self._changed = config, sampler, changed
        self._decode, self._shown = decode, shown
        fits = [sampler.of(prompt).fits(len(prompt.tokens)) for prompt in prompts]
        self._asked = [prompt for prompt, fit in zip(prompts, fits, strict=True) if fit]
        self._too_long = [prompt for prompt, fit in zip(prompts, fits, strict=True) if not fit]
        self._first: dict[int, ScoredEpisode | None] = {prompt.id: None for prompt in evenly(self._asked, SHOWN)}
        """The first answers to the prompts that are shown, as far as they are known; by their ids."""
        self._share = config.eval.share
        self._held: Counter[int] = Counter()
        """Answers that engines owe, by engine."""

    async def run(self, version: int) -> dict[str, Any] | None:
        """Returns the figures (docs/evaluation.md) of `version`, or of later ones that engines get meanwhile.

        Answers whose rewards failed are neither right nor wrong: they are left out, and counted. Returns None without
        prompts, if all rewards failed, and where the engines that had the version were lost. Raises EngineError if a
        request fails or no engine has the version.
        """
        if not self._asked:
            return None
        start, lost = time.time_ns(), False
        answers: list[_Answer] = []
        try:
            await self._ask_all(version, answers)
        except* _AllLost as e:
            log.error("%s", e.exceptions[0])
            lost = True
        if lost:
            return None
        end = time.time_ns()
        self._sampler.timeline.event("eval", start, end, version=version, items=len(self._asked))
        if not answers:
            log.error("version %d is not evaluated: the rewards of all answers failed, see the log above", version)
            return None
        await asyncio.to_thread(self._show, version)  # before the line in metrics.jsonl, which trackers follow
        found = await asyncio.to_thread(self._figures, answers)  # resampling would hold up requests
        return found | {"seconds": (end - start) / 1e9}

    def use_all_slots(self) -> None:
        """Nothing else runs from now on."""
        self._share = 1.0
        self._changed.notify()

    async def _ask_all(self, version: int, answers: list[_Answer]) -> None:
        n, most = self._config.eval.n, self._room(self._config.eval.share)
        queue = deque(
            _Request(prompt, first, min(most, n - first)) for prompt in self._asked for first in range(0, n, most)
        )
        self._held.clear()
        self._first = dict.fromkeys(self._first)
        async with asyncio.TaskGroup() as tasks:
            while queue or self._held.total():
                engine = self._with_room(version, queue[0].n) if queue else None
                if engine is None:
                    await self._changed.wait()
                    continue
                request = queue.popleft()
                self._held[engine.index] += request.n
                engine.occupy(request.n)
                tasks.create_task(self._ask(engine, version, request, queue, answers))

    async def _ask(
        self, engine: Engine, version: int, request: _Request, queue: deque[_Request], answers: list[_Answer]
    ) -> None:
        """Adds the answers; puts the request back into the queue if the engine was lost."""
        prompt = request.prompt
        seed = sampling_seed(self._config.seed, "eval", prompt.id) + request.first
        request_id = f"eval-{version}-{prompt.id}-{request.first}"
        spec = EpisodeSpec(prompt, engine.version, request_id, seed, "eval")
        sampled = await self._sampler.sample(engine, spec, request.n)
        if sampled is None:
            queue.appendleft(request)
        if sampled and request.first == 0 and prompt.id in self._first:
            self._first[prompt.id] = sampled[0]
        answers += (_answer(prompt, ended) for ended in sampled or () if not ended.score.failed)
        self._held[engine.index] -= request.n
        self._changed.notify()

    def _room(self, share: float) -> int:
        return max(1, int(self._config.rollout.max_running * share))

    def _with_room(self, version: int, n: int) -> Engine | None:
        """The least busy engine with the version, or a later one, that may take n answers; None: they have to wait.

        Raises EngineError if no engine has the version.
        """
        engines = self._sampler.engines
        able = [e for e in engines if e.version >= version and e.state != EngineState.TORN and not e.gone]
        if not able:
            lost = any(engine.losses for engine in engines)
            reason = "those that had it were lost" if lost else "no engine has committed it"
            raise (_AllLost if lost else EngineError)(
                f"version {version} cannot be evaluated: {reason}, see the log above"
            )
        room = self._room(self._share) - n
        return min((e for e in able if self._held[e.index] <= room), key=lambda e: e.running, default=None)

    def _show(self, version: int) -> None:
        known = [(prompt, first) for prompt in self._asked if (first := self._first.get(prompt.id))]
        self._shown.write(version, [_shown(prompt, first, self._decode) for prompt, first in known])

    def _figures(self, answers: Sequence[_Answer]) -> dict[str, Any]:
        n = self._config.eval.n
        ks = [n] if n > 1 else []  # pass@1 is avg@n
        files = {
            name: {"too_long": sum(prompt.source == number for prompt in self._too_long)}
            | estimates.figures([answer for answer in answers if answer.source == number], n, ks)
            for number, name in enumerate(file_names(self._config, "eval"))
        }
        overall = estimates.figures(answers, n, [])
        accuracy = overall.pop(f"avg@{n}")
        versions = np.concatenate([answer.versions for answer in answers])
        return {
            "accuracy": accuracy["value"],
            "accuracy_low": accuracy["low"],
            "accuracy_high": accuracy["high"],
            "n": n,
            **overall,
            "too_long": len(self._too_long),
            "failed": n * len(self._asked) - len(answers),
            "version_min": int(versions.min()),
            "version_mean": float(versions.mean()),
            "version_max": int(versions.max()),
            "files": files,
        }


class EvaluationQueue:
    """Runs the evaluations that are due, one after the other. Of those that wait only the newest is kept."""

    def __init__(
        self, evaluation: Evaluation, write: Callable[[int, dict[str, Any]], None], every: int = 0, first: int = 0
    ):
        """`write` is called with the version and the figures of each evaluation. Versions are due that `every` divides,
        from `first` on; none if it is 0."""
        self._evaluation, self._write, self._every = evaluation, write, every
        self._due = every and -(-max(first, 1) // every) * every
        self._waiting: int | None = None
        self._running: int | None = None
        self._changed = Changed()
        self.left_out = 0
        """The number of evaluations that were due and never began."""

    def reached(self, version: int) -> None:
        """Has the last version evaluated that is due, as every engine has this one or a later one. Engines that fail to
        get a version may go from one before it to one after it."""
        if self._every and version >= self._due:
            due = version - version % self._every
            self.left_out += (due - self._due) // self._every
            self._due = due + self._every
            self.add(due)

    def add(self, version: int) -> None:
        """Has the version evaluated as soon as no other evaluation runs."""
        if self._waiting is not None:
            self.left_out += 1
            log.warning(
                "version %d is not evaluated: the evaluation of version %s still runs, and version %d is due",
                self._waiting,
                self._running,
                version,
            )
        self._waiting = version
        self._changed.notify()

    async def run(self) -> None:
        """Evaluates for ever. Raises what `Evaluation.run` does."""
        while True:
            while self._waiting is None:
                await self._changed.wait()
            self._running, self._waiting = self._waiting, None
            found = await self._evaluation.run(self._running)
            if found is not None:
                self._write(self._running, found)
            self._running = None
            self._changed.notify()

    async def finish(self, version: int) -> None:
        """Returns when the last version has been evaluated, with all slots of the engines."""
        self._evaluation.use_all_slots()
        self.add(version)
        while self._waiting is not None or self._running is not None:
            await self._changed.wait()


def _answer(prompt: Prompt, ended: ScoredEpisode) -> _Answer:
    score = ended.score
    return _Answer(prompt.id, prompt.source, score.correct, score.truncated, ended.length, ended.versions)


def _shown(prompt: Prompt, first: ScoredEpisode, decode: Callable[[list[int]], str]) -> ShownAnswer:
    score = first.score
    return ShownAnswer(
        prompt=prompt.text,
        answer=prompt.answer,
        response=decode(first.context.answer),
        score=None if score.failed else score.score,
        correct=score.correct,
        truncated=score.truncated,
    )
