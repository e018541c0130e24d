"""Workflows: how a prompt becomes trajectories. `rollout.workflow` names one (docs/workflows.md).

`single_turn` samples a whole group with one request. Every other workflow is an async function of an Episode
(workflows/episode.py), which samples one trajectory and returns its score, or None to have the reward function score
the last answer. To add one to this folder, write a module with such a function `run`, and its name in WORKFLOWS.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from areal_megatron.config import Config, ConfigError, RolloutConfig
from areal_megatron.config.user_function import check_path, import_function

KEY = "rollout.workflow"
SINGLE_TURN = "single_turn"
WORKFLOWS = (SINGLE_TURN, "multi_turn", "tool_use")


@dataclass(frozen=True)
class Workflow:
    """A workflow that runs episodes."""

    run: Callable[..., Awaitable[float | None]]
    """Called with an Episode, whose class is not imported here: the launcher would import aiohttp with it."""
    turns: int
    """The number of answers that an episode may sample."""


def load_workflow(rollout: RolloutConfig) -> Workflow | None:
    """Returns the workflow that rollout.workflow names; None for `single_turn`. Raises ConfigError."""
    name = rollout.workflow
    if name == SINGLE_TURN:
        return None
    check_name(name)
    function = import_function(f"{__package__}.{name}:run" if name in WORKFLOWS else name, KEY)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"{KEY}: {name} is no `async def` function of an episode")
    try:
        inspect.signature(function).bind("episode")
    except TypeError as e:
        raise ConfigError(f"{KEY}: {name} cannot be called with (episode): {e}") from None
    return Workflow(function, rollout.turns)


def check_name(name: str) -> None:
    """Raises ConfigError for what is neither a workflow of this package nor an import path; imports nothing."""
    check_path(name, KEY)
    if name not in WORKFLOWS and not all(name.partition(":")):
        near = difflib.get_close_matches(name, WORKFLOWS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{KEY}: {name!r} is no workflow, expected {', '.join(WORKFLOWS)}, or package.module:function{hint}"
        )


def check_workflow(config: Config) -> None:
    """Raises ConfigError for a workflow that could not run; the launcher calls it before it starts anything."""
    if load_workflow(config.rollout) is None:
        return
    if config.rollout.workflow == "tool_use":
        from areal_megatron.reward.sandbox import check_isolation

        check_isolation(KEY)
    if config.rollout.workflow in WORKFLOWS:
        from areal_megatron.data.tokenizer import Tokenizer

        messages = [{"role": role, "content": "1"} for role in ("user", "assistant", "user")]
        try:
            tokenizer = Tokenizer(config.model.path)
            tokenizer.conversation(messages)
            if config.rollout.samples == "concat":
                tokenizer.continuation(messages, answer=1)
        except ConfigError as e:
            raise ConfigError(f"{KEY}: several turns need a template that takes them: {e}") from None
