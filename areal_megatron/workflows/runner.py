"""Runs a workflow's episodes, each isolated from what the workflow does in the others; in a worker process."""

from __future__ import annotations

import asyncio
import logging
import reprlib
from dataclasses import replace

from areal_megatron.config import Config, ConfigError
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.process.errors import printable, told, worth_a_line
from areal_megatron.process.lateness import pauses
from areal_megatron.reward.function import is_score
from areal_megatron.reward.no_score import RewardFailed
from areal_megatron.reward.served import ServedModels
from areal_megatron.workflows.endpoint import AgentEndpoint
from areal_megatron.workflows.episode import Episode, EpisodeOver, EpisodeSpec, Interrupted, RunResources
from areal_megatron.workflows.sampling import Sampling
from areal_megatron.workflows.scoring import ScoredEpisode, Scorer, of_answers, scores_of
from areal_megatron.workflows.transcript import trained_once
from areal_megatron.workflows.workflow import KEY, Workflow

log = logging.getLogger(__name__)


class EpisodeRunner:
    """Runs the episodes of one run. One whose workflow fails is run again from its beginning, for reward.retry_s; if it
    fails for good it is counted and not trained.

    Example:

        runner = EpisodeRunner(config, Workflow(multi_turn.run, turns=3), tokenizer, scorer)
        sampling = Sampling(engine_client, config.rollout, tokenizer.stop_tokens, cache_salt=None)
        spec = EpisodeSpec(prompt, version=0, request_id="group-0", seed=1, purpose="train")
        if episode := await runner.sample(sampling, spec):
            print(len(episode.samples), episode.score.reward)
        await runner.close()
    """

    def __init__(
        self,
        config: Config,
        workflow: Workflow,
        tokenizer: Tokenizer,
        scorer: Scorer,
        patience: int | None = None,
        served: ServedModels | None = None,
        endpoint: AgentEndpoint | None = None,
    ):
        """`patience`: how many tries may fail before any has had an answer; by default a batch's. `served`: the
        models beside the policy; by default none. `endpoint`: for agents; by default on the loopback."""
        self._patience = config.batch_size if patience is None else patience
        self._config, self._workflow, self._scorer, self._tokenizer = config, workflow, scorer, tokenizer
        self._endpoint = endpoint or AgentEndpoint(tokenizer)
        served = served or ServedModels({})
        self._resources = RunResources(config, tokenizer, scorer, self._endpoint.serve, workflow.turns, served)
        self.failures = 0
        """The number of episodes whose workflow raised, fell silent or returned no finite number, in all tries."""
        self._failed_tries = self._failures_without_answer = 0
        self._answered = False

    def account(self) -> dict[str, int]:
        """Returns what was counted since the controller started, by the names of the metrics."""
        return {
            "workflow_failures": self.failures,
            "refused_calls": self._endpoint.refused,
        }

    async def close(self) -> None:
        await self._endpoint.close()

    async def sample(self, sampling: Sampling, spec: EpisodeSpec) -> ScoredEpisode | None:
        """Returns the episode; None if it was interrupted.

        Raises EngineError if a request fails for the last time, ConfigError if no episode at all gets an answer, and
        what RewardWorkers.judge raises.
        """
        episode = Episode(self._resources, sampling, spec)
        try:
            scores, problem = await self._tried(episode)
            for number, pause_s in enumerate(pauses(self._config.reward.retry_s), 2):
                if not problem:
                    break
                await asyncio.sleep(pause_s)
                episode = Episode(self._resources, sampling, replace(spec, request_id=f"{spec.request_id}-try{number}"))
                scores, problem = await self._tried(episode)
        except Interrupted:
            return None
        self.failures += bool(problem)
        if not problem and scores is None:
            try:
                scores = ((await episode.score()).score,)
            except RewardFailed as e:
                problem = str(e)
        return self._finished(episode, scores or (0.0,), problem)

    async def _tried(self, episode: Episode) -> tuple[tuple[float, ...] | None, str]:
        """Runs the workflow once. Returns the scores (`scores_of`), None if the reward function is to say them, and why
        the workflow failed, empty if it did not."""
        problem, scores = "", None
        try:
            scores = await self._scores_of(episode)
        except (EpisodeOver, RewardFailed):
            pass
        except Exception as e:  # the workflow is the user's, and so are the agents that it runs
            problem = printable(told(e), 500)
        if episode.failure:
            raise episode.failure
        problem = problem or episode.problem
        if not problem and not episode.answers:
            problem = "it ended without an answer of the model"
        if not problem and not episode.has_only_own_answers:
            problem = "its context has an answer that no engine sampled"
        if not is_score(episode.discount):
            problem, episode.discount = f"its discount is {reprlib.repr(episode.discount)}", 1.0
        episode.discount = float(episode.discount)  # such as NumPy's, which no message has
        if problem:
            problem = f"{episode.prompt.place}: {problem}"
            self._tell_failure(problem, bool(episode.answers))
        self._answered |= episode.answers > 0
        return scores, problem

    async def _scores_of(self, episode: Episode) -> tuple[float, ...] | None:
        """Returns the scores that the workflow returns. Raises what it raises, WrongResult, and TimeoutError if it is
        idle for too long."""
        limit = self._config.rollout.workflow_timeout_s
        task = asyncio.ensure_future(without_exit(self._workflow.run(episode)))
        try:
            while not (await asyncio.wait({task}, timeout=max(limit - episode.idle_s, limit / 10)))[0]:
                if episode.idle_s > limit:
                    raise TimeoutError(f"it neither asked nor ended within rollout.workflow_timeout_s={limit:g} s")
        finally:
            task.cancel()
        if task.cancelled():
            raise RuntimeError("it cancelled itself")
        if isinstance(task.exception(), GeneratorExit):  # which would end this task without a word
            raise RuntimeError("it raised GeneratorExit")
        result = task.result()
        return None if result is None else scores_of(result, episode.answers)

    def _finished(self, episode: Episode, scores: tuple[float, ...], problem: str) -> ScoredEpisode:
        samples, forced = trained_once(episode.samples), episode.prompt.response_tokens is not None
        if not samples or not episode.has_only_own_answers:
            # an episode is never empty: it gets one token that is not trained
            empty = episode.new_transcript(episode.prompt.tokens)
            samples = (empty.with_observation(self._tokenizer.stop_tokens[:1]),)
        context = samples[-1]
        if context.truncated and not self._scorer.scores_truncated:
            scores = (0.0,)
        score, settings = sum(scores), self._config.reward
        found = self._scorer.reward(score * episode.discount, context.length, context.truncated, forced)
        found = replace(found, correct=score >= 1, score=score)
        if episode.answers > 1 and (len(scores) > 1 or settings.turn_discount < 1):
            scale = episode.discount * (settings.right - settings.wrong)
            found = replace(found, of_answers=of_answers(scores, episode.answers, scale, found.reward))
        place = {id(segment): number for number, segment in enumerate(episode.sampled)}
        numbers = tuple(tuple(place[id(s)] for s in sample.segments if s.sampled) for sample in samples)
        return ScoredEpisode(samples, found.failed_by(problem) if problem else found, numbers)

    def _tell_failure(self, problem: str, answered: bool) -> None:
        """`problem`: with its row."""
        self._failed_tries += 1
        if worth_a_line(self._failed_tries):
            log.warning("workflow failure %d, %s", self._failed_tries, problem)
        self._failures_without_answer += not answered
        if self._failures_without_answer >= self._patience and not self._answered:
            raise ConfigError(
                f"{KEY}: none of the first {self._failures_without_answer} episodes got an answer of the model; of the "
                f"last one: {problem}"
            )


async def without_exit(running) -> float | None:
    """Returns what a workflow returns. Raises what it raises, and RuntimeError in place of what would end the process,
    or the task without a word."""
    try:
        return await running
    except (Exception, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except SystemExit as e:
        raise RuntimeError(f"it called exit({e.code})") from None
    except BaseException as e:
        raise RuntimeError(f"it raised {told(e)}") from None
