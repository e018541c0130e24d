"""What one trajectory has sampled so far, and what it was told between: exact tokens, never text again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from areal_megatron.rollout.client import Completion


@dataclass(frozen=True)
class Context:
    """Tokens of a prompt, and R tokens after it: answers, and between them what the environment says."""

    prompt: list[int]
    version: int
    """Of what the environment says before any answer."""
    tokens: np.ndarray
    """int32 [R]"""
    logprobs: np.ndarray
    """float32 [R], 0 where the model did not sample the token"""
    versions: np.ndarray
    """int32 [R]; the environment's tokens have that of the sampled token before them, so that they add no version"""
    loss_mask: np.ndarray
    """uint8 [R], 1 where the model sampled the token"""
    answers: int = 0
    last: int = 0
    """Where the last answer begins."""
    ended: bool = False
    """The model ended the last answer itself."""
    cut: bool = False
    """No token was left for the last answer, or for what would have followed it."""

    @classmethod
    def of(cls, prompt: Sequence[int], version: int) -> Context:
        nothing = (np.zeros(0, kind) for kind in (np.int32, np.float32, np.int32, np.uint8))
        return cls(list(prompt), version, *nothing)

    @classmethod
    def single(cls, prompt: list[int], answer: Completion) -> Context:
        """Of one answer and nothing else."""
        mask = np.ones(len(answer.tokens), np.uint8)
        return cls(prompt, 0, answer.tokens, answer.logprobs, answer.versions, mask, answers=1)

    @property
    def answer(self) -> list[int]:
        """Tokens of the last answer, without what came after it."""
        after = np.flatnonzero(self.loss_mask[self.last :] == 0)
        end = self.last + int(after[0]) if len(after) else len(self.tokens)
        return self.tokens[self.last : end].tolist()

    @property
    def answered(self) -> bool:
        """Whether it ends with an answer."""
        return len(self.tokens) > 0 and bool(self.loss_mask[-1])

    def with_answer(self, completion: Completion, cut: bool) -> Context:
        longer = self._with(completion.tokens, completion.logprobs, completion.versions, 1)
        ended = completion.finish_reason == "stop"
        return replace(longer, answers=self.answers + 1, last=len(self.tokens), ended=ended, cut=cut)

    def told(self, tokens: Sequence[int], stop_tokens: Collection[int] = ()) -> Context:
        """With tokens of the environment. The end token that they may begin with is left out where the answer has one."""
        if len(self.tokens) and self.tokens[-1] in stop_tokens and tokens and tokens[0] in stop_tokens:
            tokens = tokens[1:]
        version = self.versions[-1] if len(self.versions) else self.version
        count = len(tokens)
        return self._with(np.array(tokens, np.int32), np.zeros(count, np.float32), np.full(count, version, np.int32), 0)

    def _with(self, tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray, mask: int) -> Context:
        return replace(
            self,
            tokens=np.concatenate([self.tokens, tokens]),
            logprobs=np.concatenate([self.logprobs, logprobs]),
            versions=np.concatenate([self.versions, versions]),
            loss_mask=np.concatenate([self.loss_mask, np.full(len(tokens), mask, np.uint8)]),
        )
