"""Shows how a run is, from any machine that sees its folder: `areal status RUN [--all | --web]`.

Prints how far the run is, its processes with node, version and throughput, the last checkpoint, the restarts, and where
the logs are. If the launcher's last record is old, waits some seconds for another. Exit code 0: it is running or done,
1: it has failed, was interrupted, or its launcher is gone, 2: no such run. Imports neither torch nor vllm.

`--web` serves a page that shows the same, the report's curves and the trajectories while the run goes on, until Ctrl-C;
it prints the address. The run need not have begun, and may have ended. A folder of several runs gets one page of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rich.table import Table

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.config import ConfigError, config_file
from areal_megatron.observe.advice import advise, since_resumed
from areal_megatron.observe.console import number, percent
from areal_megatron.observe.metrics import read_metrics, read_status
from areal_megatron.observe.process_rows import HEAD, rows
from areal_megatron.observe.records import LaunchRecord, has_room, last_record, state_of
from areal_megatron.process.shown import guard, visible
from areal_megatron.process.terminal import Terminal
from areal_megatron.programs.closing import going_on
from areal_megatron.run.arguments import Parser
from areal_megatron.run.folder import RunFolder


def main(arguments: list[str] | None = None) -> int:
    guard()
    parser = Parser("areal_megatron.programs.status", __doc__)
    parser.add_argument("run", type=Path, help="run folder, e.g. runs/demo")
    parser.add_argument("--all", action="store_true", help="a line for each process")
    parser.add_argument("--web", action="store_true", help="serve a page and print its address")
    parser.add_argument("--host", default="127.0.0.1", help="where the page listens: an address or a network interface")
    parser.add_argument("--port", type=int, default=0, help="of the page; default: one that is free")
    options = parser.parse_args(arguments)
    run = RunFolder(options.run)
    try:
        return _web(run, options.host, options.port) if options.web else _show(run, options.run, options.all)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
    except OSError as e:
        print(f"error: {e.filename or run.folder} cannot be read: {e.strerror}", file=sys.stderr)
    return 2


def _show(run: RunFolder, named: Path, every: bool) -> int:
    record = last_record(run, named)
    state = state_of(run, record)
    terminal = Terminal()
    for line in headlines(run, record, state, time.time()):
        terminal.print(line)
    terminal.print(table(run, record, every))
    return int(state not in ("running", "done", "stopped"))


def _web(run: RunFolder, host: str, port: int) -> int:
    from areal_megatron.page import server  # with what reads trajectories, it takes a second to import

    if not 0 <= port < 2**16:
        raise ConfigError(f"--port: must be from 0 to 65535, is {port}")
    server.serve(run, host, port)
    return 0


def headlines(run: RunFolder, record: LaunchRecord, state: str, now: float) -> Iterator[str]:
    status = read_status(run)
    start = run.start
    phase = f", {status.phase}" if state == "running" and status.phase else ""
    version, updates = (status.version, status.updates) if status.phase else (start.version, "?")
    yield f"{run.folder}: {state}{phase}, version {version} of {updates}"
    if state == "lost":
        silent = _ago(now - record.time)
        yield f"the launcher on {record.launcher} has written nothing for {silent}: it was killed, or its node is lost"
    problems = []
    lines = read_metrics(run, problems.append)
    yield from (f"warning: {problem}" for problem in problems)
    if updates := [line for line in lines if line["kind"] == "update"]:
        last = updates[-1]
        yield (
            f"last update {_ago(now - last['time'])} ago: {number(last.get('effective_tokens_per_s'), 0)} trained "
            f"tokens/s, accuracy {percent(last.get('accuracy'))}, staleness at most "
            f"{number(last.get('staleness_max'), 0)}"
        )
    saved, config = checkpoint_folder.complete(run), None
    with suppress(ConfigError):  # of a version of this project with other keys
        config = config_file.load(run.config)
        if advice := advise(config, since_resumed(lines), has_room(record, config)):
            yield f"advice: {advice.line}"
    if saved:
        yield f"last checkpoint {saved[-1].name}, {_ago(now - saved[-1].stat().st_mtime)} ago"
    else:
        yield "no checkpoint yet"
    times = f"{start.incarnation + 1} times" if start.incarnation else "once"
    yield f"started {times}, {record.restarts_left} restarts are left"
    if config and state not in ("running", "replaced"):  # else it goes on here, or elsewhere
        yield from filter(None, [going_on(config, state == "done", record.again, bool(saved))])
    yield f"logs: {run.log('PROCESS')}; launcher on {record.launcher}"


def table(run: RunFolder, record: LaunchRecord, every: bool) -> Table:
    made = Table(box=None, padding=(0, 2, 0, 0))
    for name in HEAD:
        made.add_column(name, justify="right" if name in ("version", "requests", "tokens/s") else "left")
    for row in rows(record, read_status(run), every):
        made.add_row(*map(visible, row))
    return made


def _ago(seconds: float) -> str:
    seconds = max(0, round(seconds))
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"


if __name__ == "__main__":
    sys.exit(main())
