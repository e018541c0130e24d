"""What one trajectory has sampled so far, and what it was told between: exact tokens, never text again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from areal_megatron.engine.client import NO_ROUTES, Completion


@dataclass(frozen=True)
class _Segment:
    """One answer, or what the environment says after one."""

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    sampled: bool
    routes: np.ndarray = field(default_factory=lambda: NO_ROUTES)
    """Of all tokens without a route until then, but its own last one."""


@dataclass(frozen=True)
class Transcript:
    """Tokens of a prompt, and R tokens after it. A longer one shares the parts of the one that it goes on from."""

    prompt: list[int]
    version: int
    """Of what the environment says before any answer."""
    parts: tuple[_Segment, ...] = ()
    ended: bool = False
    """The model ended the last answer itself."""
    cut: bool = False
    """No token was left for the last answer, or for what would have followed it."""

    @property
    def length(self) -> int:
        """R"""
        return sum(len(part.tokens) for part in self.parts)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [R]"""
        return _joined([part.tokens for part in self.parts], np.int32)

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [R], 0 where the model did not sample the token"""
        return _joined([part.logprobs for part in self.parts], np.float32)

    @property
    def versions(self) -> np.ndarray:
        """int32 [R]; the environment's tokens have that of the sampled token before them, so that they add no
        version"""
        return _joined([part.versions for part in self.parts], np.int32)

    @property
    def loss_mask(self) -> np.ndarray:
        """uint8 [R], 1 where the model sampled the token"""
        return _joined([np.full(len(part.tokens), part.sampled, np.uint8) for part in self.parts], np.uint8)

    @property
    def routes(self) -> np.ndarray:
        """Flat, of all tokens but the last; of none where the engine returns none."""
        found = [part.routes for part in self.parts if len(part.routes)]
        return _joined(found, found[0].dtype if found else np.uint8)

    @property
    def routed(self) -> int:
        """Of how many tokens."""
        routed, end = 0, len(self.prompt)
        for part in self.parts:
            end += len(part.tokens)
            routed = end - 1 if len(part.routes) else routed
        return routed

    @property
    def answers(self) -> int:
        return sum(part.sampled for part in self.parts)

    @property
    def answered(self) -> bool:
        """Whether it ends with an answer."""
        return bool(self.parts) and self.parts[-1].sampled

    @property
    def answer(self) -> list[int]:
        """Tokens of the last answer, without what came after it."""
        sampled = (part.tokens for part in reversed(self.parts) if part.sampled)
        return next(sampled, np.zeros(0, np.int32)).tolist()

    def with_answer(self, completion: Completion, cut: bool) -> Transcript:
        part = _Segment(completion.tokens, completion.logprobs, completion.versions, True, completion.routes)
        return replace(self, parts=(*self.parts, part), ended=completion.finish_reason == "stop", cut=cut)

    def told(self, tokens: Sequence[int], stop_tokens: Collection[int] = ()) -> Transcript:
        """With tokens of the environment. The end token that they may begin with is left out where the answer has
        one."""
        last = self.parts[-1] if self.parts else None
        if last and tokens and tokens[0] in stop_tokens and last.tokens[-1] in stop_tokens:
            tokens = tokens[1:]
        if not tokens:
            return self
        version, count = (last.versions[-1] if last else self.version), len(tokens)
        part = _Segment(
            np.array(tokens, np.int32), np.zeros(count, np.float32), np.full(count, version, np.int32), sampled=False
        )
        return replace(self, parts=(*self.parts, part))


def _joined(arrays: list[np.ndarray], kind: type) -> np.ndarray:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate([np.zeros(0, kind), *arrays])
