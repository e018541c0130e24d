"""Scores sampled answers: the reward function's scores, and the rule for truncated and overlong answers."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from areal_megatron.config import RewardConfig
from areal_megatron.data.prompts import Prompt
from areal_megatron.engine.client import Completion
from areal_megatron.reward.function import WrongResult, checked, is_score
from areal_megatron.reward.group import GroupAnswer
from areal_megatron.reward.overlong import overlong
from areal_megatron.reward.worker import Answer, AnswerGroup, Scored
from areal_megatron.reward.workers import RewardWorkers
from areal_megatron.workflows.transcript import Transcript


@dataclass(frozen=True)
class Score:
    """The reward of one trajectory."""

    reward: float
    correct: bool
    truncated: bool
    """Whether the answer was cut at rollout.max_new_tokens; never for an answer of forced length."""
    trained: bool
    """Whether its tokens enter the loss."""
    score: float = 0.0
    """What the reward function returned, or the workflow."""
    terms: dict[str, float] = field(default_factory=dict)
    """What the group function has added to the reward, by name."""
    of_answers: tuple[float, ...] = ()
    """The rewards of the episode's answers, in the order in which they were sampled, which add up to `reward`; empty if
    the last one has all of it, and each the same return."""
    failure: str = ""
    """Why the reward is unknown: then the answer is neither right nor wrong, and is not trained. Empty: it is known."""

    @property
    def failed(self) -> bool:
        """Whether the reward is unknown."""
        return bool(self.failure)

    def failed_by(self, problem: str) -> Score:
        """Returns this score for an answer with an unknown reward."""
        return replace(self, correct=False, trained=False, failure=problem)


@dataclass(frozen=True)
class ScoredEpisode:
    """What a whole episode has sampled, and its score."""

    samples: tuple[Transcript, ...]
    """What is trained, each with at least one token after the prompt; the last one ends with the last answer."""
    score: Score
    numbers: tuple[tuple[int, ...], ...] = ((0,),)
    """Which of the episode's answers, from 0, each sample has and is trained on."""

    def returns(self, discount: float) -> list[list[tuple[int, float]]]:
        """Returns (tokens, return) of each sample's answers; empty lists if all have the return `score.reward`.

        The return of an answer is its own reward and the rewards of later ones, each of them less by the factor
        `discount` for each answer from this one to that.
        """
        if not self.score.of_answers:
            return [[] for _ in self.samples]
        returns, later = [], 0.0
        for reward in reversed(self.score.of_answers):
            later = reward + discount * later
            returns.insert(0, later)
        return [
            list(zip(sample.answer_lengths, (returns[number] for number in numbers), strict=True))
            for sample, numbers in zip(self.samples, self.numbers, strict=True)
        ]

    @property
    def context(self) -> Transcript:
        """The transcript of the last answer."""
        return self.samples[-1]

    @property
    def answers(self) -> int:
        """The number of answers that are trained if the score says so."""
        return sum(sample.answers for sample in self.samples)

    @property
    def length(self) -> int:
        """The tokens after the prompts, the environment's included."""
        return sum(sample.length for sample in self.samples)

    @property
    def versions(self) -> np.ndarray:
        """int32 [tokens that the model sampled]"""
        return np.concatenate([sample.versions[sample.loss_mask == 1] for sample in self.samples])


