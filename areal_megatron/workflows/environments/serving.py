"""Runs the episodes of `rollout.workflow=program` in threads, for environments in Python (workflows/program.py).

The files of this folder need the standard library and the package of their environment alone, so that a Python of its
own can run them: such packages want other versions of what the engine has.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_OVER = ("turns_exceeded", "context_length_exceeded")
"""Why the run's endpoint refuses a call: the episode has used up its turns or tokens."""


@dataclass(frozen=True)
class ServedEpisode:
    """An episode to be run: where its model is, and the row that it is about."""

    url: str
    """The model's address, for OpenAI's clients."""
    key: str
    """Their API key, which is refused once the episode has ended."""
    turns: int
    """The number of answers that the model may give."""
    row: dict[str, Any]
    """The columns of the row of data.train or data.eval."""


def require(benchmark: str, package: str, wanted: str, more: str = "") -> None:
    """Exits with one line unless the package is installed in this version; `more`: what is to be installed with it."""
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "nothing"
    if found != wanted:
        command = f"{sys.executable} -m pip install {package}=={wanted}{more}"
        sys.exit(f"error: {benchmark}: {sys.executable} has {found}: {command}")


def is_over(error: BaseException | None) -> bool:
    """Whether a client's error, or what it was raised from, says that the episode has used up its turns or tokens. This
    is the model's fault, and no failure."""
    while error is not None:
        if getattr(error, "code", None) in _OVER or any(code in str(error) for code in _OVER):
            return True
        error = error.__cause__ or error.__context__
    return False


def serve(run: Callable[[ServedEpisode], float | list[float] | None]) -> None:
    """Answers each episode on stdin with what `run` returns, or the problem that it raises, until stdin ends.

    `run` is called in a thread of the episode's own. What it prints goes to stderr. It is not told that nobody waits
    for its episode any more: the calls that it still makes are refused.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    writing = threading.Lock()

    def answer(number: int, episode: ServedEpisode) -> None:
        try:  # default: such as NumPy's numbers
            said = json.dumps({"episode": number, "reward": run(episode)}, allow_nan=False, default=float)
        except BaseException as e:  # the thread's last words, also of SystemExit
            problem = f"{type(e).__name__}: {e}"[:500].encode(errors="backslashreplace").decode()
            said = json.dumps({"episode": number, "problem": problem})
        with writing:
            print(said, file=answers, flush=True)

    for line in sys.stdin:
        message = json.loads(line)
        if "episode" in message:
            episode = ServedEpisode(message["url"], message["key"], message["turns"], message["row"])
            threading.Thread(target=answer, args=(message["episode"], episode), daemon=True).start()
    os._exit(0)  # threads may go on
