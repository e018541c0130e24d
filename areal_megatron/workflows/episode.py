"""An episode: what a workflow samples with, several answers with messages of the environment between."""

from __future__ import annotations

import asyncio
import os
import reprlib
import ssl
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import urlsplit

from areal_megatron.config import Config, ConfigError
from areal_megatron.data.formats import Chat
from areal_megatron.data.prompts import Prompt
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.engine.client import EngineError
from areal_megatron.process.lateness import now
from areal_megatron.reward.no_score import RewardFailed, ServiceAway
from areal_megatron.reward.served import Said, ServedModelError, ServedModels
from areal_megatron.reward.worker import Scored
from areal_megatron.run.credentials import Credentials
from areal_megatron.run.folder import RunError
from areal_megatron.workflows.sampling import INTERRUPTED, GenerationRequest, Sampling, generate, sampling_seed
from areal_megatron.workflows.scoring import Scorer
from areal_megatron.workflows.transcript import Segment, Transcript

ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR")
"""The variables of this process that agents get whatever rollout.workflow_environment names."""


_AWAY_PAUSE_S = 1.0


class EpisodeOver(Exception):
    """The episode has used up its turns or tokens. This is no failure: what was sampled is scored and trained."""

    def __init__(self, message: str, code: str):
        """`code`: `turns_exceeded` or `context_length_exceeded`, as an agent is told."""
        super().__init__(message)
        self.code = code


class Interrupted(Exception):
    """The run is about to stop; the next launch runs the episode again from its beginning."""


@dataclass(frozen=True)
class Api:
    """Where an agent finds the model."""

    url: str
    """For OpenAI's clients."""
    key: str
    variables: Collection[str] = ()
    """Names of environment variables of this process that agents may have beside ENVIRONMENT."""
    credentials: Credentials | None = None
    """What a client on any machine shows, and the only ones to accept (rollout.endpoint=tls); None on the loopback."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for a process that runs an agent: the allowed ones of this process, and the
        addresses and keys that OpenAI's and Anthropic's clients look for, without a proxy for these; and the file of
        `credentials` as AREAL_AGENT_CREDENTIALS.

        The others stay behind: they may hold tokens of the user, and agents run what a model says.
        """
        openai = {"OPENAI_BASE_URL": self.url, "OPENAI_API_KEY": self.key}
        anthropic = {"ANTHROPIC_BASE_URL": self.anthropic_url, "ANTHROPIC_API_KEY": self.key}
        shown = {"AREAL_AGENT_CREDENTIALS": str(self.credentials.path)} if self.credentials else {}
        return self.environment_without_keys | openai | anthropic | shown

    @property
    def environment_without_keys(self) -> dict[str, str]:
        """The same without addresses and keys, for a process that runs several episodes."""
        own = {name: os.environ[name] for name in (*ENVIRONMENT, *self.variables) if name in os.environ}
        host = urlsplit(self.url).hostname
        return own | {name: f"{own.get(name, '')},{host}".lstrip(",") for name in ("NO_PROXY", "no_proxy")}

    @property
    def tls(self) -> ssl.SSLContext | None:
        """What a client of this process needs beside the key; None on the loopback."""
        return self.credentials.calling() if self.credentials else None

    @property
    def anthropic_url(self) -> str:
        """Where Anthropic's clients find the model."""
        return self.url.removesuffix("/v1")


@dataclass(frozen=True)
class NextPrompt:
    """What follows an answer of the model."""

    tokens: list[int]
    continues: bool
    """Whether the tokens come after the answer's; else they are the whole next prompt."""


@dataclass(frozen=True)
class RunResources:
    """What all episodes of a run share."""

    config: Config
    tokenizer: Tokenizer
    scorer: Scorer
    serve: Callable[[Episode], AbstractAsyncContextManager[Api]]
    """Serves the model to an episode's agent: AgentEndpoint.serve."""
    turns: int
    served: ServedModels


@dataclass(frozen=True)
class EpisodeSpec:
    """What one episode is to sample."""

    prompt: Prompt
    version: int
    """The version that the engine had committed when the episode was admitted."""
    request_id: str
    """The ids of its requests begin with this."""
    seed: int
    """The seed of its first answer."""
    purpose: Literal["train", "eval"]


