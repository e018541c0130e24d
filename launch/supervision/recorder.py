"""Writes processes.json: which processes a launcher has started, and how they and the run are (observe/records.py)."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from areal_megatron.launch.supervision.hosts import Remote
from areal_megatron.launch.supervision.processes import Child
from areal_megatron.observe.records import RECORD_S, LaunchRecord, ProcessRecord
from areal_megatron.planning.pools import Placement
from areal_megatron.process.files import write_atomically
from areal_megatron.run.folder import Away, RunFolder


class Recorder:
    """Keeps processes.json up to date, as well as the disk allows. Several threads may write."""

    def __init__(self, run: RunFolder, placement: Placement, again: str = ""):
        """`again`: the command that started the run, if it can be given again as it stands."""
        self._run, self._placement, self._again = run, placement, again
        self._written, self._codes, self._commit = 0.0, {}, commit()
        self._lock, self._over, self._failed = threading.Lock(), False, False

    def write(self, processes: Mapping[str, Child | Remote], restarts_left: int, outcome: str = "") -> None:
        """Writes a record if an exit code changed, the last record is RECORD_S old or the run ended; nothing after its
        end. Call it often.

        Raises Replaced."""
        with self._lock:
            codes = {name: process.exit_code for name, process in processes.items()}
            is_new = outcome or codes != self._codes or time.monotonic() - self._written >= RECORD_S
            if self._over or not is_new:
                return
            self._codes, self._written, self._over = codes, time.monotonic(), bool(outcome)
            records = [
                ProcessRecord(p.name, p.node, [slot.id for slot in p.slots], codes.get(p.name))
                for process in self._placement.processes
                for p in process.parts
            ]
            node, now, idle = socket.gethostname(), time.time(), self._placement.idle
            self._put(LaunchRecord(node, now, restarts_left, outcome, records, self._commit, self._again, idle))

    def _put(self, record: LaunchRecord) -> None:
        try:
            self._run.look()
            write_atomically(self._run.processes, msgspec.json.encode(record))
            self._failed = False
        except Away:
            return  # the lease says so
        except OSError as e:
            if not self._failed:
                print(f"warning: {self._run.processes} cannot be written: {e.strerror}", file=sys.stderr, flush=True)
            self._failed = True


def commit() -> str:
    """Returns the commit of the checkout that this code is from, shortened; "" if it is from none, or git fails."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
