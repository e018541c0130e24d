"""Asks the models that are served beside the policy (engine/served.py), from workflows, rewards and the controller.

They are sent tokens, which this project's own tokenizer makes of the messages. What a message says is text: an answer
shown to a judge cannot end its message and speak as somebody else.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from areal_megatron.config import ConfigError, ServedModelConfig
from areal_megatron.data.formats import Chat
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.reward import remote
from areal_megatron.reward.no_score import ServiceAway
from areal_megatron.run.folder import RunError, RunFolder
from areal_megatron.run.process_names import served_name

Answered = TypeVar("Answered")
_REPLY_BYTES = 64 << 20


class ServedModelError(Exception):
    """A served model has failed to answer, for example a conversation longer than it takes. A model that is away is
    waited for instead."""


@dataclass(frozen=True)
class Said:
    """An answer of a served model."""

    text: str
    ended: bool
    """Whether it is complete; else it was cut at its limit of tokens."""
    before: int
    """Tokens that it was asked with."""
    sampled: int
    """Tokens of the answer."""


class ServedModels:
    """The models that a run serves beside its policy, by name. May be asked by many tasks at once.

    Example:
        models = ServedModels(config.served_models, RunFolder(config.run_dir))
        [said] = await models.chat("judge", [{"role": "user", "content": "Is 2 + 3 = 5?"}])
        print(said.text)
    """

    def __init__(self, models: Mapping[str, ServedModelConfig], run: RunFolder | None = None):
        """`models`: Config.served_models, none without a `run`."""
        self._models, self._run = models, run
        self._tokenizers: dict[str, Tokenizer] = {}
        self._loading = threading.Lock()

    def names(self) -> list[str]:
        """Returns the names of the models that answer."""
        return [name for name in self._models if name != "reward"]

    def check(self, name: str) -> ServedModelConfig:
        """Returns what the config says of a model. Raises ConfigError if the run serves none of this name that
        answers."""
        if name not in self.names():
            served = ", ".join(self.names()) or "none is"
            raise ConfigError(f"no model {name!r} is served beside the policy, but {served}: see served.{name}.path")
        return self._models[name]

    async def chat(
        self,
        name: str,
        messages: Chat,
        *,
        n: int = 1,
        tools: Sequence[Any] | None = None,
        most_tokens: int | None = None,
        seed: int | None = None,
        limit_s: float = math.inf,
    ) -> list[Said]:
        """Returns n answers to a conversation, the k-th sampled with seed + k; `most_tokens`: the most tokens of each;
        `limit_s`: how long to wait for them at most, as also served.NAME.timeout_s says.

        Raises ConfigError as `check` does, ServedModelError for a conversation that is too long or refused by the chat
        template, and what `ask_engines` raises.
        """
        model = self.check(name)
        try:
            tokens, tokenizer = await asyncio.to_thread(self._tokens, name, messages, tools)
        except ConfigError as e:
            raise ServedModelError(f"served.{name}: {e}") from None
        left = model.max_length - len(tokens)
        if left < 1:
            raise ServedModelError(
                f"served.{name}: {len(tokens)} tokens leave none for an answer (served.{name}.max_length="
                f"{model.max_length})"
            )
        question = {
            "model": name,
            "prompt": tokens,
            "n": n,
            "max_tokens": min(left, model.max_new_tokens, most_tokens or left),
            "temperature": model.temperature,
            "stop_token_ids": tokenizer.stop_tokens,
            "return_token_ids": True,
        }
        question |= {} if seed is None else {"seed": seed}

        def read(reply: Any) -> list[Said]:
            choices = sorted(reply["choices"], key=lambda choice: choice["index"])
            if len(choices) != n:
                raise ValueError
            return [_said(choice, tokenizer, len(tokens)) for choice in choices]

        assert self._run is not None
        asked = self._run, name, model, "/v1/completions", question
        return await ask_engines(*asked, min(model.timeout_s, limit_s), read, f"{n} answers")

    def _tokens(self, name: str, messages: Chat, tools: Sequence[Any] | None) -> tuple[list[int], Tokenizer]:
        with self._loading:
            if name not in self._tokenizers:
                self._tokenizers[name] = Tokenizer(self._models[name].path)
        tokenizer = self._tokenizers[name]
        return tokenizer.conversation(messages, tools), tokenizer


def _said(choice: Any, tokenizer: Tokenizer, before: int) -> Said:
    tokens = [int(token) for token in choice["token_ids"]]
    return Said(tokenizer.decode(tokens), choice["finish_reason"] == "stop", before, len(tokens))


WRONG = "I do not know."
"""What every served model says before a run, and what functions are tried with as a wrong answer."""


class StandIns(ServedModels):
    """In the place of served models, before a run."""

    def __init__(self, models: Mapping[str, ServedModelConfig]):
        super().__init__(models)

    async def chat(self, name: str, messages: Chat, *, n: int = 1, **_) -> list[Said]:
        self.check(name)
        return [Said(WRONG, True, 1, 1)] * n


def engines_of(name: str, model: ServedModelConfig, run: RunFolder) -> list[str]:
    """Returns the names of the engines that serve a model, in a drawn order: its own, or the policy's in this network,
    as many as are there. Raises RunError if none is."""
    if model.engines:
        found = [served_name(name, index) for index in range(model.engines)]
    else:
        found = [engine for engine in run.announced_engines() if run.endpoint(engine).startswith("http:")]
    if not found:
        raise RunError(f"served.{name}: no engine of the policy, which is to serve it, is there yet")
    return random.sample(found, len(found))


async def ask_engines(
    run: RunFolder,
    name: str,
    model: ServedModelConfig,
    route: str,
    question: dict[str, Any],
    limit_s: float,
    read: Callable[[Any], Answered],
    expected: str,
) -> Answered:
    """Returns what an engine of a served model answers to a question, as `remote.ask` does: the engines are asked in
    a drawn order, until one is there. Raises ServiceAway if all are away, and else as `remote.ask` does."""
    problem, end = "", time.monotonic() + limit_s
    for engine in engines_of(name, model, run):
        try:
            url, left_s = f"{run.endpoint(engine)}{route}", end - time.monotonic()
            return await remote.ask(url, question, left_s, read, expected, run.token, _REPLY_BYTES)
        except (ServiceAway, RunError) as e:
            problem = f"{engine}: {e}"
    raise ServiceAway(problem)
