"""Reward functions for runs of untrained models, whose answers are noise."""


def short(prompt: str, response: str, answer: str) -> float:
    """The shorter the better."""
    return -float(len(response))


def coarse(prompt: str, response: str, answer: str) -> float:
    """One of two values: many groups of four are uniform."""
    return float(len(response) % 4 == 0)


def broken(prompt: str, response: str, answer: str) -> float:
    raise RuntimeError("this reward always fails")
