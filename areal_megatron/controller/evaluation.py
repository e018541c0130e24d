"""Held-out accuracy: one answer to each prompt, sampled as in training, outside of the schedule."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from areal_megatron.config import Config
from areal_megatron.controller.engine import Engine
from areal_megatron.controller.generation import IsLost
from areal_megatron.data.prompts import Prompt
from areal_megatron.engine.client import Completion, EngineError
from areal_megatron.observe.timeline import Timeline
from areal_megatron.workflows import single_turn
from areal_megatron.workflows.episode import Place
from areal_megatron.workflows.runner import EpisodeRunner, ScoredTranscript
from areal_megatron.workflows.sampling import Sampling, cache_salt, sampling_seed
from areal_megatron.workflows.scoring import Scorer

log = logging.getLogger(__name__)


class _AllLost(EngineError):
    """No engine that had the version is left."""


class Evaluation:
    """Of the prompts of data.eval that fit."""

    def __init__(
        self,
        config: Config,
        engines: list[Engine],
        prompts: list[Prompt],
        stop_tokens: list[int],
        scorer: Scorer,
        timeline: Timeline,
        is_lost: IsLost,
        on_room: Callable[[], None],
        episodes: EpisodeRunner | None = None,
    ):
        """`on_room`: an engine may take another request; `episodes`: of the config's workflow, None for single_turn."""
        self._episodes = episodes
        self._prompts = [p for p in prompts if len(p.tokens) <= config.data.max_prompt_tokens]
        self._config, self._engines, self._stop_tokens = config, engines, stop_tokens
        self._scorer, self._timeline, self._is_lost, self._on_room = scorer, timeline, is_lost, on_room

    async def run(self, version: int, share: float = 1.0) -> dict[str, float] | None:
        """accuracy, items and response_tokens_mean over the engines that have `version` or a later one.

        Takes at most `share` of rollout.max_running of each engine; None without held-out prompts, and where the
        engines that had the version were lost. Raises EngineError if a request fails or no engine has the version.
        """
        if not self._prompts:
            return None
        start, lost = time.time_ns(), False
        try:
            share_of_each = max(1, int(self._config.rollout.max_running * share))
            slots = asyncio.Semaphore(share_of_each * len(self._with(version)))
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer(prompt, version, slots)) for prompt in self._prompts]
        except* _AllLost as e:
            log.error("%s", e.exceptions[0])
            lost = True
        if lost:
            return None
        self._timeline.event("eval", start, time.time_ns(), version=version, items=len(tasks))
        correct, lengths = zip(*(task.result() for task in tasks), strict=True)
        return {
            "accuracy": sum(correct) / len(tasks),
            "items": len(tasks),
            "response_tokens_mean": sum(lengths) / len(tasks),
        }

    def _with(self, version: int) -> list[Engine]:
        """The engines that have the version, or a later one. Raises EngineError if there is none."""
        if engines := [e for e in self._engines if e.version >= version and e.state != "torn" and not e.gone]:
            return engines
        lost = any(engine.losses for engine in self._engines)
        reason = "those that had it were lost" if lost else "no engine has committed it"
        raise (_AllLost if lost else EngineError)(f"version {version} cannot be evaluated: {reason}, see the log above")

    async def _answer(self, prompt: Prompt, version: int, slots: asyncio.Semaphore) -> tuple[bool, int]:
        async with slots:
            while (sampled := await self._sample(prompt, version)) is None:
                pass
        if isinstance(sampled, ScoredTranscript):
            return sampled.score.correct, len(sampled.tokens)
        (score,) = await self._scorer.score(prompt, [sampled])
        return score.correct, len(sampled.tokens)

    async def _sample(self, prompt: Prompt, version: int) -> Completion | ScoredTranscript | None:
        """None: the engine was lost meanwhile."""
        engine = min(self._with(version), key=lambda e: e.running)
        client = engine.client
        engine.occupy(1)
        try:
            rollout, seed = self._config.rollout, sampling_seed(self._config.seed, "eval", prompt.id)
            sampling = Sampling(client, rollout, self._stop_tokens, cache_salt(rollout, engine.version))
            request_id = f"eval-{version}-{prompt.id}"
            if self._episodes is None:
                (sampled,) = await single_turn.sample(sampling, prompt, 1, request_id, seed)
            else:
                place = Place(prompt, engine.version, request_id, seed, "eval")
                (sampled,) = await self._episodes.sample(sampling, place, 1)
        except EngineError as e:
            if not await self._is_lost(engine, client, e):
                raise
            return None
        finally:
            engine.release(1)
            self._on_room()
        return sampled
