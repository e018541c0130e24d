"""The single-turn workflow: one prompt, n independent answers, all of them one request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from areal_megatron.data.prompts import Prompt
from areal_megatron.engine.client import Completion
from areal_megatron.workflows.episode import EpisodeSpec
from areal_megatron.workflows.sampling import INTERRUPTED, GenerationRequest, Sampling, generate
from areal_megatron.workflows.scoring import ScoredEpisode, Scorer
from areal_megatron.workflows.transcript import Transcript


class AnswersInterrupted(Exception):
    """Some of a group's answers were interrupted; `answers` are all of the group, to be resumed by another call."""

    def __init__(self, answers: list[Completion]):
        super().__init__("the answers were interrupted")
        self.answers = answers


class SingleTurn:
    """Runs the single-turn workflow, as WorkflowRunner runs the others.

    Example:

        sampling = Sampling(engine_client, config.rollout, tokenizer.stop_tokens, cache_salt=None)
        spec = EpisodeSpec(prompt, version=0, request_id="group-0", seed=1, purpose="train")
        for episode in await SingleTurn(scorer).sample(sampling, spec, n=8):
            print(episode.context.tokens, episode.score.reward)
    """

    resumes = True
    """Whether answers that were interrupted can be continued."""

    def __init__(self, scorer: Scorer):
        self._scorer = scorer

    async def sample(
        self, sampling: Sampling, spec: EpisodeSpec, n: int, interrupted: Sequence[Completion] = ()
    ) -> list[ScoredEpisode]:
        """Returns n episodes of one answer, the k-th sampled with seed + k. Those that are `interrupted` are resumed.

        Raises AnswersInterrupted, EngineError if a request fails for the last time, and what Scorer.score raises.
        """
        answers = await sample(sampling, spec.prompt, n, spec.request_id, spec.seed, interrupted)
        sampling.sampled(sum(len(answer.tokens) for answer in answers))
        if any(answer.finish_reason == INTERRUPTED for answer in answers):
            raise AnswersInterrupted(answers)
        scores = await self._scorer.score(spec.prompt, answers)
        transcript = Transcript(spec.prompt.tokens, 0)
        return [
            ScoredEpisode((transcript.with_answer(answer, score.truncated),), score)
            for answer, score in zip(answers, scores, strict=True)
        ]


async def sample(
    sampling: Sampling, prompt: Prompt, n: int, request_id: str, seed: int, interrupted: Sequence[Completion] = ()
) -> list[Completion]:
    """Returns n answers, sampled from whatever versions the engine holds in the meantime.

    `interrupted`: the n answers as they were when they were interrupted. They are resumed, each with a request of its
    own; those that were complete are returned as they are. Retries and errors are the same as `generate`'s.
    """
    if not interrupted:
        return await generate(sampling, _request(sampling, prompt, request_id, seed), n)
    resumed = (_resume(sampling, prompt, answer, f"{request_id}-{k}", seed + k) for k, answer in enumerate(interrupted))
    return await asyncio.gather(*resumed)


def _request(
    sampling: Sampling, prompt: Prompt, request_id: str, seed: int, answered: Sequence[int] = (), routes_from: int = 0
) -> GenerationRequest:
    forced = prompt.response_tokens
    return GenerationRequest(
        tokens=[*prompt.tokens, *answered],
        max_tokens=max(1, (forced or sampling.rollout.max_new_tokens) - len(answered)),
        stop_tokens=[] if forced else sampling.stop_tokens,
        request_id=request_id,
        seed=seed,
        routes_from=routes_from,
    )


async def _resume(
    sampling: Sampling, prompt: Prompt, interrupted: Completion, request_id: str, seed: int
) -> Completion:
    if interrupted.finish_reason != INTERRUPTED:
        return interrupted
    tokens = interrupted.tokens.tolist()
    routes_from = len(prompt.tokens) + len(tokens) - 1 if len(interrupted.routes) else 0
    (more,) = await generate(sampling, _request(sampling, prompt, request_id, seed, tokens, routes_from))
    joined = {
        name: np.concatenate((getattr(interrupted, name), getattr(more, name)))
        for name in ("tokens", "logprobs", "versions", "routes")
    }
    return Completion(**joined, finish_reason=more.finish_reason, asked=interrupted.asked)
