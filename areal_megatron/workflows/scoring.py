"""From sampled answers to rewards: the reward function's scores, and the rule for truncated and overlong answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_megatron.config import Reward
from areal_megatron.data.prompts import Prompt
from areal_megatron.engine.client import Completion
from areal_megatron.reward.overlong import overlong
from areal_megatron.reward.worker import Answer, Scored
from areal_megatron.reward.workers import RewardWorkers


@dataclass(frozen=True)
class Score:
    reward: float
    correct: bool
    truncated: bool
    """Cut at rollout.max_new_tokens; an answer of forced length is not."""
    trained: bool
    """Whether its tokens enter the loss."""


class Scorer:
    """Scores the answers of one prompt at a time; many callers may wait for it."""

    def __init__(self, config: Reward, workers: RewardWorkers, max_new_tokens: int):
        """The workers know the model's tokenizer."""
        self._config, self._workers, self._max_new_tokens = config, workers, max_new_tokens

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """reward = (1 − score) · wrong + score · right of reward.range, with the function's score; 1 and above is
        correct.

        With reward.truncated=overlong half the range times `overlong` is added, unless the length is forced.
        """
        free = prompt.response_tokens is None
        cut = [c.finish_reason == "length" and free for c in completions]
        asked = [not truncated or self.scores_cut for truncated in cut]
        answers = [
            Answer(prompt.text, "", prompt.answer, c.tokens.tobytes())
            for c, ask in zip(completions, asked, strict=True)
            if ask
        ]
        given = iter(await self._workers.score(answers) if answers else [])
        scores = [next(given) if ask else 0.0 for ask in asked]
        return [
            self.reward(score, len(c.tokens), truncated, free)
            for score, c, truncated in zip(scores, completions, cut, strict=True)
        ]

    @property
    def scores_cut(self) -> bool:
        """Whether the reward function gets to see truncated answers."""
        return self._config.truncated in ("scored", "overlong")

    async def judge(self, prompt: Prompt, response: str) -> Scored:
        """What the reward function says of one answer."""
        (scored,) = await self._workers.judge([Answer(prompt.text, response, prompt.answer)])
        return scored

    def reward(self, score: float, tokens: int, truncated: bool, free: bool = True) -> Score:
        """Of a trajectory with so many response tokens; `free`: its length is not forced."""
        wrong, right = self._config.range
        penalty = overlong(tokens, self._max_new_tokens) if self._config.truncated == "overlong" and free else 0.0
        return Score(
            reward=(1 - score) * wrong + score * right + penalty * (right - wrong) / 2,
            correct=score >= 1,
            truncated=truncated,
            trained=not truncated or self._config.truncated != "masked",
        )
