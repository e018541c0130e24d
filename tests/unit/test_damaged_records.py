"""Whatever the records of a run hold, the tools that read them say so in one line, and never with a traceback."""

import json
import sys
from collections.abc import Callable, Iterator

import pytest

from areal_megatron import audit, trajectories
from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.config import ConfigError
from areal_megatron.data.dumps import Dump, write
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.files import read_replaced
from areal_megatron.launch import engines, lease, records, status
from areal_megatron.launch.page import report
from areal_megatron.launch.page.watched import Watched
from areal_megatron.launch.pools import Node, Placement, Process, Slot
from areal_megatron.launch.processes import Log
from areal_megatron.launch.records import Recorder
from areal_megatron.observe.metrics import MetricsWriter, read_status, write_status
from areal_megatron.observe.spans import merge
from areal_megatron.observe.timeline import Timeline
from areal_megatron.run import Run
from tests.unit.launch.test_page import update
from tests.unit.test_audit import Past
from tests.unit.test_report import evaluation
from tests.unit.test_trajectories import answer, model  # noqa: F401 - a fixture

RECORDS = (
    "metrics.jsonl",
    "status.json",
    "processes.json",
    "ledger/trainer-0.00001.jsonl",
)
BINARY = ("trajectories/batch-000000.msgpack", "config.yaml")
VALUES = (None, "text", "", [], {}, -1, 10**400, 1e308, True, [[1]], {"a": {"b": []}})
CONTENTS = (
    b"",
    b"\0" * 512,
    b"\xff\xfe\x00binary\n",
    b"[]\n",
    b"{}\n",
    b"null\n",
    b'"\xff"\n',
    b"[" * 50_000 + b"\n",
    b'{"a":' * 50_000 + b"\n",
    b"NaN\n",
    b"\x91" * 50_000,
)


@pytest.fixture
def run(tmp_path, model):  # noqa: F811
    """A run that was resumed once, with every kind of record."""
    past = Past(tmp_path)
    run, tokenizer = past.run, Tokenizer(model)
    past.config.model.path = str(model)
    past.train(3)
    saved = past.save()
    past.train(1)
    past.begin(saved)
    past.train(1)
    metrics = MetricsWriter(run)
    metrics.write("eval", 0, evaluation(0, math=(0.1, 0.08, 0.12), code=(0.2, 0.1, 0.3)))
    metrics.write("start", 1, {"engines_s": 1.0, "trainers_s": 1.0, "first_batch_s": 2.0, "over_slowest_pool": 2.0})
    metrics.write("checkpoint", 1, {"stall_s": 0.1, "seconds": 1.0, "failed": 0})
    metrics.write("resume", 3, {"incarnation": 1})
    metrics.write("update", 4, update(4))
    metrics.close()
    engine = {"name": "engine-0", "state": "ready", "version": 4, "running": 3, "losses": 0, "tokens_per_s": 9.0}
    write_status(run, {"phase": "training", "version": 4, "updates": 50, "elapsed_s": 9.0, "engines": [engine]})
    timeline = Timeline(run.timeline("trainer-0"), "trainer-0")
    for name in ("train", "publish"):
        timeline.event(name, 10**18, 10**18 + 10**9, tokens=9)
    timeline.close()
    write(Dump(number=0, version=0, trajectories=[answer(tokenizer, 0, "eins")]), run.trajectories)
    place = Process("engine-0", "rollout", 0, "b", (Slot("b", 0),))
    process = Log("engine-0", run.log("engine-0"))
    process.exit_code = 0
    Recorder(run, Placement((Node("b", (0,)),), (place,))).write({"engine-0": process}, 1, "stopped")
    (run.leases / "00001.json").write_text(
        '{"launcher": "process 1 on a", "since": "", "machine": "", "process": [1, 1]}'
    )
    return run


def page(run: Run) -> int:
    watched = Watched(run)
    watched.refresh()
    json.dumps([watched.overview(), json.loads(watched.curves() or b"{}")], allow_nan=False)
    return 0


def spans(run: Run) -> int:
    """What the report makes of timelines."""
    merge(run)
    return 0


