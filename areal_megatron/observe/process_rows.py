"""The processes of a run as rows of a table, for the terminal and for the live page."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import groupby

from areal_megatron.observe.records import LaunchRecord, ProcessRecord
from areal_megatron.observe.status import Status

HEAD = ("process", "node", "slots", "state", "version", "requests", "tokens/s")
_LISTED = 32
"""The most processes that have a row each; if there are more, neighbours of one pool and state share a row."""
_TOLD_TO_END = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of what the launcher ends, the second through a shell."""


def rows(record: LaunchRecord, status: Status, every: bool) -> list[tuple[str, ...]]:
    """Returns the cells of each row, under HEAD. `every`: a row for each
    process."""
    engines = {engine.name: engine for engine in status.engines}
    whole = every or len(record.processes) <= _LISTED
    found = []
    for members in ([p] for p in record.processes) if whole else _alike(record.processes):
        first, last = members[0], members[-1]
        own = [] if record.outcome else [engines[p.name] for p in members if p.name in engines and p.code is None]
        state = "/".join(sorted({engine.state for engine in own})) or _state(first, record.outcome)
        versions = sorted({engine.version for engine in own if engine.version >= 0})
        found.append(
            (
                first.name if first is last else f"{first.name} … {last.name.rpartition('-')[2]}",
                first.node if first.node == last.node else f"{first.node} … {last.node}",
                ",".join(map(str, first.slots)) if first is last else "",
                state,
                "–".join(str(version) for version in dict.fromkeys((versions[0], versions[-1]))) if versions else "",
                f"{sum(engine.running for engine in own):,}" if own else "",
                f"{sum(engine.tokens_per_s for engine in own):,.0f}" if own else "",
            )
        )
    return found


def _alike(processes: list[ProcessRecord]) -> Iterator[list[ProcessRecord]]:
    """Groups neighbours of one pool that are in the same state."""
    for _, members in groupby(processes, key=lambda p: (p.name.partition("-")[0], p.code)):
        yield list(members)


def _state(process: ProcessRecord, outcome: str) -> str:
    if outcome and process.code in (None, *_TOLD_TO_END):
        return "ended with the run"
    if process.code is None:
        return "running"
    if process.code < 0:
        return f"killed by signal {-process.code}"
    return f"failed, exit code {process.code}" if process.code else "ended"
