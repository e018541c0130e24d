"""The environments of a run, each with a workflow, a reward and limits of its own; most runs have one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_megatron.config import Config
from areal_megatron.reward.workers import RewardWorkers
from areal_megatron.run.folder import RunFolder
from areal_megatron.workflows.scoring import Scorer
from areal_megatron.workflows.single_turn import SingleTurn
from areal_megatron.workflows.workers import EpisodeWorkers, WorkflowRunner
from areal_megatron.workflows.workflow import SINGLE_TURN


@dataclass(frozen=True)
class Environment:
    """How the prompts of one environment are answered and scored."""

    config: Config
    """The run's, as a run with this environment alone has it."""
    scorer: Scorer
    runner: SingleTurn | WorkflowRunner
    """Runs its workflow."""

    def fits(self, tokens: int) -> bool:
        """Whether a prompt of `tokens` tokens is short enough."""
        return tokens <= self.config.data.max_prompt_tokens


class Environments:
    """All of a run, with their reward workers; those with equal rewards share them. Workflows share their workers."""

    def __init__(self, configs: Sequence[Config], run: RunFolder | None = None, output: Path | None = None):
        """`configs`: one for each environment; `run`: that whose served models are asked, if any are. What rewards and
        workflows print is appended to the file `output`; None: it goes to stderr."""
        self.all: list[Environment] = []
        self._workers: list[RewardWorkers] = []
        folder = run.folder if run else ""
        has_workflows = any(own.rollout.workflow != SINGLE_TURN for own in configs)
        self._episodes = EpisodeWorkers(configs, output, folder) if has_workflows else None
        for number, own in enumerate(configs):
            same = next((k for k in range(number) if configs[k].reward == own.reward), None)
            if same is None:
                workers = RewardWorkers(own.reward, own.model.path, folder, output)
            else:
                workers = self.all[same].scorer.workers
            scorer = Scorer(own.reward, workers, own.rollout.max_new_tokens)
            if self._episodes is None or own.rollout.workflow == SINGLE_TURN:
                runner = SingleTurn(scorer)
            else:
                runner = WorkflowRunner(self._episodes, scorer)
            self.all.append(Environment(own, scorer, runner))
            self._workers += [workers] if same is None else []

    async def start(self) -> None:
        """Starts the workers. Raises ConfigError if a reward function or a workflow cannot be loaded."""
        await asyncio.gather(*(workers.start() for workers in self._pools))

    async def close(self) -> None:
        await asyncio.gather(*(workers.close() for workers in self._pools))

    @property
    def _pools(self) -> list[RewardWorkers | EpisodeWorkers]:
        return [*self._workers, *filter(None, [self._episodes])]

    @property
    def failures(self) -> int:
        """The number of answers whose rewards failed for good."""
        return sum(workers.failures for workers in self._workers)

    @property
    def refused(self) -> int:
        """The number of answers whose form a reward function did not accept."""
        return sum(workers.refused for workers in self._workers)

    def restore(self, failures: int, refused: int) -> None:
        """Goes on counting from what a checkpoint has counted."""
        self._workers[0].failures, self._workers[0].refused = failures, refused

    def account(self, elapsed: float) -> dict[str, float]:
        """Returns the counts since the controller started, and the load of the busiest function's reward workers in the
        last `elapsed` seconds, by the names of the metrics."""
        counted = Counter(reward_failures=self.failures, answers_refused=self.refused)
        counted["reward_retries"] = sum(workers.retries for workers in self._workers)
        if self._episodes:
            counted.update(self._episodes.account())
        worked_s = max(workers.take_worked() for workers in self._workers)
        return dict(counted) | {"reward_busy_share": min(1.0, worked_s / elapsed)}
