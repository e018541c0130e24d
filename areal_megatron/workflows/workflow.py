"""Workflows: how a prompt becomes trajectories. `rollout.workflow` names one (docs/workflows.md).

`single_turn` samples a whole group with one request. Every other workflow is an async function of an Episode
(workflows/episode.py), which samples one trajectory and returns its score, or None to have the reward function score
the last answer. To add one to this folder, write a module with such a function `run`, and its name in WORKFLOWS.
"""

from __future__ import annotations

import difflib
import inspect
import shlex
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from areal_megatron.config import Config, ConfigError, RolloutConfig
from areal_megatron.config.user_function import check_path, import_function
from areal_megatron.process.errors import printable

KEY = "rollout.workflow"
SINGLE_TURN = "single_turn"
PROGRAM = "program"
WORKFLOWS = (SINGLE_TURN, "multi_turn", "tool_use", PROGRAM)


_PROGRAM_START_S = 120.0


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


def check_name(name: str, key: str = KEY) -> None:
    """Raises ConfigError for what is neither a workflow of this package nor an import path; imports nothing. `key`:
    where it is named."""
    check_path(name, key)
    if name not in WORKFLOWS and not all(name.partition(":")):
        near = difflib.get_close_matches(name, WORKFLOWS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{key}: {name!r} is no workflow, expected {', '.join(WORKFLOWS)}, or package.module:function{hint}"
        )


def check_workflow(config: Config) -> None:
    """Raises ConfigError for a workflow that could not run; the launcher calls it before it starts anything."""
    if load_workflow(config.rollout) is None:
        return
    if config.rollout.workflow == "tool_use":
        from areal_megatron.reward.sandbox import check_isolation

        check_isolation(KEY)
    if config.rollout.workflow == PROGRAM:
        _check_program(config.rollout)
    elif config.rollout.workflow in WORKFLOWS:
        from areal_megatron.data.tokenizer import Tokenizer

        messages = [{"role": role, "content": "1"} for role in ("user", "assistant", "user")]
        try:
            tokenizer = Tokenizer(config.model.path)
            tokenizer.conversation(messages)
            if config.rollout.samples == "concat":
                tokenizer.continuation(messages, answer=1)
        except ConfigError as e:
            raise ConfigError(f"{KEY}: several turns need a template that takes them: {e}") from None


def is_tried(rollout: RolloutConfig) -> bool:
    """Whether the workflow runs code of the user, which the launcher tries."""
    return rollout.workflow == PROGRAM or rollout.workflow not in WORKFLOWS


def _check_program(rollout: RolloutConfig) -> None:
    """Raises ConfigError unless the program starts, and ends well when its stdin ends."""
    key = "rollout.workflow_program"
    try:
        if not (command := shlex.split(rollout.workflow_program)):
            raise ValueError("it is blank")
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROGRAM_START_S, errors="replace"
        )
    except (OSError, ValueError) as e:
        raise ConfigError(f"{key}: cannot be started: {e}") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{key}: has not ended {_PROGRAM_START_S:g} s after its stdin had ended") from None
    if done.returncode:
        said = printable((done.stderr.strip().splitlines() or ["it says nothing"])[-1], 500)
        raise ConfigError(f"{key}: ends with code {done.returncode} before it has read anything: {said}")
