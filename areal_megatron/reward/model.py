"""Scores of a reward model, from the engines that serve it (engine/served.py).

The score is σ(s), where s is the model's: between 0 and 1, as of answers that are wrong and right. By the model of
Bradley and Terry it is the probability that the answer is preferred to one with s = 0.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from areal_megatron.config import ConfigError, ServedModelConfig, config_file
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.reward.served import ask_engines
from areal_megatron.run.folder import RunFolder

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
    run = RunFolder(folder)
    return ModelScores(run, config_file.load(run.config).served.reward, limit_s)


class ModelScores:
    """The reward function: the model's scores of prompt, response and end token, as it was trained on them.

    Engines compute several texts at once much faster than one after the other, so those that were announced are asked
    for together.
    """

    def __init__(self, run: RunFolder, model: ServedModelConfig, limit_s: float):
        self._run, self._model, self._limit_s = run, model, limit_s
        self._tokenizer = Tokenizer(model.path)
        self._coming: list[Text] = []
        self._known: dict[Text, float] = {}

    def expect(self, texts: Sequence[tuple[str, str, str]]) -> None:
        """Announces the texts that are going to be asked about, each with its right answer."""
        self._coming, self._known = [(prompt, response) for prompt, response, _ in texts], {}

    def __call__(self, prompt: str, response: str, answer: str) -> float:
        """Returns σ of the model's score. Asks another engine where one is away.

        Raises what `ask_engines` does.
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
        asked = self._run, "reward", self._model, "/classify", question
        read = partial(_scores_in, count=len(texts))
        found = asyncio.run(ask_engines(*asked, self._limit_s, read, f"{len(texts)} scores"))
        return dict(zip(texts, map(sigmoid, found), strict=True))


def sigmoid(value: float) -> float:
    """Returns σ, below 1 where doubles round it to that, too."""
    return min(1 / (1 + math.exp(-max(value, _LEAST))), math.nextafter(1, 0))


def _scores_in(reply: Any, count: int) -> list[float]:
    data = sorted(reply["data"], key=lambda entry: entry["index"])
    found = [entry["probs"] for entry in data]
    if len(found) != count:
        raise ValueError
    return [float(score) for (score,) in found]
