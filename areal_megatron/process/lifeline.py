"""Ends a process whose launcher is gone, should nobody else do that.

A launcher, or the supervisor of a node, holds one end of a pipe, and each process that it starts inherits the other: it
sees the end of its launcher, whatever that was. The launcher's guardian (supervision/guardian.py) then ends them all,
with their temporary files. Only if the guardian is gone too does each process end itself, with its process group.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import threading
import time

DESCRIPTOR = "AREAL_LIFELINE"
"""Environment variable with the number of the descriptor that a process has inherited."""
GUARDIAN_S = 15.0
"""How long the guardian has: ending processes takes it ten seconds."""


def hold(guardian_s: float = GUARDIAN_S) -> None:
    """Looks out for the end of the launcher from now on, on a thread. Does nothing if no launcher has started this
    process, or if a container has not passed the descriptor on."""
    try:
        descriptor = int(os.environ.get(DESCRIPTOR, ""))
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except (ValueError, OSError):
        return
    if is_pipe:
        threading.Thread(target=_watch, args=(descriptor, guardian_s), name="lifeline", daemon=True).start()


def _watch(descriptor: int, guardian_s: float) -> None:
    poller = select.poll()
    poller.register(descriptor, 0)  # nothing is ever written: only its end is of interest
    poller.poll()
    time.sleep(guardian_s)
    os.killpg(0, signal.SIGKILL)
