"""Shows how a run is, from any machine that sees its folder: `python -m launch.status RUN [--all]`.

Prints how far the run is, its processes with node, version and throughput, the last checkpoint, the restarts, and where
the logs are. If the launcher's last record is old, waits some seconds for another. Exit code 0: it is running or done,
1: it has failed, was interrupted, or its launcher is gone, 2: no such run. Imports neither torch nor vllm.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.command import program
from areal_megatron.observe.metrics import read_metrics, read_status
from areal_megatron.observe.status import engines_of
from areal_megatron.run import Run
from launch.records import LaunchRecord, ProcessRecord, read_record, state_of

_LISTED = 32
"""The most processes that have a line each; if there are more, neighbours of one pool and state share a line."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=program("launch.status"), description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="run folder, e.g. runs/tiny")
    parser.add_argument("--all", action="store_true", help="a line for each process, however many there are")
    options = parser.parse_args(arguments)
    run = Run(options.run)
    record = read_record(run)
    if record is None:
        what = "has not been started by a launcher" if run.config.exists() else "is no run folder"
        print(f"error: {options.run} {what}; give a folder such as runs/tiny", file=sys.stderr)
        return 2
    state = state_of(run, record)
    console = Console(highlight=False, soft_wrap=True)
    for line in headlines(run, record, state, time.time()):
        console.print(line)
    console.print(table(run, record, options.all))
    return int(state not in ("running", "done", "stopped"))


def headlines(run: Run, record: LaunchRecord, state: str, now: float) -> Iterator[str]:
    status = read_status(run)
    start = run.start
    phase = f", {status['phase']}" if state == "running" and "phase" in status else ""
    version, updates = status.get("version", start.version), status.get("updates", "?")
    yield f"{run.folder}: {state}{phase}, version {version} of {updates}"
    if state == "lost":
        silent = _ago(now - record.time)
        yield f"the launcher on {record.launcher} has written nothing for {silent}: it was killed, or its node is lost"
    updates = [line for line in read_metrics(run) if line["kind"] == "update"]
    if updates:
        last = updates[-1]
        yield (
            f"last update {_ago(now - last['time'])} ago: {last['effective_tokens_per_s']:,.0f} trained tokens/s, "
            f"accuracy {100 * last['accuracy']:.0f}%, staleness at most {last['staleness_max']}"
        )
    if saved := checkpoint_folder.complete(run):
        yield f"last checkpoint {saved[-1].name}, {_ago(now - saved[-1].stat().st_mtime)} ago"
    else:
        yield "no checkpoint yet"
    times = f"{start.incarnation + 1} times" if start.incarnation else "once"
    yield f"started {times}, {record.restarts_left} restarts are left"
    yield f"logs: {run.log('PROCESS')}; launcher on {record.launcher}"


def table(run: Run, record: LaunchRecord, every: bool) -> Table:
    engines = {engine.name: engine for engine in engines_of(read_status(run))}
    made = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("process", "node", "slots", "state", "version", "requests", "tokens/s"):
        made.add_column(name, justify="right" if name in ("version", "requests", "tokens/s") else "left")
    whole = every or len(record.processes) <= _LISTED
    for members in ([p] for p in record.processes) if whole else _alike(record.processes):
        first, last = members[0], members[-1]
        own = [] if record.outcome else [engines[p.name] for p in members if p.name in engines and p.code is None]
        state = "/".join(sorted({engine.state for engine in own})) or _state(first, record.outcome)
        versions = sorted({engine.version for engine in own})
        made.add_row(
            first.name if first is last else f"{first.name} … {last.name.rpartition('-')[2]}",
            first.node if first.node == last.node else f"{first.node} … {last.node}",
            ",".join(map(str, first.slots)) if first is last else "",
            state,
            "–".join(str(version) for version in dict.fromkeys((versions[0], versions[-1]))) if versions else "",
            f"{sum(engine.running for engine in own):,}" if own else "",
            f"{sum(engine.tokens_per_s for engine in own):,.0f}" if own else "",
        )
    return made


def _alike(processes: list[ProcessRecord]) -> Iterator[list[ProcessRecord]]:
    """Groups neighbours of one pool that are in the same state."""
    for _, members in groupby(processes, key=lambda p: (p.name.partition("-")[0], p.code)):
        yield list(members)


def _state(process: ProcessRecord, outcome: str) -> str:
    if process.code is None:
        return "ended with the run" if outcome else "running"
    if process.code < 0:
        return f"killed by signal {-process.code}"
    return f"failed, exit code {process.code}" if process.code else "ended"


def _ago(seconds: float) -> str:
    seconds = max(0, round(seconds))
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"


if __name__ == "__main__":
    sys.exit(main())
