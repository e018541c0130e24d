"""How many logits a trainer rank holds at a time, since full logits never exist; the memory plan counts with it too."""

from __future__ import annotations

from math import isqrt

BYTES = 12
"""What computing with a logit takes at most: itself and two intermediate results, in float32."""
UNKNOWN = 80 * 2**30
"""The memory that a GPU is taken to have where nobody says."""
SCORED_TOKENS = 256
"""Most tokens of a prompt whose log-probabilities an engine is asked for: vLLM keeps BYTES for each of their logits at
the same time."""
PER_CORE = 2**17
"""Logits that a CPU core computes at a time: with intermediate results they stay in a second-level cache of 2 MiB."""
ALIGNED = 128
"""Rows of logits begin at multiples of this many elements, where GPUs multiply fastest."""


def gpu_logits(memory: float) -> int:
    """Returns how many logits a GPU with `memory` bytes (0 if unknown) holds at a time: what fits a fiftieth of it.

    More would not be faster: products with square tiles are at their full rate long before. A power of two, so that
    GPUs of about the same size hold the same number.
    """
    return _power_of_two(int((memory or UNKNOWN) / 50 / BYTES))


def cpu_logits(threads: int) -> int:
    """Returns how many logits a process with `threads` threads holds at a time, on as many cores."""
    return PER_CORE * threads


def tile(tokens: int, columns: int, logits: int) -> tuple[int, int]:
    """Returns the tokens and columns of the tiles in which a matrix of logits is computed, at most `logits` in each.

    A tile is as nearly square as the matrix allows, so that products with it read and write least.
    """
    wide = max(_power_of_two(isqrt(logits)), logits // max(tokens, 1) // ALIGNED * ALIGNED)
    wide = max(1, min(wide, columns))
    return max(1, min(logits // wide, tokens)), wide


def _power_of_two(limit: int) -> int:
    """The largest that is not beyond `limit`; 0 if there is none."""
    return 1 << limit.bit_length() >> 1
