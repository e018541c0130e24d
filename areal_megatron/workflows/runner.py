"""Runs the workflow that the config names: the episodes of a group, each on its own, whatever the workflow does."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

import numpy as np

from areal_megatron.config import Config, ConfigError
from areal_megatron.data.prompts import Prompt
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.engine.client import EngineError
from areal_megatron.reward.function import checked
from areal_megatron.workflows.episode import Episode, EpisodeOver, Interrupted, Place, Setting
from areal_megatron.workflows.openai_endpoint import OpenAIEndpoint
from areal_megatron.workflows.sampling import Sampling
from areal_megatron.workflows.scoring import Score, Scorer
from areal_megatron.workflows.transcript import Transcript
from areal_megatron.workflows.workflow import KEY, Workflow, load_workflow

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoredTranscript:
    """A trajectory with at least one token after the prompt."""

    context: Transcript
    score: Score

    @property
    def tokens(self) -> np.ndarray:
        """int32 [R]"""
        return self.context.tokens


class EpisodeRunner:
    """Of one run. What workflows do wrong is counted and scores 0."""

    def __init__(self, config: Config, workflow: Workflow, tokenizer: Tokenizer, scorer: Scorer):
        self._config, self._workflow, self._scorer, self._tokenizer = config, workflow, scorer, tokenizer
        self._proxy = OpenAIEndpoint()
        self._setting = Setting(config, tokenizer, scorer, self._proxy, workflow.turns)
        self.failures = 0
        """Episodes whose workflow raised, fell silent or returned no finite number."""
        self.untrained_answers = 0
        """That agents have sampled beside the trajectory that is trained."""
        self._empty, self._sampled = 0, False

    def account(self) -> dict[str, int]:
        """Since the controller started."""
        return {
            "workflow_failures": self.failures,
            "untrained_answers": self.untrained_answers,
            "refused_calls": self._proxy.refused,
        }

    async def close(self) -> None:
        await self._proxy.close()

    async def sample(self, sampling: Sampling, place: Place, n: int) -> list[ScoredTranscript] | None:
        """n episodes that are seeded with seed + k; None if they were broken off.

        Raises EngineError if a request fails for good, ConfigError if no episode at all samples anything.
        """
        places = [replace(place, request_id=f"{place.request_id}-{k}", seed=place.seed + k) for k in range(n)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._live(Episode(self._setting, sampling, own))) for own in places]
        except ExceptionGroup as e:
            if e.subgroup(Interrupted):
                return None
            if failed := e.subgroup((EngineError, ConfigError)):
                raise failed.exceptions[0] from None
            raise
        return [task.result() for task in tasks]

    async def _live(self, episode: Episode) -> ScoredTranscript:
        problem, score = "", None
        try:
            score = await self._follow(episode)
        except EpisodeOver:
            pass
        except Exception as e:  # the workflow is the user's, and so are the agents that it runs
            problem = f"{type(e).__name__}: {e}"
        if episode.failure:
            raise episode.failure
        if not problem and not episode.context.answers:
            problem = "it ended without an answer of the model"
        if problem:
            self._count_failure(episode.prompt, problem, bool(episode.context.answers))
            score = 0.0
        elif score is None:
            score = (await episode.score()).score
        self._sampled |= episode.context.answers > 0
        self.untrained_answers += episode.answers - episode.context.answers
        return self._ended(episode, score)

    async def _follow(self, episode: Episode) -> float | None:
        """What the workflow returns. Raises what it raises, and TimeoutError if it neither asks nor ends."""
        limit = self._config.machine.timeout_s
        task = asyncio.ensure_future(_without_exit(self._workflow.run(episode)))
        try:
            while not (await asyncio.wait({task}, timeout=max(limit - episode.idle_s, limit / 10)))[0]:
                if episode.idle_s > limit:
                    raise TimeoutError(f"it neither asked nor ended within machine.timeout_s={limit:g} s")
        finally:
            task.cancel()
        if task.cancelled():
            raise RuntimeError("it cancelled itself")
        result = task.result()
        return None if result is None else checked(result)[0]

    def _ended(self, episode: Episode, score: float) -> ScoredTranscript:
        context, free = episode.context, episode.prompt.response_tokens is None
        if not context.parts:  # a trajectory that no token is trained of, in place of none
            context = context.told(self._tokenizer.stop_tokens[:1])
        if context.cut and not self._scorer.scores_cut:
            score = 0.0
        reward = self._scorer.reward(score * episode.discount, context.length, context.cut, free)
        return ScoredTranscript(context, replace(reward, correct=score >= 1))

    def _count_failure(self, prompt: Prompt, problem: str, sampled: bool) -> None:
        self.failures += 1
        if self.failures <= 10 or self.failures % 1000 == 0:
            log.warning("workflow failure %d, prompt %d: %s", self.failures, prompt.id, problem)
        self._empty += not sampled
        if self._empty >= self._config.batch_size and not self._sampled:
            raise ConfigError(
                f"{KEY}: none of the first {self._empty} episodes got an answer of the model; of the last one: "
                f"{problem}"
            )


def runner_of(config: Config, tokenizer: Tokenizer, scorer: Scorer) -> EpisodeRunner | None:
    """None for `single_turn`, which asks for whole groups. Raises ConfigError."""
    workflow = load_workflow(config.rollout)
    return workflow and EpisodeRunner(config, workflow, tokenizer, scorer)


async def _without_exit(running) -> float | None:
    try:
        return await running
    except SystemExit as e:  # would end the controller
        raise RuntimeError(f"it called exit({e.code})") from None