class Episode:
    """Samples answer after answer (`sample`, `say`), or through an agent that speaks the OpenAI API
    (`openai`).

    Example, a workflow that gives the model a second try:

        async def run(episode: Episode) -> float:
            await episode.sample()
            if (await episode.score()).score < 1:
                episode.say("This answer is wrong. Please try again.")
                await episode.sample()
            return (await episode.score()).score
    """

    def __init__(self, resources: RunResources, sampling: Sampling, spec: EpisodeSpec):
        self._resources, self._sampling, self._spec = resources, sampling, spec
        self.prompt = spec.prompt
        self.turns = resources.turns
        """The number of answers that may be sampled."""
        self.discount = 1.0
        """What the score is multiplied by for the reward; whether the answer counts as right does not depend on it."""
        self.context = Transcript(self.prompt.tokens, spec.version)
        """The transcript of the answer that was sampled last, and of what has been said since."""
        self.failure: EngineError | Interrupted | ConfigError | RunError | None = None
        """The error that ends the episode, even if the workflow catches it."""
        self.problem = ""
        """Why a served model had no answer, if one had none for another reason than what it was asked: then the episode
        has failed, even if the workflow catches the error."""
        self.sampled: list[Segment] = []
        """All answers in the order of sampling, including those outside `context`."""
        self._ends: list[Transcript] = []
        """The transcripts that no other extends, each up to its last answer, in the order of these."""
        self._messages = list(self.prompt.messages)
        """What has been said before the last answer, with `sample` and `say`."""
        self._busy = self._turns_taken = self._asked = 0
        self._scored: tuple[int, Scored] | None = None
        """(the number of answers at that time, the score of the last of them)"""
        self._last_event = now()

    @property
    def answers(self) -> int:
        """The number of answers sampled."""
        return len(self.sampled)

    @property
    def samples(self) -> list[Transcript]:
        """The transcripts with answers that no other one extends; the last one has the last answer."""
        if self._ends and self.context.extends(self._ends[-1]):
            return [*self._ends[:-1], self.context]
        return list(self._ends)

    @property
    def has_only_own_answers(self) -> bool:
        """Whether engines have sampled all answers of `samples`."""
        own = set(map(id, self.sampled))
        return all(id(s) in own for sample in self.samples for s in sample.segments if s.sampled)

    @property
    def text(self) -> str:
        """The last answer, with its tags and without the token that ends it."""
        return self._resources.tokenizer.decode(self.context.answer)

    async def sample(self) -> str:
        """Returns the model's next answer. Raises EpisodeOver."""
        await self.answer(self.context)
        return await self._text_off_the_loop()

    def say(self, messages: str | Chat) -> None:
        """Adds messages after the answer, which are not trained; a string is one message of the user.

        If the chat template now renders the conversation so far differently, another sample begins (rollout.samples).

        Raises EpisodeOver if they would leave no token for an answer, ConfigError if the chat template refuses them.
        """
        if not self.context.answered:
            raise RuntimeError("say: there is no answer yet that it could follow")
        new = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if not isinstance(new, list | tuple):
            raise TypeError(f"say: takes a text or a list of messages, not {reprlib.repr(messages)}")
        conversation = [*self._messages, {"role": "assistant", "content": self.text}, *new]
        self.context = self.followed(self.context, self.next_prompt(self.context, conversation, len(self._messages)))
        self._messages = conversation

    async def score(self) -> Scored:
        """Returns what reward.function says of the last answer; 0 if it was truncated and reward.truncated counts that
        as wrong. Raises RewardFailed."""
        if self.context.truncated and not self._resources.scorer.scores_truncated:
            return Scored(0.0)
        if self._scored is None or self._scored[0] != self.answers:
            with self.busy():
                try:
                    self._scored = self.answers, await self._judge()
                except (ConfigError, RunError) as e:  # what ends the run
                    self.failure = e
                    raise
        if problem := self._scored[1].problem:
            raise RewardFailed(problem)
        return self._scored[1]

    async def _judge(self) -> Scored:
        text = await self._text_off_the_loop()
        return await self._resources.scorer.judge(self.prompt, text, self.context.truncated)

    async def _text_off_the_loop(self) -> str:
        return await asyncio.to_thread(self._resources.tokenizer.decode, self.context.answer)

    def openai(self) -> AbstractAsyncContextManager[Api]:
        """Serves the model to an agent: within `async with episode.openai() as api:` it is found at api.url, with
        api.key (workflows/endpoint.py)."""
        return self._resources.serve(self)

    def served(self, name: str) -> ServedModel:
        """Returns a model that the run serves beside the policy: "user", "judge" or a teacher. Raises ConfigError,
        which ends the run, if there is none of this name."""
        try:
            self._resources.served.check(name)
        except ConfigError as e:
            self.failure = e
            raise
        return ServedModel(self, name)

    @property
    def served_names(self) -> list[str]:
        """The names of the models that `served` has."""
        return self._resources.served.names()

    async def ask_served(
        self, name: str, messages: Chat, n: int = 1, tools: Any = None, most_tokens: int | None = None
    ) -> list[Said]:
        """Returns n answers of a served model, which is waited for while it is away. They are never trained.

        Raises ServedModelError if it has none; and Interrupted, or RunError if it is away for reward.away_s, which end
        the episode even if they are caught.
        """
        began, self._asked = now(), self._asked + 1
        seed = sampling_seed(self._spec.seed, self._spec.purpose, -self._asked)
        with self.busy():
            while True:
                if self._sampling.may_interrupt():
                    self.failure = self.failure or Interrupted()
                if self.failure:
                    raise self.failure
                try:
                    asked = {"n": n, "tools": tools, "most_tokens": most_tokens, "seed": seed}
                    return await self._resources.served.chat(name, messages, **asked)
                except ServiceAway as e:
                    if (away_s := now() - began) > self._resources.config.reward.away_s:
                        self.failure = RunError(f"served.{name}: away for {away_s:.0f} s (reward.away_s): {e}")
                        raise self.failure from None
                    await asyncio.sleep(_AWAY_PAUSE_S)
                except (OSError, ValueError) as e:
                    self.problem = f"served.{name}: {e}"
                    raise ServedModelError(self.problem) from None

    @property
    def longest_sequence(self) -> int:
        """Tokens that a prompt and all that follows it may have."""
        return self._resources.config.longest_sequence

    @property
    def longest_question(self) -> int:
        """Tokens that what is asked of the policy or of a served model may have at most."""
        served = self._resources.served
        return max([self.longest_sequence, *(served.check(name).max_length for name in served.names())])

    @property
    def agent_variables(self) -> list[str]:
        """The names in rollout.workflow_environment."""
        return self._resources.config.rollout.agent_variables

    @property
    def program(self) -> str:
        """rollout.workflow_program."""
        return self._resources.config.rollout.workflow_program

    def tokens_left(self, context: Transcript) -> int:
        """Returns the number of tokens that may follow `context`; 0 or less if it is full."""
        config = self._resources.config
        longest = config.longest_sequence - len(context.prompt)
        return min(self.prompt.response_tokens or config.rollout.max_new_tokens, longest) - context.length

    async def answer(self, context: Transcript, max_tokens: int | None = None) -> Transcript:
        """Samples another answer after `context` and returns the longer transcript, which is now the episode's.

        Raises EpisodeOver; and EngineError or Interrupted, which end the episode even if they are caught.
        """
        if self._sampling.may_interrupt():
            self.failure = self.failure or Interrupted()
        if self.failure:
            raise self.failure
        if self._turns_taken >= self.turns:
            raise EpisodeOver(f"rollout.turns allows {self.turns} turns", "turns_exceeded")
        left = self._some_tokens_left(context)
        turn, self._turns_taken = self._turns_taken, self._turns_taken + 1
        limit, forced = min(left, max_tokens or left), self.prompt.response_tokens
        request = GenerationRequest(
            tokens=[*context.prompt, *context.tokens.tolist()],
            max_tokens=limit,
            stop_tokens=[] if forced else self._sampling.stop_tokens,
            request_id=f"{self._spec.request_id}-{turn}",
            seed=self._seed(turn),
            routes_from=context.routed,
        )
        try:
            with self.busy():
                (completion,) = await generate(self._sampling, request)
        except EngineError as e:
            self.failure = e
            raise
        if completion.finish_reason == INTERRUPTED:
            self.failure = Interrupted()
            raise self.failure
        truncated = completion.finish_reason == "length" and limit == left and not forced
        self.context = context.with_answer(completion, truncated)
        self.sampled.append(self.context.segments[-1])
        self._ends = [end for end in self._ends if not self.context.extends(end)] + [self.context]
        return self.context

    def next_prompt(self, context: Transcript, conversation: Chat, answer: int, tools: Any = None) -> NextPrompt:
        """Returns what the model is asked next. May be called on any thread.

        conversation[answer] is the answer with which `context` ends. Raises ConfigError if the template refuses the
        conversation.
        """
        tokenizer, style = self._resources.tokenizer, self._resources.config.rollout.samples
        said = tokenizer.decode(context.answer)
        if style == "concat" or (style == "auto" and tokenizer.keeps(conversation, answer, said, tools)):
            try:
                tokens = tokenizer.continuation(conversation, answer, tools)
            except ConfigError:  # the template shows an answer twice, or not at all
                if style == "concat":
                    raise
            else:
                if style == "concat" or self._ends_as_shown(context, tokens):
                    return NextPrompt(tokens, continues=True)
        return NextPrompt(tokenizer.conversation(conversation, tools), continues=False)

    def _ends_as_shown(self, context: Transcript, following: list[int]) -> bool:
        """Whether the template does not end the last answer with another token than the model has."""
        ends = {context.answer[-1], *following[:1]} & set(self._sampling.stop_tokens)
        return len(ends) < 2

    def followed(self, context: Transcript, asked: NextPrompt) -> Transcript:
        """Returns the transcript that ends with what is asked: `context` with more tokens, or another one.

        Raises EpisodeOver if no token is left for an answer; the episode's last answer is truncated then.
        """
        if asked.continues:
            longer = context.with_observation(asked.tokens, self._sampling.stop_tokens)
        else:
            longer = self.new_transcript(asked.tokens)
        if self.tokens_left(longer) <= 0 and context is self.context and not self.prompt.response_tokens:
            self.context = replace(context, truncated=True)
        self._some_tokens_left(longer)
        return longer

    def new_transcript(self, prompt: list[int]) -> Transcript:
        """Returns a transcript that shares nothing with those before: a call of an agent may begin with any prompt."""
        return Transcript(prompt, self._spec.version)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Suspends the limit of rollout.workflow_timeout_s, for work that has a time limit of its own."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
            self._last_event = now()

    @property
    def idle_s(self) -> float:
        """Seconds since the episode last asked an engine or was busy otherwise; 0 while it is."""
        return 0.0 if self._busy else now() - self._last_event

    def _some_tokens_left(self, context: Transcript) -> int:
        if (left := self.tokens_left(context)) > 0:
            return left
        used = len(context.prompt) + context.length
        raise EpisodeOver(f"{used} tokens leave none for an answer (rollout.max_new_tokens)", "context_length_exceeded")

    def _seed(self, turn: int) -> int:
        """The first answer has the seed of a single turn's answer; later ones need random numbers of their own."""
        return self._spec.seed if turn == 0 else sampling_seed(self._spec.seed, self._spec.purpose, turn)


@dataclass(frozen=True)
class ServedModel:
    """A model that is served beside the policy, as an episode asks it."""

    _episode: Episode
    name: str

    async def chat(self, messages: Chat, tools: Any = None, most_tokens: int | None = None) -> str:
        """Returns the model's answer to a conversation, of `most_tokens` tokens at most. Raises what
        `Episode.ask_served` does."""
        [said] = await self._episode.ask_served(self.name, messages, tools=tools, most_tokens=most_tokens)
        return said.text
