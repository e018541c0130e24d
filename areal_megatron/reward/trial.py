"""Calls the reward functions of the user once before a run, so that their mistakes end it before anything has started.

Each scores two responses to the first row of its data: one with the right answer, and one without any, the case that
functions forget most often.
"""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from areal_megatron.config import Config, ConfigError
from areal_megatron.data.prompts import Prompt
from areal_megatron.reward.group import KEY, GroupAnswer
from areal_megatron.reward.served import WRONG
from areal_megatron.reward.worker import Answer, AnswerGroup, Scored
from areal_megatron.reward.workers import RewardWorkers, problem_of_sending
from areal_megatron.run.folder import RunError

_PATIENCE_S = 30.0
"""What takes longer than this, and may by reward.timeout_s, is taken to be slow and no mistake."""
_NUMBER = "a number for any text, within reward.timeout_s"
_TERMS = "{name: [a number for each answer]} for any text, within reward.timeout_s"


def try_rewards(config: Config, prompts: Sequence[Prompt], say: Callable[[str], None]) -> None:
    """Calls the functions of `config` for the first of `prompts`, in a process that is killed if they take too long.

    `say` is told, in a line, of an exception that need not be a mistake. Raises ConfigError if a function takes longer
    than reward.timeout_s, ends its process, returns something else than it may, or raises what mistakes raise
    (TypeError, AttributeError, NameError, ImportError), fails for both responses, or asks a model that is not served.
    """
    for number, own in enumerate(config.by_environment()):
        first = next((prompt for prompt in prompts if prompt.environment == number), None)
        if first and (own.reward.is_own or own.reward.group_function):
            asyncio.run(_Trial(own, first, say).run())


class _Trial:
    def __init__(self, whole: Config, prompt: Prompt, say: Callable[[str], None]):
        config = whole.reward
        patience = min(config.timeout_s, _PATIENCE_S)
        self._config, self._prompt, self._say = config, prompt, say
        self._asked = replace(config, workers=1, retry_s=0.0, away_s=0.0, timeout_s=patience)
        if not config.is_own:  # a built-in reward, a model or a service is known to work, or not there yet
            self._asked.function = "math"
        self._workers = RewardWorkers(self._asked, whole.model.path, stand_ins=whole.served_models)
        self._has_stand_ins = bool(whole.served_models)
        self._failures: list[str] = []
        """What failed, though it need not be a mistake."""
        self._lasting = 0
        """How many of them would fail at any other time."""

    async def run(self) -> None:
        await self._workers.start()
        try:
            scores = [await self._score(text) for text in (self._prompt.answer, WRONG)]
            if self._lasting == len(scores):
                raise ConfigError(f"{self._failures[0]}, nor {WRONG!r}; it has to return {_NUMBER}")
            if self._config.group_function:
                await self._add_terms(scores)
        except RunError:  # the service that the function asks is away; a run waits for it
            pass
        finally:
            await self._workers.close()
        for text in self._failures[:1]:
            self._say(f"warning: {text}; such answers are tried again for reward.retry_s and are not trained")

    async def _score(self, response: str) -> float:
        if not self._config.is_own:
            return float(response != WRONG)
        row = self._prompt.row if self._workers.takes_row else None
        answer = Answer(self._prompt.text, response, self._prompt.answer, where=self._prompt.where, row=row)
        if problem := problem_of_sending(answer):
            raise ConfigError(f"reward.function: {problem}")
        answer.where = ""
        (scored,) = await self._workers.ask_once([answer])
        self._look("reward.function", f"cannot score {reprlib.repr(response)} as a response", _NUMBER, scored)
        if response != WRONG and not (scored.problem or scored.refused):
            self._doubt(response, scored.score)
        return scored.score

    def _doubt(self, response: str, score: float) -> None:
        """Says that the right answer does not score as one, unless stand-ins for served models have judged it."""
        if score < 0 or score >= 1 or (score == 0 and self._has_stand_ins):
            return
        doubt = "accuracy counts scores of 1 or more"
        if score == 0:
            doubt = "are its arguments (prompt, response, answer)? If it wants more than the bare answer, all is well"
        self._say(
            f"warning: reward.function: {self._config.function} scores {reprlib.repr(response)}, the right answer to "
            f"{self._prompt.where}, with {score:g}: {doubt}"
        )

    async def _add_terms(self, scores: Sequence[float]) -> None:
        tokens, wrong, right = np.array([0], np.int32).tobytes(), self._config.wrong, self._config.right
        members = [
            GroupAnswer(tokens=1, truncated=False, score=s, correct=s >= 1, reward=(1 - s) * wrong + s * right)
            for s in scores
        ]
        group = AnswerGroup(self._prompt.text, self._prompt.answer, members, [tokens] * 2, [tokens] * 2)
        (scored,) = await self._workers.ask_once([group])
        self._look(KEY, "cannot add terms to two answers", _TERMS, scored)

    def _look(self, key: str, fails: str, wanted: str, scored: Scored) -> None:
        """Says what is wrong with the result. Raises ConfigError if it is a mistake of the function."""
        if not scored.problem:
            return
        name = self._config.function if key != KEY else self._config.group_function
        where, place = self._prompt.where, f" ({scored.place})" if scored.place else ""
        text = f"{key}: {name} {fails} to {where}: {scored.problem}{place}"
        patient = self._asked.timeout_s == self._config.timeout_s
        if scored.is_mistake or (scored.ended and patient):
            raise ConfigError(f"{text}; it has to return {wanted}")
        if not scored.ended:
            self._failures.append(text)
            self._lasting += not (scored.may_pass or scored.never or self._has_stand_ins)
