"""The tool-use workflow: a block of Python in an answer is run, and what it prints is the next message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from areal_megatron.reward import sandbox
from areal_megatron.reward.code import last_program
from areal_megatron.reward.sandbox import Limits, ProgramResult
from areal_megatron.workflows.episode import Episode

LIMITS = Limits(wall_s=5.0)
_CHARACTERS = 2000
"""How much of a program's output the model gets to see; of an error, the end, a quarter as long."""


async def run(episode: Episode, program_of: Callable[[str], str | None] = last_program) -> None:
    """Samples until an answer holds no program, or no turn is left; the reward function scores the last answer.

    Raises SandboxError if the machine fails to isolate a program.
    """
    for turn in range(1, episode.turns + 1):
        program = await asyncio.to_thread(program_of, await episode.sample())
        if program is None or turn == episode.turns:
            break
        with episode.busy():
            outcome = await run_program(program)
        episode.say(f"\n```output\n{described(outcome)}\n```\n")


async def run_program(program: str) -> ProgramResult:
    """Runs a program in the sandbox, off the event loop; one at a time in each worker process."""
    return await asyncio.get_running_loop().run_in_executor(_threads(), sandbox.run, program, "", LIMITS)


def described(outcome: ProgramResult) -> str:
    """Returns what the program printed, and how it ended if it failed."""
    parts = [outcome.stdout.rstrip("\n")[:_CHARACTERS]]
    if outcome.ended in ("wall_s", "cpu_s"):
        parts.append(f"ended after {LIMITS.wall_s:g} s")
    elif not outcome.good:
        parts.append(outcome.stderr.strip()[-_CHARACTERS // 4 :] or f"ended by {outcome.ended}")
    return "\n".join(part for part in parts if part)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="tool")
