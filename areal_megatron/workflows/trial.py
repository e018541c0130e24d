"""Runs two episodes of the user's workflow before a run, so that its mistakes end it before anything has started.

The first row of the data is asked, in a process of its own (trial_process.py). A scripted engine takes the place of the
model: it gives one episode the right answer of the row, and the other none at all, the case that workflows forget most
often. The reward is 1 for the right answer and else 0.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from areal_megatron.config import Config, ConfigError
from areal_megatron.data.prompts import Prompt
from areal_megatron.process.errors import printable
from areal_megatron.workflows.workflow import KEY, is_tried

PATIENCE_S = 20.0
"""What takes longer than this is taken to be slow and no mistake."""
_START_S = 30.0
"""Time for the process to begin, and to end."""


def try_workflows(config: Config, prompts: Sequence[Prompt], say: Callable[[str], None]) -> None:
    """Runs the workflows of `config` that are code of the user for the first of `prompts`.

    `say` is told, in a line, of what need not be a mistake, and of an episode that does not end within PATIENCE_S.
    Raises ConfigError if a workflow raises what mistakes raise (TypeError, AttributeError, NameError, ImportError) or
    returns something else than it may, and if a program writes something else or ends by itself without an error.
    """
    for number, own in enumerate(config.by_environment()):
        first = next((prompt for prompt in prompts if prompt.environment == number), None)
        if first and is_tried(own.rollout):
            _try(own, first, say)


class TrialAsked(msgspec.Struct):
    """What the process is to try."""

    config: Config
    prompt: Prompt
    patience_s: float


class TrialFound(msgspec.Struct):
    """What is wrong with the workflow; nothing if `problem` is empty."""

    problem: str = ""
    bug: str = ""
    """Where it is a mistake of its author, `file:line`; else empty."""


def _encoded(asked: TrialAsked) -> tuple[bytes, bool]:
    """Returns what the process is sent, and whether the row arrives as it is: JSON has neither times nor NaN."""
    try:
        encoded = msgspec.json.encode(asked)
    except (TypeError, OverflowError):
        return msgspec.json.encode(msgspec.structs.replace(asked, prompt=replace(asked.prompt, row=None))), False
    return encoded, repr(msgspec.json.decode(encoded)["prompt"]["row"]) == repr(asked.prompt.row)


def _try(config: Config, prompt: Prompt, say: Callable[[str], None]) -> None:
    asked = TrialAsked(config, prompt, min(config.rollout.workflow_timeout_s, PATIENCE_S))
    encoded, is_whole = _encoded(asked)
    command = [sys.executable, "-m", "areal_megatron.workflows.trial_process"]
    is_mistake = False
    try:
        done = subprocess.run(
            command,
            input=encoded,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=2 * PATIENCE_S + _START_S,
        )
    except subprocess.TimeoutExpired:
        found = TrialFound("it held up its process")
    else:
        is_mistake = not done.stdout
        ended = f"it ended its process with code {done.returncode}, as it would end those of the run"
        found = TrialFound(ended) if is_mistake else msgspec.json.decode(done.stdout, type=TrialFound)
    if found.problem:
        where = f" ({found.bug})" if found.bug else ""
        problem = printable(f"{config.rollout.workflow} fails for {prompt.where}: {found.problem}{where}", 1000)
        if is_mistake or (found.bug and is_whole):
            raise ConfigError(f"{KEY}: {problem}; it was tried with answers of no model, which may say anything")
        say(f"warning: {KEY}: {problem}; it was tried with answers of no model, such episodes are not trained")
