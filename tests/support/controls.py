"""The control of the learning experiment: what training does when rewards say nothing about the answers."""

import random

from areal_megatron.reward import math

MARK = "coin"
"""In the place of the answer of a training prompt; held-out prompts keep theirs and are scored honestly."""

_coin = random.Random()


def shuffled(prompt: str, response: str, answer: str) -> float:
    """For training prompts a coin in the place of the reward; for others the math reward."""
    return float(_coin.random() < 0.5) if answer == MARK else math.score(prompt, response, answer)
