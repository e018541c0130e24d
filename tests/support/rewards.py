"""Reward functions for runs of untrained models, whose answers are noise."""

import zlib


def short(prompt: str, response: str, answer: str) -> float:
    """The shorter the better."""
    return -float(len(response))


def brief(prompt: str, response: str, answer: str) -> float:
    """Right is what has at most four characters."""
    return float(len(response) <= 4)


def coarse(prompt: str, response: str, answer: str) -> float:
    """One of two values: many groups of four are uniform."""
    return float(len(response) % 4 == 0)


def coin(prompt: str, response: str, answer: str) -> float:
    """One of two values, as a coin falls: one group of four in eight is uniform, however long its answers are."""
    return float(zlib.crc32(response.encode()) % 2)


def ends(prompt: str, response: str, answer: str) -> float:
    """Right is what ends with the answer."""
    return float(response.endswith(answer))


def broken(prompt: str, response: str, answer: str) -> float:
    """Fails for all but what the trial before a run takes for a wrong answer, so that the run starts."""
    if response == "I do not know.":
        return 0.0
    raise RuntimeError("this reward always fails")


def beside_the_group(prompt: str, answer: str, answers) -> dict[str, list[float]]:
    """Two terms: by how much an answer is shorter than the mean, and whether it says what the first one says."""
    mean = sum(one.tokens for one in answers) / len(answers)
    return {
        "length": [mean - one.tokens for one in answers],
        "first": [float(one.response == answers[0].response) for one in answers],
    }
