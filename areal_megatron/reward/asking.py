"""Lets reward functions of the user, which are plain functions, ask the models that are served beside the policy."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from areal_megatron.config import ConfigError
from areal_megatron.data.formats import Chat
from areal_megatron.reward.no_score import ServiceAway

if TYPE_CHECKING:  # it takes a while to import
    from areal_megatron.reward.served import Said, ServedModels


class Asking:
    """What reward functions of this process ask served models with, through `ask`; one call of a function at a time."""

    def __init__(self, models: ServedModels, limit_s: float):
        """`limit_s`: how long a call of a reward function may take."""
        self._models, self._limit_s, self._end, self._failure = models, limit_s, math.inf, None

    def begin(self) -> None:
        """Begins a call of a function."""
        self._end, self._failure = time.monotonic() + self._limit_s, None

    def finish(self) -> None:
        """Raises the failure of the call's first question without an answer: what the function has made of it, if it
        caught it, says nothing."""
        if self._failure:
            raise self._failure

    def ask(self, name: str, messages: Chat, n: int, most_tokens: int | None) -> list[Said]:
        try:
            if (left_s := self._end - time.monotonic()) <= 0:
                raise TimeoutError(f"served.{name}: reward.timeout_s is over")
            return asyncio.run(self._models.chat(name, messages, n=n, most_tokens=most_tokens, limit_s=left_s))
        except (ConfigError, ServiceAway, OSError, ValueError) as e:
            self._failure = self._failure or e
            raise


_asking: list[Asking] = []
"""How this process asks, if it is a reward worker."""


def ask(name: str, messages: Chat, *, n: int = 1, most_tokens: int | None = None) -> list[Said]:
    """Returns n answers of a served model, e.g. of "judge", to a conversation; for reward functions and group
    functions. `most_tokens`: the most tokens of each.

    Raises ServedModelError for a conversation that is longer than the model takes. All else that it raises is no
    reason for a score, even if it is caught: the function is called again, and waits for a model that is away.

    Example:
        [said] = ask("judge", [{"role": "user", "content": "Is 2 + 3 = 5?"}])
        score = float(said.text.startswith("Yes"))
    """
    if not _asking:
        raise ConfigError("ask() is for reward functions; a workflow asks with episode.served(NAME).chat(messages)")
    return _asking[0].ask(name, messages, n, most_tokens)


def set_asking(asking: Asking) -> None:
    """Makes `ask` of this process ask with `asking`."""
    _asking[:] = [asking]
