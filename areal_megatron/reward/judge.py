"""Scores of a judge: a language model that is served beside the policy is asked, and its verdict is read.

A judge without a verdict says nothing about the answer: it is asked again at once, and then there is no score, but a
failure.
"""

from __future__ import annotations

import asyncio
import re
import reprlib
import time
from collections.abc import Sequence
from contextlib import suppress

from areal_megatron.config import Config, ConfigError, JudgeConfig, config_file
from areal_megatron.reward.no_score import NeverScored, ServiceAway
from areal_megatron.reward.served import Said, ServedModels
from areal_megatron.run.folder import RunFolder

Text = tuple[str, str, str]
"""A prompt, a response and the right answer."""
TRIES = 3
"""How often a judge is asked until it has a verdict; once at temperature 0, where it would say the same again."""
_PLACE = re.compile(r"\{(prompt|response|answer)\}")


class NoVerdict(NeverScored):
    """A judge was asked, and fewer than half of what it said had a verdict, also when it was asked again."""


def function(folder: str, limit_s: float) -> JudgeScores:
    """Returns the reward function of the run in `folder`, which waits up to `limit_s` seconds for verdicts.

    Raises ConfigError if there is no run, as in an evaluation by hand.
    """
    if not folder:
        raise ConfigError("reward.function: a judge is served in runs alone; name another function here")
    run = RunFolder(folder)
    return JudgeScores(config_file.load(run.config), run, limit_s)


class JudgeScores:
    """The reward function: the mean of the judge's verdicts.

    An engine rates several responses at once much faster than one after the other, so those that were announced are
    asked about together.
    """

    def __init__(self, config: Config, run: RunFolder, limit_s: float):
        self._judge, self._models, self._limit_s = config.reward.judge, ServedModels(config.served_models, run), limit_s
        self._tries = TRIES if config.served.judge.temperature else 1
        self._coming: list[Text] = []
        self._found: dict[Text, float | BaseException] = {}

    def expect(self, texts: Sequence[Text]) -> None:
        """Announces the texts that are going to be asked about."""
        self._coming, self._found = list(texts), {}

    def __call__(self, prompt: str, response: str, answer: str) -> float:
        """Returns the score. Raises NoVerdict, and what `ServedModels.chat` raises."""
        text = prompt, response, answer
        if text not in self._found:
            asked = list(dict.fromkeys([text, *self._coming]))
            self._found |= dict(zip(asked, asyncio.run(self._scores(asked)), strict=True))
            self._coming = []
        score = self._found[text]
        if isinstance(score, ServiceAway):  # all are asked about again
            self._coming = [one for one, found in self._found.items() if isinstance(found, ServiceAway)]
            self._found = {one: found for one, found in self._found.items() if one not in self._coming}
        if isinstance(score, BaseException):
            raise score
        return score

    async def _scores(self, texts: Sequence[Text]) -> list[float | BaseException]:
        return await asyncio.gather(*map(self._score, texts), return_exceptions=True)

    async def _score(self, text: Text) -> float:
        ends = time.monotonic() + self._limit_s
        for _ in range(self._tries - 1):
            with suppress(NoVerdict):
                return await self._score_once(text, ends)
        return await self._score_once(text, ends)

    async def _score_once(self, text: Text, ends: float) -> float:
        """`ends`: when the time for all tries does."""
        message, limit_s = asked(self._judge, text), max(ends - time.monotonic(), 0.0)
        return score_of(self._judge, await self._models.chat("judge", message, n=self._judge.samples, limit_s=limit_s))


def asked(judge: JudgeConfig, text: Text) -> list[dict[str, str]]:
    """Returns what the judge is asked, as messages. What the policy says stays as it is, `{answer}` included."""
    values: dict[str, str] = dict(zip(("prompt", "response", "answer"), text, strict=True))
    return [{"role": "user", "content": _PLACE.sub(lambda place: values[place[1]], judge.question)}]


def score_of(judge: JudgeConfig, said: Sequence[Said]) -> float:
    """Returns the mean score of what the judge has said, of those with a verdict. Raises NoVerdict if these are fewer
    than half."""
    scores = [score for score in (verdict(judge, one) for one in said) if score is not None]
    if 2 * len(scores) < len(said) or not scores:
        example = next(one.text for one in said if verdict(judge, one) is None)
        raise NoVerdict(
            f"{len(said) - len(scores)} of {len(said)} answers of served.judge have no verdict (reward.judge.verdict), "
            f"such as {reprlib.repr(example[-100:])}"
        )
    return sum(scores) / len(scores)


def verdict(judge: JudgeConfig, said: Said) -> float | None:
    """Returns the score that an answer of the judge gives; None if it gives none, a number beyond the scale, or was cut
    before its end, where a number may have been cut too."""
    found = re.findall(judge.verdict, said.text) if said.ended else []
    try:
        score = (float(found[-1]) - judge.worst) / (judge.best - judge.worst)
    except (IndexError, ValueError):
        return None
    return score if 0 <= score <= 1 else None
