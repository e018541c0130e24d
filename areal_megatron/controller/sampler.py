"""Samples from the engines and scores, for training and evaluation alike."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from areal_megatron.controller.engine import Engine
from areal_megatron.controller.environment import Environment
from areal_megatron.data.prompts import Prompt
from areal_megatron.engine.client import Completion, EngineClient, EngineError
from areal_megatron.observe.timeline import Timeline
from areal_megatron.workflows.episode import EpisodeSpec
from areal_megatron.workflows.sampling import Decoding, Sampling, cache_salt
from areal_megatron.workflows.scoring import ScoredEpisode


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """The engines and everything else that generation and evaluation share to sample."""

    engines: list[Engine]
    """Shared with the fleet, which adds to it."""
    is_lost: Callable[[Engine, EngineClient, EngineError], Awaitable[bool]]
    """Returns whether a request to this client of the engine failed because its process is gone: `Fleet.is_lost`."""
    stop_tokens: list[int]
    environments: list[Environment]
    timeline: Timeline
    evaluation: Decoding
    """How answers are sampled for evaluation."""

    def of(self, prompt: Prompt) -> Environment:
        """Returns the environment of a prompt."""
        return self.environments[prompt.environment]

    async def sample(
        self,
        engine: Engine,
        spec: EpisodeSpec,
        n: int = 1,
        interrupted: Sequence[Completion] = (),
        may_interrupt: Callable[[], bool] = lambda: False,
    ) -> list[ScoredEpisode] | None:
        """Returns n scored episodes; None if the engine was lost meanwhile, or if episodes were interrupted.

        Releases the answers for which the caller has occupied the engine. Answers that are `interrupted` are
        resumed. Raises EngineError if a request fails for the last time, and AnswersInterrupted.
        """
        client, prompt, trained = engine.client, spec.prompt, spec.purpose == "train"
        environment = self.of(prompt)
        rollout, decoding = environment.config.rollout, None
        salt = cache_salt(rollout, engine.version)
        if not trained:
            rollout, decoding = replace(rollout, replay_routes=False), self.evaluation
        start, end = time.time_ns(), 0

        def sampled(tokens: int) -> None:
            nonlocal end
            end = time.time_ns()
            engine.release(n)
            if trained:
                engine.timeline.event("generate", start, end, prompt=prompt.id, answers=n, tokens=tokens)

        sampling = Sampling(
            client,
            rollout,
            self.stop_tokens,
            salt,
            may_interrupt=may_interrupt,
            decoding=decoding,
            sampled=sampled,
        )
        try:
            ended = await environment.runner.sample(sampling, spec, n, interrupted)
            if end and trained:
                self.timeline.event("reward", end, time.time_ns(), prompt=prompt.id)
            elif not end and ended is not None:
                sampled(sum(one.length for one in ended))
            return ended
        except EngineError as e:
            if await self.is_lost(engine, client, e):
                return None
            raise
        finally:
            if not end:
                engine.release(n)

    async def with_terms(self, prompt: Prompt, group: Sequence[ScoredEpisode]) -> list[ScoredEpisode]:
        """Returns the episodes of a group with the terms of reward.group_function in their rewards."""
        return await self.of(prompt).scorer.with_terms(prompt, group)
