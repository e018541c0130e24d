"""Which prompts are drawn and which groups are trained by the share of right answers (rollout.pass_rate). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from areal_megatron.data.prompts import Prompt
from areal_megatron.workflows.scoring import Score


class Difficulty:
    """Knows the pass rates of prompts: that of the group that finished last, else that of the row."""

    def __init__(self, pass_rate: Sequence[float]):
        """`pass_rate`: rollout.pass_rate."""
        self._bounds = sorted(pass_rate)
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
        return bool(self._bounds) and (uniform or not self._is_within(rate))

    def _is_within(self, rate: float) -> bool:
        return not self._bounds or self._bounds[0] <= rate <= self._bounds[1]
