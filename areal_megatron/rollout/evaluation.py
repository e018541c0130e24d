"""Held-out accuracy: one answer to each prompt, sampled as in training, outside of the schedule."""

from __future__ import annotations

import asyncio
import time

from areal_megatron.config import Config
from areal_megatron.data.prompts import Prompt
from areal_megatron.observe.timeline import Timeline
from areal_megatron.rollout.client import EngineError
from areal_megatron.rollout.fleet import Engine
from areal_megatron.rollout.generation import cache_salt
from areal_megatron.rollout.scoring import Scorer
from areal_megatron.rollout.seeds import sampling_seed
from areal_megatron.rollout.workflows import single_turn


class Evaluation:
    """Of the prompts of data.eval that fit, the first eval_items."""

    def __init__(self, config: Config, engines: list[Engine], prompts: list[Prompt], stop_tokens: list[int],
                 scorer: Scorer, timeline: Timeline):  # fmt: skip
        fitting = [p for p in prompts if len(p.tokens) <= config.data.max_prompt_tokens]
        self._prompts = fitting[: config.eval_items or None]
        self._config, self._engines, self._stop_tokens = config, engines, stop_tokens
        self._scorer, self._timeline = scorer, timeline

    async def run(self, version: int, share: float = 1.0) -> dict[str, float] | None:
        """accuracy, items and response_tokens_mean over the engines that have `version` or a later one.

        Takes at most `share` of rollout.max_running of each engine; None without held-out prompts. Raises
        EngineError if a request fails or no engine has the version.
        """
        if not self._prompts:
            return None
        engines = [engine for engine in self._engines if engine.version >= version and engine.state != "torn"]
        if not engines:
            raise EngineError(f"version {version} cannot be evaluated: no engine has committed it, see the log above")
        slots = asyncio.Semaphore(max(1, int(self._config.rollout.max_running * share)) * len(engines))
        start = time.time_ns()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._answer(engines, prompt, version, slots)) for prompt in self._prompts]
        self._timeline.event("eval", start, time.time_ns(), version=version, items=len(tasks))
        correct, lengths = zip(*(task.result() for task in tasks), strict=True)
        return {
            "accuracy": sum(correct) / len(tasks),
            "items": len(tasks),
            "response_tokens_mean": sum(lengths) / len(tasks),
        }

    async def _answer(
        self, engines: list[Engine], prompt: Prompt, version: int, slots: asyncio.Semaphore
    ) -> tuple[bool, int]:
        async with slots:
            engine = min(engines, key=lambda e: e.running)
            engine.occupy(1)
            try:
                (completion,) = await single_turn.sample(
                    engine.client,
                    prompt,
                    n=1,
                    rollout=self._config.rollout,
                    stop_tokens=self._stop_tokens,
                    request_id=f"eval-{version}-{prompt.id}",
                    cache_salt=cache_salt(self._config.rollout, engine.version),
                    seed=sampling_seed(self._config.seed, "eval", prompt.id),
                )
            finally:
                engine.release(1)
        (score,) = await self._scorer.score(prompt, [completion])
        return score.correct, len(completion.tokens)
