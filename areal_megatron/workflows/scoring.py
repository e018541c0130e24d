"""Scores sampled answers: the reward function's scores, and the rule for truncated and overlong answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_megatron.config import RewardConfig
from areal_megatron.data.prompts import Prompt
from areal_megatron.engine.client import Completion
from areal_megatron.reward.overlong import overlong
from areal_megatron.reward.worker import Answer, Scored
from areal_megatron.reward.workers import RewardWorkers


@dataclass(frozen=True)
class Score:
    """The reward of one trajectory."""

    reward: float
    correct: bool
    truncated: bool
    """Whether the answer was cut at rollout.max_new_tokens; never for an answer of forced length."""
    trained: bool
    """Whether its tokens enter the loss."""


class Scorer:
    """Scores answers with the reward workers. May be called by many tasks at once."""

    def __init__(self, config: RewardConfig, workers: RewardWorkers, max_new_tokens: int):
        """The workers know the model's tokenizer."""
        self._config, self._workers, self._max_new_tokens = config, workers, max_new_tokens

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """Returns a score for each answer to one prompt, in order. The formula is that of `reward`."""
        forced = prompt.response_tokens is not None
        truncated = [c.finish_reason == "length" and not forced for c in completions]
        asked = [self.scores_truncated or not cut for cut in truncated]
        answers = [
            Answer(prompt.text, "", prompt.answer, c.tokens.tobytes(), prompt.where)
            for c, ask in zip(completions, asked, strict=True)
            if ask
        ]
        given = iter(await self._workers.score(answers) if answers else [])
        scores = [next(given) if ask else 0.0 for ask in asked]
        return [
            self.reward(score, len(c.tokens), cut, forced)
            for score, c, cut in zip(scores, completions, truncated, strict=True)
        ]

    @property
    def scores_truncated(self) -> bool:
        """Whether the reward function is asked about truncated answers."""
        return self._config.truncated in ("scored", "overlong")

    async def judge(self, prompt: Prompt, response: str) -> Scored:
        """Returns the reward function's score of one answer, with its feedback."""
        (scored,) = await self._workers.judge([Answer(prompt.text, response, prompt.answer, where=prompt.where)])
        return scored

    def reward(self, score: float, tokens: int, truncated: bool, forced: bool) -> Score:
        """Returns the reward of a trajectory: (1 − score) · reward.wrong + score · reward.right.

        A score of 1 or more is correct. With reward.truncated=overlong half the range times `overlong` is added.
        `tokens`: their number in the response; `forced`: whether the prompt forces it, and no response is overlong.
        """
        wrong, right = self._config.wrong, self._config.right
        penalty = overlong(tokens, self._max_new_tokens) if self._config.truncated == "overlong" and not forced else 0.0
        return Score(
            reward=(1 - score) * wrong + score * right + penalty * (right - wrong) / 2,
            correct=score >= 1,
            truncated=truncated,
            trained=not truncated or self._config.truncated != "masked",
        )
