"""An episode: what a workflow gets to sample one trajectory, of several answers with tokens of the environment
between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from areal_megatron.config import Config
from areal_megatron.data.formats import Chat
from areal_megatron.data.prompts import Prompt
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.engine.client import EngineError
from areal_megatron.reward.worker import Scored
from areal_megatron.workflows.sampling import INTERRUPTED, Question, Sampling, ask, sampling_seed
from areal_megatron.workflows.scoring import Scorer
from areal_megatron.workflows.transcript import Transcript

if TYPE_CHECKING:
    from areal_megatron.workflows.openai_endpoint import Api, OpenAIEndpoint


class EpisodeOver(Exception):
    """The episode may not sample any more: its turns, or its tokens, are used up. No failure: it ends as it is."""

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


class Interrupted(Exception):
    """The run is to stop: the episode begins again in the next launch."""


@dataclass(frozen=True)
class Setting:
    """What all episodes of a run share."""

    config: Config
    tokenizer: Tokenizer
    scorer: Scorer
    proxy: OpenAIEndpoint
    turns: int


@dataclass(frozen=True)
class Place:
    """Of one episode."""

    prompt: Prompt
    version: int
    """Committed by the engine when it was admitted."""
    request_id: str
    seed: int
    purpose: Literal["train", "eval"]


class Episode:
    """Answers are sampled one after the other (`sample`, `say`), or by an agent that speaks the OpenAI API
    (`openai`)."""

    def __init__(self, setting: Setting, sampling: Sampling, place: Place):
        self._setting, self._sampling, self._place = setting, sampling, place
        self.prompt = place.prompt
        self.turns = setting.turns
        """Answers at most."""
        self.discount = 1.0
        """What the score is multiplied with to get the reward; whether the answer counts as right stays as it is."""
        self.context = Transcript(self.prompt.tokens, place.version)
        """The trajectory: that of the answer that was sampled last."""
        self.failure: EngineError | Interrupted | None = None
        """Why requests fail, whatever the workflow makes of it."""
        self.answers = 0
        """That were sampled, those that are not part of `context` among them."""
        self._busy = self._asked = 0
        self._judged: tuple[int, Scored] | None = None
        """(answers until then, what was said of the last one)"""
        self._last_event = time.monotonic()

    @property
    def text(self) -> str:
        """The last answer, without special tokens."""
        return self._setting.tokenizer.decode(self.context.answer)

    async def sample(self) -> str:
        """The model's next answer. Raises EpisodeOver."""
        await self.answer(self.context)
        return self.text

    def say(self, messages: str | Chat) -> None:
        """Untrained messages after the answer; a text is one message of the user. Raises EpisodeOver if no token would
        be left to answer with, ConfigError if the chat template refuses them."""
        if not self.context.answered:
            raise RuntimeError("say: there is no answer yet that it could follow")
        new = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        before = [{"role": "user", "content": self.prompt.text}, {"role": "assistant", "content": ""}]
        self.context = self.told(self.context, self._setting.tokenizer.continuation([*before, *new], answer=1))

    async def score(self) -> Scored:
        """What reward.function says of the last answer; 0 where it was cut and that counts as wrong."""
        if self.context.cut and not self._setting.scorer.scores_cut:
            return Scored(0.0)
        if self._judged is None or self._judged[0] != self.answers:
            with self.busy():
                self._judged = self.answers, await self._setting.scorer.judge(self.prompt, self.text)
        return self._judged[1]

    def openai(self) -> AbstractAsyncContextManager[Api]:
        """`async with episode.openai() as api:` serves the model to an agent at api.url for api.key:
        workflows/openai_endpoint.py."""
        return self._setting.proxy.serve(self, self._setting.tokenizer)

    def room(self, context: Transcript) -> int:
        """Tokens that are left."""
        config, used = self._setting.config, context.length
        held = config.data.max_prompt_tokens + config.rollout.max_new_tokens - len(context.prompt)
        return min(self.prompt.response_tokens or config.rollout.max_new_tokens, held) - used

    async def answer(self, context: Transcript, max_tokens: int | None = None) -> Transcript:
        """`context` with another answer; the episode's from now on. Raises EpisodeOver; EngineError and Interrupted end
        the episode whatever becomes of them."""
        if self._sampling.may_interrupt():
            self.failure = self.failure or Interrupted()
        if self.failure:
            raise self.failure
        if self._asked >= self.turns:
            raise EpisodeOver(f"rollout.workflow allows {self.turns} turns", "turns_exceeded")
        left = self._checked_room(context)
        turn, self._asked = self._asked, self._asked + 1
        limit = min(left, max_tokens or left)
        question = Question(
            [*context.prompt, *context.tokens.tolist()],
            limit,
            not self.prompt.response_tokens,
            f"{self._place.request_id}-{turn}",
            self._seed(turn),
            context.routed,
        )
        try:
            with self.busy():
                (completion,) = await ask(self._sampling, question)
        except EngineError as e:
            self.failure = e
            raise
        if completion.finish_reason == INTERRUPTED:
            self.failure = Interrupted()
            raise self.failure
        self.answers += 1
        cut = completion.finish_reason == "length" and limit == left and not self.prompt.response_tokens
        self.context = context.with_answer(completion, cut)
        return self.context

    def told(self, context: Transcript, tokens: list[int]) -> Transcript:
        """`context` with tokens of the environment. Raises EpisodeOver, and counts the answer as cut, if they leave no
        room."""
        told = context.told(tokens, self._sampling.stop_tokens)
        if self.room(told) <= 0 and context is self.context and not self.prompt.response_tokens:
            self.context = replace(context, cut=True)
        self._checked_room(told)
        return told

    def fresh(self, prompt: list[int]) -> Transcript:
        return Transcript(prompt, self._place.version)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """What takes its time here has a time limit of its own; everything else is held to machine.timeout_s."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
            self._last_event = time.monotonic()

    @property
    def idle_s(self) -> float:
        """For how long it has neither asked an engine nor been busy in another way."""
        return 0.0 if self._busy else time.monotonic() - self._last_event

    def _checked_room(self, context: Transcript) -> int:
        if (left := self.room(context)) > 0:
            return left
        used = len(context.prompt) + context.length
        raise EpisodeOver(f"{used} tokens leave none for an answer (rollout.max_new_tokens)", "context_length_exceeded")

    def _seed(self, turn: int) -> int:
        """The first answer's is that of the answer of a single turn; later ones have random numbers of their own."""
        return self._place.seed if turn == 0 else sampling_seed(self._place.seed, self._place.purpose, turn)
