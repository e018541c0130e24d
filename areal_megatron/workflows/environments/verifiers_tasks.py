"""Tasksets of Verifiers as environments: the policy is what their agents ask (docs/environments.md).

    python verifiers_tasks.py rows TASKSET        prints rows for data.train and data.eval
    python verifiers_tasks.py serve TASKSET       rollout.workflow_program

Needs verifiers 0.4 and uv, in a Python of their own. `--env JSON`, for both commands, is what Verifiers calls the
environment's config; by default its agent is a chat without tools in this machine's own processes.
"""

# it has a Python of its own
# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a file of a folder, not of a package: the Python that runs it need not have this one
    from serving import ServedEpisode, is_over, require, serve
else:
    from areal_megatron.workflows.environments.serving import ServedEpisode, is_over, require, serve

VERSION = "0.4.0"
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
"""With uv, which runs its agents."""
CHAT = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
"""Verifiers' own default is a shell in a sandbox of its makers' cloud."""


def load(taskset: str, config: dict[str, Any]) -> Any:
    """Returns an environment. Exits with one line if the package is missing or has another version, or if there is no
    such taskset."""
    require("Verifiers", "verifiers", VERSION, " uv")
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    try:
        return load_environment(resolve_env_config({"taskset": {"id": taskset}, **CHAT, **config}))
    except (ImportError, ValueError) as e:
        sys.exit(f"error: taskset {taskset!r}: {' '.join(str(e).split())}")


class Tasks:
    """Runs episodes of an environment, in an event loop of its own."""

    def __init__(self, environment: Any):
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig

        self._environment, self._context, self._client = environment, ModelContext, EvalClientConfig
        self._tasks = list(environment.taskset.load())
        self._loop, self._numbers = asyncio.new_event_loop(), itertools.count()
        ready: Future[None] = Future()
        threading.Thread(target=self._live, args=(ready,), daemon=True).start()
        ready.result()

    def run(self, episode: ServedEpisode) -> float:
        """Returns the reward of the agent that finished last; 0 also for one that has used up its turns or tokens."""
        return asyncio.run_coroutine_threadsafe(self._run(episode), self._loop).result()

    def _live(self, ready: Future[None]) -> None:
        async def serving() -> None:
            async with self._environment.serving():
                ready.set_result(None)
                await asyncio.Event().wait()

        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(serving())
        except Exception as e:
            if ready.done():
                raise
            ready.set_exception(e)

    async def _run(self, episode: ServedEpisode) -> float:
        variable = f"AREAL_KEY_{next(self._numbers)}"
        os.environ[variable] = episode.key
        try:
            client = self._client(base_url=episode.url, api_key_var=variable)
            context = self._context(model="policy", client=client)
            found = await self._environment.run_episode(self._tasks[episode.row["task"]], context)
        finally:
            del os.environ[variable]
        if found.ok:
            return found.traces[-1].reward
        errors = [*found.errors, *(error for trace in found.traces for error in trace.errors)]
        told = "; ".join(f"{error.type}: {error.message}" for error in errors) or "it failed"
        if is_over(RuntimeError(told)):
            return 0.0
        raise RuntimeError(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=["rows", "serve"])
    parser.add_argument("taskset", metavar="TASKSET", help="the name of an installed taskset, or of a module")
    parser.add_argument("--env", type=json.loads, default={}, metavar="JSON", help="default: a chat without tools")
    options = parser.parse_args()
    environment = load(options.taskset, options.env)
    if options.command == "serve":
        serve(Tasks(environment).run)
        return
    for number in range(len(list(environment.taskset.load()))):
        row = {"prompt": f"{options.taskset}, task {number}", "answer": str(number), "task": number}
        print(json.dumps(row))


if __name__ == "__main__":
    main()
