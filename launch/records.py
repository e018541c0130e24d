"""processes.json in the run folder: which processes a launcher has started, and how they and the run are."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

import msgspec

from areal_megatron.files import write_atomically
from areal_megatron.run import Run
from launch.pools import Placement
from launch.processes import Log

RECORD_S = 5.0
"""Time between two records of a run in which nothing happens."""
GONE_S = 30.0
"""Age of a record from which the launcher is taken for dead: clocks of nodes differ, and shared folders lag."""


class ProcessRecord(msgspec.Struct):
    name: str
    node: str
    slots: list[int]
    code: int | None
    """Exit code; None while the process runs."""


class LaunchRecord(msgspec.Struct):
    launcher: str
    """The node that the launcher runs on."""
    time: float
    """When the record was written, in seconds since the epoch."""
    restarts_left: int
    outcome: str
    """Empty while the run lasts; then how it ended: done, failed, lost, stopped or interrupted."""
    processes: list[ProcessRecord]


class Recorder:
    """Keeps processes.json up to date."""

    def __init__(self, run: Run, placement: Placement):
        self._run, self._placement = run, placement
        self._written, self._codes = 0.0, {}

    def write(self, processes: Mapping[str, Log], restarts_left: int, outcome: str = "") -> None:
        """Writes a record if an exit code changed, the last record is RECORD_S old or the run ended. Call it often.

        Raises Replaced."""
        codes = {name: process.exit_code for name, process in processes.items()}
        if not outcome and codes == self._codes and time.monotonic() - self._written < RECORD_S:
            return
        self._run.check_current()
        self._codes, self._written = codes, time.monotonic()
        records = [
            ProcessRecord(p.name, p.node, [slot.index for slot in p.slots], codes.get(p.name))
            for process in self._placement.processes
            for p in process.parts
        ]
        record = LaunchRecord(socket.gethostname(), time.time(), restarts_left, outcome, records)
        write_atomically(self._run.processes, msgspec.json.encode(record).decode())


def read_record(run: Run) -> LaunchRecord | None:
    """Returns the last record; None before the first."""
    try:
        return msgspec.json.decode(run.processes.read_bytes(), type=LaunchRecord)
    except FileNotFoundError:
        return None
