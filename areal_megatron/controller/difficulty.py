"""Which prompts are drawn and which groups are trained by the share of right answers (rollout.filter_groups). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from areal_megatron.config import RolloutConfig
from areal_megatron.data.prompts import Prompt
from areal_megatron.workflows.scoring import Score


class Difficulty:
    """Knows the pass rates of prompts: that of the group that finished last, else that of the row."""

    def __init__(self, rollout: RolloutConfig):
        self._rollout = rollout
        self.measured: dict[int, float] = {}
        """By prompt, of its group that finished last."""

    def reason_to_skip(self, prompt: Prompt) -> str:
        """Why it is not drawn; empty: it is, because its pass rate is not known or within the range."""
        rate = self.measured.get(prompt.id, prompt.pass_rate)
        return "" if rate is None or self._is_within(rate) else f"pass rate {rate:.3g}"

    def filters(self, prompt: Prompt, scores: Sequence[Score]) -> bool:
        """Takes note of a group's pass rate; whether it lies outside, or the rewards of the group are all the same."""
        rate = self.measured[prompt.id] = sum(score.correct for score in scores) / len(scores)
        uniform = len({score.reward for score in scores}) == 1
        return self._rollout.filter_groups and (uniform or not self._is_within(rate))

    def _is_within(self, rate: float) -> bool:
        rollout = self._rollout
        return not rollout.filter_groups or rollout.min_pass_rate <= rate <= rollout.max_pass_rate
