"""The transcript of a trajectory: the exact tokens of its answers and of the environment's messages between them.

Text is never tokenised again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import DTypeLike

from areal_megatron.engine.client import NO_ROUTES, Completion


@dataclass(frozen=True)
class Segment:
    """One answer, or what the environment says after one."""

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    sampled: bool
    routes: np.ndarray = field(default_factory=lambda: NO_ROUTES)
    """Routes of all tokens that had none before, up to the last but one of this segment."""


@dataclass(frozen=True)
class Transcript:
    """The tokens of a prompt, and R tokens after it: answers of the model and messages of the environment.

    It is immutable. A longer transcript shares the segments of the one that it extends.
    """

    prompt: list[int]
    version: int
    """The version of the environment's tokens before the first answer."""
    segments: tuple[Segment, ...] = ()
    ended: bool = False
    """Whether the model ended the last answer itself."""
    truncated: bool = False
    """Whether no token was left to end the last answer, or to answer the message after it."""
    asked: int | None = None
    """`checksum` of what the engine was sent for the first answer; None before one."""

    @property
    def length(self) -> int:
        """R"""
        return sum(len(segment.tokens) for segment in self.segments)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [R]"""
        return _joined([segment.tokens for segment in self.segments], np.int32)

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [R], 0 where the model did not sample the token"""
        return _joined([segment.logprobs for segment in self.segments], np.float32)

    @property
    def versions(self) -> np.ndarray:
        """int32 [R]; the environment's tokens have the version of the sampled token before them, so that they add
        none"""
        return _joined([segment.versions for segment in self.segments], np.int32)

    @property
    def loss_mask(self) -> np.ndarray:
        """uint8 [R], 1 where the model sampled the token"""
        return _joined([np.full(len(s.tokens), s.sampled, np.uint8) for s in self.segments], np.uint8)

    @property
    def routes(self) -> np.ndarray:
        """uint8 or uint16 [tokens, layers, k], flat: the experts of the first `routed` tokens, prompt included."""
        found = [segment.routes for segment in self.segments if len(segment.routes)]
        return _joined(found, found[0].dtype if found else np.uint8)

    @property
    def routed(self) -> int:
        """The number of leading tokens, prompt included, whose routes are known; 0 if the engine returns no routes."""
        routed, end = 0, len(self.prompt)
        for segment in self.segments:
            end += len(segment.tokens)
            routed = end - 1 if len(segment.routes) else routed
        return routed

    @property
    def answers(self) -> int:
        """The number of answers."""
        return sum(segment.sampled for segment in self.segments)

    @property
    def answer_lengths(self) -> list[int]:
        """The tokens of each answer."""
        return [len(segment.tokens) for segment in self.segments if segment.sampled]

    @property
    def answered(self) -> bool:
        """Whether the transcript ends with an answer."""
        return bool(self.segments) and self.segments[-1].sampled

    @property
    def answer(self) -> list[int]:
        """The tokens of the last answer, without what came after it."""
        sampled = (segment.tokens for segment in reversed(self.segments) if segment.sampled)
        return next(sampled, np.zeros(0, np.int32)).tolist()

    def extends(self, other: Transcript) -> bool:
        """Returns whether this transcript is `other` with more segments, or none, after its own."""
        same = self.prompt is other.prompt and len(self.segments) >= len(other.segments)
        return same and all(one is another for one, another in zip(self.segments, other.segments, strict=False))

    def with_answer(self, completion: Completion, truncated: bool) -> Transcript:
        """Returns this transcript with another answer."""
        segment = Segment(completion.tokens, completion.logprobs, completion.versions, True, completion.routes)
        ended = completion.finish_reason == "stop"
        asked = self.asked if self.answers else completion.asked
        return replace(self, segments=(*self.segments, segment), ended=ended, truncated=truncated, asked=asked)

    def with_observation(self, tokens: Sequence[int], stop_tokens: Collection[int] = ()) -> Transcript:
        """Returns this transcript with tokens of the environment. If both they begin and the last answer ends with a
        stop token, theirs is left out."""
        last = self.segments[-1] if self.segments else None
        if last and tokens and tokens[0] in stop_tokens and last.tokens[-1] in stop_tokens:
            tokens = tokens[1:]
        if not tokens:
            return self
        version, count = (last.versions[-1] if last else self.version), len(tokens)
        segment = Segment(
            np.array(tokens, np.int32), np.zeros(count, np.float32), np.full(count, version, np.int32), sampled=False
        )
        return replace(self, segments=(*self.segments, segment))


def trained_once(transcripts: Sequence[Transcript]) -> tuple[Transcript, ...]:
    """Returns the transcripts of an episode with each answer trained in the first one that has it: in others it is
    context, like what the environment says."""
    seen: set[int] = set()
    found = []
    for transcript in transcripts:
        segments = tuple(replace(s, sampled=False) if id(s) in seen else s for s in transcript.segments)
        seen |= {id(segment) for segment in transcript.segments}
        found.append(replace(transcript, segments=segments))
    return tuple(found)


def _joined(arrays: list[np.ndarray], kind: DTypeLike) -> np.ndarray:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate([np.zeros(0, kind), *arrays])
