"""Processes that a launcher starts beside its run, which show its metrics in trackers (observe/mirror.py)."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress

from areal_megatron.observe.mirror import END_S
from areal_megatron.run.folder import RunFolder

_LONGER_S = 3.0


class Mirrors:
    """A process for each tracker, from the start of the run to its end. What becomes of them never affects the run.

    They follow metrics.jsonl until their stdin ends, and so do they when the launcher is killed.
    """

    def __init__(self, run: RunFolder, trackers: Collection[str], lease: int):
        self._run = run
        self._processes: dict[str, subprocess.Popen] = {}
        self._failed: set[str] = set()
        for name in trackers:
            command = [sys.executable, "-m", "areal_megatron.observe.mirror", str(run.folder), name, "--follow"]
            try:
                with run.log(f"tracker-{name}").open("ab") as log:
                    self._processes[name] = subprocess.Popen(
                        [*command, "--lease", str(lease)],
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
            except OSError as e:
                self._warn(name, f"cannot be started: {e.strerror}")

    def look(self) -> None:
        """Says once of each tracker that has failed that it has. Call it often."""
        for name, process in self._processes.items():
            if name not in self._failed and process.poll() is not None:
                self._warn(
                    name, f"has ended with exit code {process.returncode}, see {self._run.log(f'tracker-{name}')}"
                )

    def close(self, wait: bool) -> None:
        """Lets the trackers take the last figures and ends what hangs. `wait`: for as long as a mirror does, END_S;
        otherwise only shortly."""
        deadline = time.monotonic() + (END_S if wait else 0) + _LONGER_S
        for process in self._processes.values():
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
        for name, process in self._processes.items():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # also what the tracker has started
                process.wait()
            if process.returncode and name not in self._failed:
                self._warn(name, f"has not taken everything, see {self._run.log(f'tracker-{name}')}")

    def _warn(self, name: str, what: str) -> None:
        self._failed.add(name)
        print(
            f"warning: tracker {name} {what}; the run goes on, and what is missing comes with: "
            f"areal mirror {shlex.quote(str(self._run.folder))} {name}",
            file=sys.stderr,
            flush=True,
        )
