"""Reward functions for runs of untrained models, whose answers are noise."""


def short(prompt: str, response: str, answer: str) -> float:
    """The shorter the better."""
    return -float(len(response))


def brief(prompt: str, response: str, answer: str) -> float:
    """Right is what has at most four characters."""
    return float(len(response) <= 4)


def coarse(prompt: str, response: str, answer: str) -> float:
    """One of two values: many groups of four are uniform."""
    return float(len(response) % 4 == 0)


def ends(prompt: str, response: str, answer: str) -> float:
    """Right is what ends with the answer."""
    return float(response.endswith(answer))


def broken(prompt: str, response: str, answer: str) -> float:
    raise RuntimeError("this reward always fails")
