"""Seeds of sampling: a prompt that is asked again, under the same weights, gets the same answers."""

from __future__ import annotations

import hashlib
from typing import Literal

_BITS = 62  # vLLM adds the number of the answer, and keeps the sum in 64 signed bits


def sampling_seed(seed: int, purpose: Literal["train", "eval"], *place: int) -> int:
    """Of the first answer to a prompt, in [0, 2⁶²); the k-th answer, from 0, has this + k.

    `seed` is the run's, `place` an epoch and a prompt's id, or for evaluation its id alone. The same in every process,
    on every machine and under every version of Python.
    """
    digest = hashlib.sha256(" ".join(map(str, (purpose, seed, *place))).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _BITS)
