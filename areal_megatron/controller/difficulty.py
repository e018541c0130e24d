"""Selects prompts and groups by the share of right answers (rollout.filter_groups), and counts what was sampled. Pure,
without I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from areal_megatron.config import RolloutConfig
from areal_megatron.config.algorithms import are_equal
from areal_megatron.data.prompts import Prompt
from areal_megatron.workflows.scoring import Score


class Measured(NamedTuple):
    """The pass rate of a group, and the version that was trained when it finished."""

    rate: float
    version: int


class Difficulty:
    """Pass rates of prompts: the rate of the last finished group, or else the row's."""

    def __init__(self, rollout: RolloutConfig, measured: Mapping[int, Measured] | None = None):
        self._rollout = rollout
        self.measured: dict[int, Measured] = dict(measured or {})
        """What the group that finished last showed, by prompt."""

    def reason_to_skip(self, prompt: Prompt, version: int) -> str:
        """Returns why the prompt is not to be drawn while `version` is trained; empty if its pass rate is unknown,
        forgotten or within the range of those that are drawn."""
        rollout, (rate, measured_at) = self._rollout, self.measured.get(prompt.id, (prompt.pass_rate, 0))
        if rate is None or version - measured_at >= rollout.remeasure_after:
            return ""
        return "" if rollout.draw_min_pass_rate <= rate <= rollout.draw_max_pass_rate else f"pass rate {rate:.3g}"

    def filters(self, prompt: Prompt, scores: Sequence[Score], version: int) -> bool:
        """Records a group's pass rate, if any of its answers is trained. Returns whether to filter the group.

        Answers that are not trained count nowhere. The group is filtered if its pass rate is out of range, or if all
        its episodes have the same scores: then they differ by length at most, and not in what is right.
        """
        rollout, trained = self._rollout, [score for score in scores if score.trained]
        if not trained:
            return True
        rate = sum(score.correct for score in trained) / len(trained)
        self.measured[prompt.id] = Measured(rate, version)
        # the last one has what lengths add; nothing is earned by another answer before it
        earned = zip_longest(*(score.of_answers[:-1] for score in trained), fillvalue=0.0)
        uniform = are_equal([score.score for score in trained]) and all(map(are_equal, earned))
        return rollout.filter_groups and (uniform or not rollout.min_pass_rate <= rate <= rollout.max_pass_rate)


@dataclass
class SampledGroups:
    """Counts what was sampled for training since the last update, whether it is trained or not."""

    groups: int = 0
    solved_all: int = 0
    solved_none: int = 0
    """Groups whose answers are all right, or all wrong; untrained groups do not count."""
    answers: int = 0
    right: int = 0
    filtered_tokens: int = 0
    """Tokens of answers in groups that were filtered."""

    def add(self, scores: Sequence[Score], tokens: int, filtered: bool) -> None:
        """Counts a group, whose answers have `tokens` tokens together."""
        trained = [score.correct for score in scores if score.trained]
        self.groups += 1
        self.solved_all += bool(trained) and all(trained)
        self.solved_none += bool(trained) and not any(trained)
        self.answers += len(scores)
        self.right += sum(score.correct for score in scores)
        self.filtered_tokens += tokens if filtered else 0

    def metrics(self) -> dict[str, float]:
        """Returns the counts and shares; no shares if nothing was sampled."""
        metrics: dict[str, float] = {"sampled_groups": self.groups, "filtered_tokens": self.filtered_tokens}
        if self.groups:
            metrics["sampled_accuracy"] = self.right / self.answers
            metrics["solved_all"] = self.solved_all / self.groups
            metrics["solved_none"] = self.solved_none / self.groups
        return metrics
