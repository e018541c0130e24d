"""Scores of a reward model, from the engines that serve it (engine/reward_server.py).

The score is σ(s), where s is the model's: between 0 and 1, as of answers that are wrong and right. By the model of
Bradley and Terry it is the probability that the answer is preferred to one with s = 0.
"""

from __future__ import annotations

import functools
import math
import random
import time
from typing import Any

from areal_megatron import config_file
from areal_megatron.config import ConfigError
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.reward import remote
from areal_megatron.reward.no_score import ServiceAway
from areal_megatron.run import Run, RunError, reward_engine_name

_LEAST = -700.0
"""e to the power of less is no number of a computer's any more."""


def function(folder: str, limit_s: float):
    """Returns the reward function of the run in `folder`, which waits up to `limit_s` seconds for a score.

    Raises ConfigError if there is no run, as in an evaluation by hand.
    """
    if not folder:
        raise ConfigError("reward.function: a reward model is served in runs alone; name another function here")
    run = Run(folder)
    settings = config_file.load(run.config).reward
    engines = [reward_engine_name(index) for index in range(settings.model_engines)]
    tokenizer = Tokenizer(settings.model)
    return functools.partial(score, run=run, engines=engines, tokenizer=tokenizer, limit_s=limit_s)


def score(
    prompt: str, response: str, answer: str, *, run: Run, engines: list[str], tokenizer: Tokenizer, limit_s: float
) -> float:
    """Returns σ of the model's score of prompt, response and end token, as it was trained on them.

    Asks another engine where one is away. Raises ServiceAway if all are, and else as remote.ask does.
    """
    (asked,), (answered,) = tokenizer.prompts([prompt]), tokenizer.responses([response])
    question = {"model": "reward", "input": [*asked, *answered], "use_activation": False}
    problem, end = "", time.monotonic() + limit_s
    for engine in random.sample(engines, len(engines)):
        try:
            url = f"{run.endpoint(engine)}/classify"
            left_s = end - time.monotonic()
            return sigmoid(remote.ask(url, question, left_s, _score_in, "one score", run.token))
        except (ServiceAway, RunError) as e:
            problem = f"{engine}: {e}"
    raise ServiceAway(problem)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-max(value, _LEAST)))


def _score_in(reply: Any) -> float:
    (found,) = reply["data"][0]["probs"]
    return float(found)
