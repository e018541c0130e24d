"""Selects prompts and groups by the share of right answers (rollout.filter_groups). Pure, without I/O."""

from __future__ import annotations

from collections.abc import Sequence

from areal_megatron.config import RolloutConfig
from areal_megatron.data.prompts import Prompt
from areal_megatron.workflows.scoring import Score


class Difficulty:
    """Pass rates of prompts: that of the group that finished last, or else that of the row."""

    def __init__(self, rollout: RolloutConfig):
        self._rollout = rollout
        self.measured: dict[int, float] = {}
        """Pass rate of the group that finished last, by prompt."""

    def reason_to_skip(self, prompt: Prompt) -> str:
        """Returns why the prompt is not to be drawn; empty if its pass rate is unknown or within the range."""
        rate = self.measured.get(prompt.id, prompt.pass_rate)
        return "" if rate is None or self._is_within(rate) else f"pass rate {rate:.3g}"

    def filters(self, prompt: Prompt, scores: Sequence[Score]) -> bool:
        """Records a group's pass rate. Returns whether to filter the group, as its pass rate is out of range or its
        rewards are all the same."""
        rate = self.measured[prompt.id] = sum(score.correct for score in scores) / len(scores)
        uniform = len({score.reward for score in scores}) == 1
        return self._rollout.filter_groups and (uniform or not self._is_within(rate))

    def _is_within(self, rate: float) -> bool:
        rollout = self._rollout
        return not rollout.filter_groups or rollout.min_pass_rate <= rate <= rollout.max_pass_rate