class Scorer:
    """Scores answers with the reward workers. May be called by many tasks at once."""

    def __init__(self, config: RewardConfig, workers: RewardWorkers, max_new_tokens: int):
        """The workers know the model's tokenizer."""
        self._config, self.workers, self._max_new_tokens = config, workers, max_new_tokens

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """Returns a score for each answer to one prompt, in order. The formula is the same as for `reward`."""
        forced = prompt.response_tokens is not None
        truncated = [c.finish_reason == "length" and not forced for c in completions]
        asked = [self.scores_truncated or not cut for cut in truncated]
        answers = [
            Answer(prompt.text, "", prompt.answer, c.tokens.tobytes(), prompt.where, cut, prompt.row)
            for c, cut, ask in zip(completions, truncated, asked, strict=True)
            if ask
        ]
        given = iter(await self.workers.judge(answers) if answers else [])
        judged = [next(given) if ask else Scored() for ask in asked]
        return [
            self.reward(scored.score, len(c.tokens), cut, forced, scored.problem)
            for scored, c, cut in zip(judged, completions, truncated, strict=True)
        ]

    async def with_terms(self, prompt: Prompt, episodes: Sequence[ScoredEpisode]) -> list[ScoredEpisode]:
        """Returns the episodes of a group with the terms of reward.group_function in their rewards, if there is one.

        It gets the last answers, those whose rewards are known. If it fails, none is.
        """
        known = [k for k, episode in enumerate(episodes) if not episode.score.failed]
        if not self._config.group_function or not known:
            return list(episodes)
        own = [episodes[k] for k in known]
        group = AnswerGroup(
            prompt.text,
            prompt.answer,
            members=[_member(episode) for episode in own],
            tokens=[episode.context.tokens.tobytes() for episode in own],
            versions=[episode.context.versions.tobytes() for episode in own],
            where=prompt.where,
        )
        found = await self.workers.terms(group)
        changed = list(episodes)
        for place, k in enumerate(known):
            score, terms = episodes[k].score, {name: values[place] for name, values in found.terms.items()}
            more = sum(terms.values())
            of_answers = (*score.of_answers[:-1], score.of_answers[-1] + more) if score.of_answers else ()
            new = replace(score, reward=score.reward + more, terms=terms, of_answers=of_answers)
            changed[k] = replace(episodes[k], score=score.failed_by(found.problem) if found.problem else new)
        return changed

    @property
    def scores_truncated(self) -> bool:
        """Whether the reward function is asked about truncated answers."""
        return self._config.truncated in ("scored", "overlong")

    async def judge(self, prompt: Prompt, response: str, cut: bool = False) -> Scored:
        """Returns the reward function's score of one answer, with its feedback; `cut`: its tokens were used up."""
        answer = Answer(prompt.text, response, prompt.answer, where=prompt.where, cut=cut, row=prompt.row)
        (scored,) = await self.workers.judge([answer])
        return scored

    def reward(self, score: float, tokens: int, truncated: bool, forced: bool, failure: str = "") -> Score:
        """Returns the reward of a trajectory: (1 − score) · reward.wrong + score · reward.right.

        A score of 1 or more is correct. With reward.truncated=overlong half the range times `overlong` is added.
        `tokens`: their number in the response; `forced`: whether the prompt forces it, and no response is overlong.
        `failure`: why the score is unknown, if it is.
        """
        wrong, right = self._config.wrong, self._config.right
        penalty = overlong(tokens, self._max_new_tokens) if self._config.truncated == "overlong" and not forced else 0.0
        found = Score(
            reward=(1 - score) * wrong + score * right + penalty * (right - wrong) / 2,
            correct=score >= 1,
            truncated=truncated,
            trained=not truncated or self._config.truncated != "masked",
            score=score,
        )
        return found.failed_by(failure) if failure else found


def scores_of(result: object, answers: int) -> tuple[float, ...]:
    """Returns the scores that a workflow has returned: one for the episode, or a list with one for each answer.

    Raises WrongResult for a list of another length, or what is no score.
    """
    holds_scores = isinstance(result, tuple) and result and is_score(result[-1])
    if holds_scores or (isinstance(result, np.ndarray) and result.ndim):
        raise WrongResult(f"the workflow returned {reprlib.repr(result)}: scores of several answers come in a list")
    if not isinstance(result, list):
        return (checked(result, "the workflow")[0],)
    if len(result) != answers:
        raise WrongResult(f"the workflow returned {len(result)} scores for {answers} answers")
    return tuple(checked(one, "the workflow")[0] for one in result)


def of_answers(scores: Sequence[float], answers: int, scale: float, reward: float) -> tuple[float, ...]:
    """Returns the rewards of an episode's answers: each score times `scale`, and in the last one what `reward`, the
    episode's, has beside them. A single score belongs to the last answer."""
    each = [0.0] * (answers - len(scores)) + [score * scale for score in scores]
    return (*each[:-1], each[-1] + reward - sum(each))


def _member(episode: ScoredEpisode) -> GroupAnswer:
    score = episode.score
    return GroupAnswer(
        tokens=len(episode.versions),
        truncated=score.truncated,
        score=score.score,
        correct=score.correct,
        reward=score.reward,
    )
