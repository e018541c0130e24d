"""Held-out accuracy: one answer to each prompt, sampled as in training, outside of the schedule."""

from __future__ import annotations

import asyncio
import logging
import time

from areal_megatron.config import Config
from areal_megatron.controller.engine import Engine
from areal_megatron.controller.sampler import Sampler
from areal_megatron.data.prompts import Prompt
from areal_megatron.engine.client import EngineError
from areal_megatron.observe.status import EngineState
from areal_megatron.workflows.episode import EpisodeSpec
from areal_megatron.workflows.sampling import sampling_seed

log = logging.getLogger(__name__)


class _AllLost(EngineError):
    """No engine that had the version is left."""


class Evaluation:
    """Evaluates versions on the prompts of data.eval that fit."""

    def __init__(self, config: Config, sampler: Sampler, prompts: list[Prompt]):
        self._config, self._sampler = config, sampler
        self._prompts = [p for p in prompts if len(p.tokens) <= config.data.max_prompt_tokens]

    async def run(self, version: int, share: float = 1.0) -> dict[str, float] | None:
        """Returns accuracy, items and response_tokens_mean over the engines that have `version` or a later one.

        Takes at most `share` of rollout.max_running of each engine. Returns None without held-out prompts, and where
        the engines that had the version were lost. Raises EngineError if a request fails or no engine has the version.
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
        self._sampler.timeline.event("eval", start, time.time_ns(), version=version, items=len(tasks))
        correct, lengths = zip(*(task.result() for task in tasks), strict=True)
        return {
            "accuracy": sum(correct) / len(tasks),
            "items": len(tasks),
            "response_tokens_mean": sum(lengths) / len(tasks),
        }

    def _with(self, version: int) -> list[Engine]:
        """The engines that have the version, or a later one. Raises EngineError if there is none."""
        engines = self._sampler.engines
        if able := [e for e in engines if e.version >= version and e.state != EngineState.TORN and not e.gone]:
            return able
        lost = any(engine.losses for engine in engines)
        reason = "those that had it were lost" if lost else "no engine has committed it"
        raise (_AllLost if lost else EngineError)(f"version {version} cannot be evaluated: {reason}, see the log above")

    async def _answer(self, prompt: Prompt, version: int, slots: asyncio.Semaphore) -> tuple[bool, int]:
        """Whether the answer is correct, and its length in tokens."""
        seed = sampling_seed(self._config.seed, "eval", prompt.id)
        sampled = None
        async with slots:
            while sampled is None:  # an engine that is lost takes the request with it
                engine = min(self._with(version), key=lambda e: e.running)
                engine.occupy(1)
                spec = EpisodeSpec(prompt, engine.version, f"eval-{version}-{prompt.id}", seed, "eval")
                sampled = await self._sampler.sample(engine, spec)
        if self._sampler.episodes is None:
            sampled = await self._sampler.scored(prompt, sampled)
        (answer,) = sampled
        return answer.score.correct, len(answer.tokens)
