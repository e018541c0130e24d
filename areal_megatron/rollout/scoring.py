"""From sampled answers to rewards: decoding, the reward function, and the rule for truncated answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_megatron.config import Reward
from areal_megatron.data.prompts import Prompt
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.reward.worker import Answer
from areal_megatron.reward.workers import RewardWorkers
from areal_megatron.rollout.client import Completion


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

    def __init__(self, config: Reward, tokenizer: Tokenizer, workers: RewardWorkers):
        self._config, self._tokenizer, self._workers = config, tokenizer, workers

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """reward = (1 − score) · wrong + score · right of reward.range, with the function's score; 1 and above is correct."""
        config = self._config
        cut = [c.finish_reason == "length" and prompt.response_tokens is None for c in completions]
        asked = [not truncated or config.truncated == "scored" for truncated in cut]
        answers = [Answer(prompt.text, self._tokenizer.decode(c.tokens.tolist()), prompt.answer)
                   for c, ask in zip(completions, asked, strict=True) if ask]  # fmt: skip
        given = iter(await self._workers.score(answers) if answers else [])
        scores = [next(given) if ask else 0.0 for ask in asked]
        return [
            Score(
                reward=(1 - score) * config.range[0] + score * config.range[1],
                correct=score >= 1,
                truncated=truncated,
                trained=not truncated or config.truncated != "masked",
            )
            for score, truncated in zip(scores, cut, strict=True)
        ]
