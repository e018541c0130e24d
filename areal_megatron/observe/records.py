"""processes.json in the run folder: which processes a launcher has started, and how they and the run are."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from areal_megatron.config import Config, ConfigError
from areal_megatron.config.config_file import no_run
from areal_megatron.process.files import read_replaced
from areal_megatron.process.silence import AwakeClock
from areal_megatron.run.folder import RunFolder
from areal_megatron.run.json_input import read_record as read_json_record

RECORD_S = 5.0
"""Time between two records of a run in which nothing happens."""
GONE_S = 30.0
"""Age of a record from which the launcher may be dead, if its node's clock shows the same time as this one's."""
_WATCH_S = 3 * RECORD_S
_LOOK_S = 0.2


class ProcessRecord(msgspec.Struct):
    name: str
    node: str
    slots: list[int | str]
    code: int | None
    """Exit code; None while the process runs."""


class LaunchRecord(msgspec.Struct):
    launcher: str
    """The node that the launcher runs on."""
    time: float
    """When the record was written, in seconds since the epoch."""
    restarts_left: int
    outcome: str
    """Empty while the run lasts; then how it ended: done, failed, refused, lost, replaced, stopped or
    interrupted."""
    processes: list[ProcessRecord]
    commit: str = ""
    """The commit of the checkout that the launcher runs from; empty if it is from none."""
    again: str = ""
    """The command that starts the run once more; empty if that is not known."""
    idle: int | None = None
    """GPUs or cores that no process has; None if that is not known."""


class Pulse:
    """Whether a run lasts and its launcher lives: as long as its records change, by this machine's clock alone, as
    other clocks may differ."""

    def __init__(self, run: RunFolder, silence_s: float):
        self._run, self._silence_s = run, silence_s
        self._clock, self._record = AwakeClock(silence_s), None
        self._changed = self._clock.now()

    def state(self) -> str:
        """Returns how the run ended, or `lost` if there has been no new record for silence_s, or else `running`.

        Call it often.
        """
        record, now = read_record(self._run), self._clock.now()
        if record is not None and record != self._record:
            self._record, self._changed = record, now
        if self._record is not None and self._record.outcome:
            return self._record.outcome
        return "running" if now - self._changed < self._silence_s else "lost"


def has_room(record: LaunchRecord | None, config: Config) -> bool:
    """Returns whether the run might have another engine. One on cores needs cores that are idle; GPUs may be had."""
    idle = record.idle if record else None
    return idle is None or not config.machine.is_cpu or idle >= config.rollout.tp


def read_record(run: RunFolder) -> LaunchRecord | None:
    """Returns the last record; None before the first, and if none can be read."""
    return read_replaced(run.processes, lambda content: read_json_record(content, LaunchRecord, run.processes))


def last_record(run: RunFolder, named: Path) -> LaunchRecord:
    """Returns the last record. Raises ConfigError if there is none that can be read; `named`: the folder as its user
    names it."""
    if (record := read_record(run)) is not None:
        return record
    try:
        is_there = run.processes.exists()
    except OSError as e:
        raise ConfigError(f"{run.processes} cannot be read: {e.strerror}") from None
    if is_there:
        raise ConfigError(
            f"{run.processes} is of another release or damaged: a launcher that lives writes another within "
            f"{RECORD_S:.0f} s, and one that resumes the run does"
        )
    if not run.config.exists():
        raise no_run(named)
    raise ConfigError(f"{named} has not been started by a launcher; give a folder such as runs/tiny")


def state_of(run: RunFolder, record: LaunchRecord) -> str:
    """Returns how the run ended, or else `running`, or `lost` if its launcher has fallen silent.

    `record`: the last one. If it is not of this minute by this machine's clock, waits _WATCH_S for another.
    """
    age = time.time() - record.time
    if record.outcome or abs(age) < GONE_S:
        return record.outcome or "running"
    print(f"the last record is {age:.0f} s old: waiting {_WATCH_S:.0f} s for another", file=sys.stderr, flush=True)
    deadline = time.monotonic() + _WATCH_S
    while time.monotonic() < deadline:
        later = read_record(run)
        if later is not None and later != record:
            return later.outcome or "running"
        time.sleep(_LOOK_S)
    return "lost"
