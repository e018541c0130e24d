"""The environments of a run, each with a workflow, a reward and limits of its own; most runs have one."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from areal_megatron.config import Config
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.reward.workers import RewardWorkers
from areal_megatron.run.folder import Run
from areal_megatron.workflows.runner import EpisodeRunner, runner_of
from areal_megatron.workflows.scoring import Scorer
from areal_megatron.workflows.single_turn import SingleTurn


@dataclass(frozen=True)
class Environment:
    """How the prompts of one environment are answered and scored."""

    config: Config
    """The run's, as a run with this environment alone has it."""
    scorer: Scorer
    runner: SingleTurn | EpisodeRunner
    """Runs its workflow."""

    def fits(self, tokens: int) -> bool:
        """Whether a prompt of `tokens` tokens is short enough."""
        return tokens <= self.config.data.max_prompt_tokens


class Environments:
    """All of a run, with their reward workers; those with equal rewards share them."""

    def __init__(self, config: Config, tokenizer: Tokenizer, run: Run):
        self.all: list[Environment] = []
        self._workers: list[RewardWorkers] = []
        configs = config.by_environment()
        for number, own in enumerate(configs):
            same = next((k for k in range(number) if configs[k].reward == own.reward), None)
            if same is None:
                workers = RewardWorkers(own.reward, config.model.path, run=run.folder)
            else:
                workers = self.all[same].scorer.workers
            scorer = Scorer(own.reward, workers, own.rollout.max_new_tokens)
            self.all.append(Environment(own, scorer, runner_of(own, tokenizer, scorer)))
            self._workers += [workers] if same is None else []

    async def start(self) -> None:
        """Starts the reward workers. Raises ConfigError if a reward function cannot be loaded."""
        await asyncio.gather(*(workers.start() for workers in self._workers))

    async def close(self) -> None:
        for environment in self.all:
            await environment.runner.close()
        await asyncio.gather(*(workers.close() for workers in self._workers))

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
        for environment in self.all:
            for name, count in environment.runner.account().items():
                counted[name] += count
        worked_s = max(workers.take_worked() for workers in self._workers)
        return dict(counted) | {"reward_busy_share": min(1.0, worked_s / elapsed)}
