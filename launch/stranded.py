"""A Slurm job that runs on without its launcher.

With --no-kill Slurm takes a lost node out of the job and lets the others go on, also where that node was the
launcher's: nothing would run on the job's nodes until its time is over. The supervisors of the others queue it again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress

_LOOK_S = 5.0
_LONGEST_S = 1800.0
"""Slurm finds a lost node after its SlurmdTimeout, usually 300 s."""
_CLIENT_TIMEOUT_S = 60.0


def queue_again(longest_s: float = _LONGEST_S, look_s: float = _LOOK_S) -> None:
    """Returns when this job does not run any more, perhaps because it is queued again: its batch host was taken out."""
    job, deadline = os.environ["SLURM_JOB_ID"], time.monotonic() + longest_s
    while time.monotonic() < deadline:
        state, _, rest = _client("squeue", "--noheader", f"--jobs={job}", "--format=%T %B %N").partition(" ")
        host, _, nodes = rest.partition(" ")
        if state and state != "RUNNING":
            return
        if nodes and host not in _client("scontrol", "show", "hostnames", nodes).split():
            with suppress(OSError):  # srun, which would pass it on, was on that node
                print(
                    f"node {host}, which the launcher was on, is lost: the job is queued again",
                    file=sys.stderr,
                    flush=True,
                )
            _client("scontrol", "requeue", job)  # until it is seen not to run: a busy slurmctld refuses
        time.sleep(look_s)


def _client(*command: str) -> str:
    """What it prints; nothing where it fails, as while the job's end is being written down."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CLIENT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
