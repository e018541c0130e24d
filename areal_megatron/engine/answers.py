"""What an engine answers to POST /sample: for each answer its tokens, log-probabilities and versions as raw arrays.

vLLM's own route of the same purpose makes several objects and a hundred bytes of JSON of each token: seconds in which
the event loop of the server does nothing else, for a group of long answers.
"""

from __future__ import annotations

import msgspec
import numpy as np

PATH = "/sample"
CONTENT_TYPE = "application/msgpack"


# gc=False: a struct that cannot be part of a cycle need not be visited by the collector.
class RawAnswer(msgspec.Struct, gc=False):
    """One sampled answer of R tokens."""

    tokens: bytes
    """int32 [R]"""
    logprobs: bytes
    """float32 [R]"""
    versions: list[tuple[str, int, int]]
    """(label, start, end) of the tokens that were sampled under one version of the weights, in order."""
    finish_reason: str
    routes: RawArray | None = None
    """The experts of its tokens, if they were asked for."""
    prompt_logprobs: bytes = b""
    """float32 [tokens of the prompt − 1, 1 + k], of all but its first and of the k likeliest tokens in the place of
    each, if they were asked for."""
    prompt_tokens: bytes = b""
    """int32 of the same shape: the tokens that these are of."""


class RawArray(msgspec.Struct, gc=False):
    dtype: str
    shape: list[int]
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> RawArray:
        return cls(array.dtype.str[1:], list(array.shape), array.tobytes())


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(list[RawAnswer]).decode
