"""Scores of a reward model, from the engines that serve it (engine/reward_server.py).

The score is σ(s), where s is the model's: between 0 and 1, as of answers that are wrong and right. By the model of
Bradley and Terry it is the probability that the answer is preferred to one with s = 0.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from areal_megatron.config import ConfigError, RewardConfig, config_file
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.reward import remote
from areal_megatron.reward.no_score import ServiceAway
from areal_megatron.run.folder import Run, RunError, reward_engine_name

Text = tuple[str, str]
"""A prompt and a response."""
_LEAST = -700.0
"""e to the power of less is no number of a computer's any more."""


def function(folder: str, limit_s: float) -> ModelScores:
    """Returns the reward function of the run in `folder`, which waits up to `limit_s` seconds for scores.

    Raises ConfigError if there is no run, as in an evaluation by hand.
    """
    if not folder:
        raise ConfigError("reward.function: a reward model is served in runs alone; name another function here")
    run = Run(folder)
    return ModelScores(run, config_file.load(run.config).reward, limit_s)


class ModelScores:
    """The reward function: the model's scores of prompt, response and end token, as it was trained on them.

    Engines compute several texts at once much faster than one after the other, so those that were announced are asked
    for together.
    """

    def __init__(self, run: Run, settings: RewardConfig, limit_s: float):
        self._run, self._limit_s = run, limit_s
        self._engines = [reward_engine_name(index) for index in range(settings.model_engines)]
        self._tokenizer = Tokenizer(settings.model)
        self._coming: list[Text] = []
        self._known: dict[Text, float] = {}

    def expect(self, texts: Sequence[Text]) -> None:
        """Announces the texts that are going to be asked about."""
        self._coming, self._known = list(texts), {}

    def __call__(self, prompt: str, response: str, answer: str) -> float:
        """Returns σ of the model's score. Asks another engine where one is away.

        Raises ServiceAway if all are, and else as remote.ask does.
        """
        text = prompt, response
        if text not in self._known:
            together, self._coming = self._coming, []
            try:
                self._known |= self._scores(list({text: None} | dict.fromkeys(together)))
            except ValueError:  # of any of the texts, such as one that is too long for the model
                if not together:
                    raise
                self._known |= self._scores([text])
        return self._known[text]

    def _scores(self, texts: list[Text]) -> dict[Text, float]:
        prompts = self._tokenizer.prompts([prompt for prompt, _ in texts])
        responses = self._tokenizer.responses([response for _, response in texts], prompts)
        tokens = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
        question = {"model": "reward", "input": tokens, "use_activation": False}
        problem, end = "", time.monotonic() + self._limit_s
        for engine in random.sample(self._engines, len(self._engines)):
            try:
                url, left_s = f"{self._run.endpoint(engine)}/classify", end - time.monotonic()
                read = partial(_scores_in, count=len(texts))
                found = remote.ask(url, question, left_s, read, f"{len(texts)} scores", self._run.token)
                return dict(zip(texts, map(sigmoid, found), strict=True))
            except (ServiceAway, RunError) as e:
                problem = f"{engine}: {e}"
        raise ServiceAway(problem)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-max(value, _LEAST)))


def _scores_in(reply: Any, count: int) -> list[float]:
    data = sorted(reply["data"], key=lambda entry: entry["index"])
    found = [entry["probs"] for entry in data]
    if len(found) != count:
        raise ValueError
    return [float(score) for (score,) in found]
