"""The program workflow: episodes run in a process of their own, by another Python or in another language.

The process is `rollout.workflow_program`. It reads lines of JSON from stdin and writes lines of JSON to stdout; what it
prints otherwise has to go to stderr, into the controller's log. At the end of stdin it ends.

    it reads    {"episode": 7, "url": "http://127.0.0.1:…/v1", "key": "…", "turns": 30, "row": {…}}
                {"cancel": 7}
                (a row's bytes are base64 there, and NaN is null)
    it writes   {"episode": 7, "reward": 1.0}, where a list has one for each answer, and null leaves it to
                reward.function; or {"episode": 7, "problem": "why the episode failed"}

Between the two its agent calls the model at `url`, with `key`, as any agent does (workflows/endpoint.py).
areal_megatron/workflows/environments/serving.py does this for environments in Python.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from areal_megatron.process.errors import printable
from areal_megatron.run.json_input import parse_json
from areal_megatron.workflows.episode import Api, Episode

log = logging.getLogger(__name__)
_LINE_BYTES = 1 << 20
"""A longer line ends the program."""
_LOOK_S = 0.2
"""How often it is looked whether the program has ended."""


class ProgramError(RuntimeError):
    """The program ended, or says that the episode failed."""

    def __init__(self, message: str, is_mistake: bool = False):
        """`is_mistake`: it has written what is no answer, or ended as if there were no more episodes."""
        super().__init__(message)
        self.is_mistake = is_mistake


class Program:
    """A process that runs episodes, many at a time. It is started by the first one, and again after it has ended.

    Example:
        program = Program(["node", "agent.js"])
        reward = await program.run(episode)
    """

    def __init__(self, command: Sequence[str]):
        self._command, self._numbers = list(command), itertools.count()
        self._running: dict[int, asyncio.Future] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()

    async def run(self, episode: Episode) -> Any:
        """Returns the program's reward. Raises ProgramError, and OSError if the program cannot be started."""
        async with episode.openai() as api:
            async with self._starting:
                process = self._process or await self._start(api)
            number = next(self._numbers)
            ended = self._running[number] = asyncio.get_running_loop().create_future()
            access = {"url": api.url, "key": api.key, "turns": episode.turns}
            try:
                _send(process, {"episode": number, **access, "row": episode.prompt.row})
                return await ended
            except asyncio.CancelledError:
                _send(process, {"cancel": number})
                raise
            finally:
                del self._running[number]

    async def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            await self._reading

    async def _start(self, api: Api) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, env=api.environment_without_keys, limit=_LINE_BYTES
        )
        self._reading = asyncio.ensure_future(self._read(process))
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        problem = ""
        try:
            while line := await _line_of(process, process.stdout):
                self._take(parse_json(line, exact=True))
        except ValueError as e:  # also a line that is too long
            problem = f", having written what is no answer: {printable(str(e), 300)}"
            with suppress(ProcessLookupError):
                process.kill()
        self._process, running = None, list(self._running.values())  # the next episode starts another
        process.stdin.close()
        while (code := process.returncode) is None:  # wait() also waits for others that hold its output open
            await asyncio.sleep(_LOOK_S)
        error = ProgramError(f"rollout.workflow_program ended with code {code}{problem}", problem != "" or code == 0)
        for ended in running:
            if not ended.done():
                ended.set_exception(error)

    def _take(self, message: Any) -> None:
        """Raises ValueError for what is no message."""
        number = message.get("episode") if isinstance(message, dict) else None
        if not isinstance(number, int) or not {"reward", "problem"} & message.keys():
            raise ValueError(json.dumps(message)[:200])
        ended = self._running.get(number)
        if ended is None or ended.done():  # nobody waits for it any more
            return
        if "problem" in message:
            ended.set_exception(ProgramError(str(message["problem"])))
        else:
            ended.set_result(message["reward"])


def _send(process: asyncio.subprocess.Process, message: dict[str, Any]) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):  # it has ended, as the end of its output says
        process.stdin.write(msgspec.json.encode(message) + b"\n")


async def _line_of(process: asyncio.subprocess.Process, output: asyncio.StreamReader) -> bytes:
    """Returns the next line, nothing at the end of the output or the process: its children may hold the output open."""
    while True:
        had_ended = process.returncode is not None
        try:
            return await asyncio.wait_for(output.readline(), _LOOK_S)
        except TimeoutError:
            if had_ended:  # a look ago, so that its last lines have been read
                return b""


_programs: dict[str, Program] = {}


async def run(episode: Episode) -> Any:
    """Returns the reward of rollout.workflow_program, one process of which serves all episodes of this one."""
    command = episode.program
    if command not in _programs:
        _programs[command] = Program(shlex.split(command))
    return await _programs[command].run(episode)