def resumed(run: Run) -> int:
    """What a launcher looks at before it resumes a run."""
    try:
        for path in run.leases.glob("*.json"):
            lease.read(path)
        checkpoint_folder.resumable(run)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


def of_command_line(main: Callable[[], int], *words: str) -> int:
    sys.argv[1:] = words
    return main()


TOOLS: dict[str, Callable[[Run], int]] = {
    "status": lambda run: status.main([str(run.folder)]),
    "audit": lambda run: of_command_line(audit.main, str(run.folder)),
    "page": page,
    "spans": spans,
    "engines": lambda run: engines.main(["drain", str(run.folder), "engine-0"]),
    "resume": resumed,
    "report": lambda run: of_command_line(report.main, str(run.folder)),
    "trajectories": lambda run: trajectories.main([str(run.folder)]),
}
READS = {
    "metrics.jsonl": ("status", "page", "report"),
    "status.json": ("status", "page", "report"),
    "processes.json": ("status", "page", "engines"),
    "incarnations": ("status", "audit", "resume", "page", "report"),
    "leases": ("status", "resume"),
    "ledger": ("audit",),
    "timeline": ("spans", "report"),
    "checkpoints": ("status", "audit", "resume"),
    "trajectories": ("trajectories", "page"),
    "config.yaml": ("status", "audit", "page", "report", "trajectories", "engines"),
}
"""Which tools read a record."""


def damages(content: bytes) -> Iterator[bytes]:
    """The content with each field of each of its lines missing or of another type, and other contents altogether."""
    yield from CONTENTS
    yield content[: len(content) // 2]
    lines = content.splitlines(keepends=True)
    for number, line in enumerate(lines):
        before, after = b"".join(lines[:number]), b"".join(lines[number + 1 :])
        for other in (b"\0" * 99 + b"\n", b"\xff\n", b"[1]\n", b"[" * 9_999 + b"\n"):
            yield before + other + after
        try:
            record = json.loads(line)
        except ValueError:
            continue
        for changed in changes(record):
            yield before + json.dumps(changed).encode() + b"\n" + after


def changes(record: object) -> Iterator[object]:
    """The record with one field missing, added, or of another value, at any depth; few of many like fields."""
    if isinstance(record, dict):
        yield record | {"colour": "blue"}
        for key in list(record)[:6]:
            yield {other: value for other, value in record.items() if other != key}
            yield from (record | {key: value} for value in VALUES)
            yield from (record | {key: value} for value in changes(record[key]))
    if isinstance(record, list) and record:
        yield from ([value, *record[1:]] for value in VALUES)
        yield from ([value, *record[1:]] for value in changes(record[0]))


@pytest.mark.parametrize("name", [*RECORDS, *BINARY])
def test_a_damaged_record_is_said_in_one_line(run, name, capsys, monkeypatch):
    monkeypatch.setattr(records, "_WATCH_S", 0.0)
    monkeypatch.setattr("areal_megatron.files._AGAIN_S", 0.0)
    monkeypatch.setattr(read_replaced, "__defaults__", (0.0,))
    monkeypatch.setattr(read_status, "__defaults__", (0.0,))
    path = run.folder / name
    whole = path.read_bytes()
    tools = next(tools for place, tools in READS.items() if name.startswith(place))
    found = list(damages(whole) if name not in BINARY else CONTENTS)
    for tried, damaged in enumerate(found[:: len(found) // 40 or 1]):
        path.write_bytes(damaged)
        for tool in tools if tried % 20 == 0 else tools[:1]:
            shown = f"{tool} {name}: {damaged[:300]}"
            try:
                code = TOOLS[tool](run)
            except Exception as e:
                raise AssertionError(f"{shown}: {type(e).__name__}: {e}") from e
            said = capsys.readouterr().err
            assert code in (0, 1, 2), shown
            assert "Traceback" not in said and (code != 2 or said.count("\n") == 1), f"{shown}: {said[:500]}"
    path.unlink()
    for tool in tools:
        assert TOOLS[tool](run) in (0, 1, 2)
