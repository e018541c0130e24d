"""Shows the metrics of a run in a tracker: a thin mirror of metrics.jsonl.

    areal mirror RUN TRACKER [--follow] [--online]

TRACKER is wandb, mlflow, swanlab or trackio. Goes on where it ended the last time, in the same run of the tracker, so
it may be called again and again, while the run lasts or after it. `--follow` goes on until stdin ends. Exit code 0:
done, 1: the tracker failed, 2: wrong input.

Launchers start one such process for each tracker of `track.to` (supervision/mirrors.py). It only reads what the run
writes: a tracker that hangs or dies cannot disturb it. What was mirrored stays: updates that are done again, since the
run resumed from an older checkpoint, keep the figures of their first time there.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from areal_megatron.config import TRACKERS, Config, ConfigError, config_fields, config_file
from areal_megatron.observe.metrics import MetricsReader, scalars
from areal_megatron.observe.shown_answers import HEAD, TABLE, read_answers
from areal_megatron.observe.trackers import TrackedRun, Tracker, check_trackers, open_tracker, without_secrets
from areal_megatron.process.errors import first_line
from areal_megatron.process.files import read_replaced, write_json
from areal_megatron.process.shown import guard
from areal_megatron.run.arguments import Parser
from areal_megatron.run.folder import RunFolder
from areal_megatron.run.json_input import read_record

END_S = 15.0
"""Longest time for a tracker to take the last figures once the run has ended."""
_LOOK_S = 1.0


@dataclass
class Once:
    """The lines of metrics.jsonl that a tracker gets: without work repeated after a resume."""

    highest: dict[str, int]
    """Highest version of each kind of line so far."""
    done: dict[str, int]
    """The same when the run was resumed for the last time."""

    def takes(self, record: dict[str, Any]) -> bool:
        """Whether this line, the next one of the file, is shown."""
        kind, version = record["kind"], record["version"]
        if kind == "resume":
            self.done = dict(self.highest)
        again = version <= self.done.get(kind, -1)
        self.highest[kind] = max(version, self.highest.get(kind, -1))
        return not again


class _Noted(msgspec.Struct):
    """What is noted of a tracker."""

    id: str
    lines: int


class Mirror:
    """Brings what is new in metrics.jsonl to a tracker. Not for two processes at the same time.

    What it has brought is noted in the run folder, as `trackers/NAME.offline.json`, so that the next process goes on
    from there. After a SIGKILL the lines of the last second may come twice.
    """

    def __init__(self, run: RunFolder, name: str, config: Config, online: bool):
        """Raises ConfigError, Replaced, and whatever the tracker does."""
        self._run, self._reader, self._once, self._read = run, MetricsReader(run), Once({}, {}), 0
        folder = run.folder / "trackers"
        self._note = folder / f"{name}.{'online' if online else 'offline'}.json"
        noted = read_replaced(self._note, lambda content: read_record(content, _Noted, self._note))
        fields = ((key, value) for key, _, value in config_fields(config) if not is_dataclass(value))
        settings = {key: value if isinstance(value, bool | int | float) else str(value) for key, value in fields}
        tracked = TrackedRun(
            id=noted.id if noted else secrets.token_hex(16)[:21],
            is_new=not noted,
            name=config.name,
            project=config.track.project,
            folder=folder / name,
            online=online,
            settings=settings,
        )
        self._shown = noted.lines if noted else 0
        self._tracker: Tracker = open_tracker(name, tracked)
        self._takes_tables = True
        self._save()

    def update(self) -> None:
        """Brings the tracker what is new, unless the run folder is away. Raises ValueError for a malformed line,
        Replaced, and whatever the tracker does."""
        try:
            self._run.look()
        except OSError:  # trackers make folders that are gone again
            return
        for record in self._reader.new():
            self._read += 1
            if self._once.takes(record) and self._read > self._shown:
                values = scalars(record["kind"], {key: value for key, value in record.items() if key not in _OWN})
                if values:
                    self._tracker.log(self._read, record["time"], record["version"], values)
                if record["kind"] == "eval" and self._takes_tables:
                    self._show_answers(record["version"])
        if self._read > self._shown:
            self._shown = self._read
            self._save()

    def _show_answers(self, version: int) -> None:
        """Brings the tracker the answers of an evaluation, as a table. The numbers are worth more: if it fails they are
        brought without tables from then on."""
        try:
            if answers := read_answers(self._run, version):
                self._tracker.table(self._read, version, TABLE, HEAD, [answer.row for answer in answers])
        except Exception as e:  # a tracker may raise anything
            self._takes_tables = False
            said = without_secrets(first_line(e))
            print(f"warning: no answers of evaluations are shown: {said}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Returns when the tracker has written or sent everything."""
        self._tracker.close()

    def _save(self) -> None:
        self._run.look()
        write_json(self._note, {"id": self._tracker.id, "lines": self._shown})


_OWN = ("time", "kind", "version")


def follow(mirror: Mirror, ended: Callable[[float], bool]) -> None:
    """Mirrors until `ended(seconds)`, which waits so long at most, is true, and then the rest."""
    while not ended(_LOOK_S):
        mirror.update()
    mirror.update()


def _watch_stdin(ended: threading.Event) -> None:
    """Sets `ended` when stdin ends, and ends this process if a tracker then takes longer than END_S."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    ended.set()
    time.sleep(END_S)
    print(f"error: the tracker has not taken everything within {END_S:.0f} s; call this again", file=sys.stderr)
    os._exit(1)


def main(arguments: list[str] | None = None) -> int:
    guard()
    options = _options(arguments)
    run = RunFolder(options.run, lease=options.lease)
    try:
        config = config_file.load_run(run.folder)
        online = config.track.online or options.online
        check_trackers(replace(config.track, to=options.tracker, online=online))
        os.nice(5)
        ended = threading.Event()
        if options.follow:
            threading.Thread(target=_watch_stdin, args=(ended,), daemon=True).start()
        else:
            ended.set()
        mirror = Mirror(run, options.tracker, config, online)
        follow(mirror, ended.wait)
        mirror.close()
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as e:  # a tracker may raise anything
        print(f"error: {options.tracker}: {type(e).__name__}: {without_secrets(first_line(e))}", file=sys.stderr)
        return 1
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("areal_megatron.observe.mirror", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, e.g. runs/demo")
    parser.add_argument("tracker", type=_tracker, choices=TRACKERS, help="where the metrics are shown")
    parser.add_argument("--follow", action="store_true", help="go on until stdin ends, e.g. with Ctrl-D")
    parser.add_argument("--online", action="store_true", help="as track.online=true")
    parser.add_argument("--lease", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _tracker(text: str) -> str:
    if text not in TRACKERS and os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text} is a folder: the run goes first, the tracker second")
    return text


if __name__ == "__main__":
    sys.exit(main())
