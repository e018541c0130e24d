"""The length penalty of DAPO, which the reward of an answer gets with reward.truncated=overlong."""

from __future__ import annotations


def overlong(tokens: int, longest: int) -> float:
    """Returns 0 up to 4/5 of the longest answer, and from there on falls linearly to −1.

    Equation 13 of DAPO (arXiv 2503.14476), where L_max is 20,480 tokens and L_cache, the last fifth, 4,096 of them.
    """
    cache = longest / 5
    return -min(max(tokens - (longest - cache), 0.0) / cache, 1.0)
