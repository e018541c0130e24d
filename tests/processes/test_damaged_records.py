"""Whatever the records of a run hold, the tools that read them say so in one line, and never with a traceback."""

import json
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from functools import cache
from itertools import count
from pathlib import Path

import msgspec
import pytest

from areal_megatron.config import ConfigError, config_file
from areal_megatron.controller import state
from areal_megatron.data.dumps import Dump, write
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.launch import engines
from areal_megatron.launch.supervision import lease, start
from areal_megatron.launch.supervision.processes import Log
from areal_megatron.launch.supervision.recorder import Recorder
from areal_megatron.observe import records
from areal_megatron.observe.metrics import MetricsWriter, read_status, write_status
from areal_megatron.observe.spans import merge
from areal_megatron.observe.status import EngineStatus, Status
from areal_megatron.observe.timeline import Timeline
from areal_megatron.page import report
from areal_megatron.page.browser import Browser
from areal_megatron.page.watched import Watched
from areal_megatron.planning.pools import Node, Placement, Process, Slot
from areal_megatron.process.files import read_replaced
from areal_megatron.programs import audit, status, trajectories
from areal_megatron.run.folder import RunFolder
from tests.processes.page.test_page import update
from tests.unit.page.test_report import evaluation
from tests.unit.programs.test_audit import Past
from tests.unit.programs.test_trajectories import answer, model  # noqa: F401 - a fixture

SEAL, STATE = "checkpoints/version-000003/complete.json", "checkpoints/version-000003/controller.msgpack"
READERS = {
    "metrics.jsonl": ("status", "page", "report"),
    "status.json": ("status", "page", "report"),
    "processes.json": ("status", "page", "engines"),
    "incarnations/00000.json": ("status", "audit", "page", "report", "resume"),
    "incarnations/00001.json": ("status", "audit", "page", "report", "resume"),
    "leases/00001.json": ("status", "page", "resume"),
    "ledger/trainer-0.00001.jsonl": ("audit",),
    "timeline/trainer-0.jsonl": ("spans", "report"),
    SEAL: ("status", "audit", "resume"),
    STATE: ("audit", "resume"),
    "trajectories/batch-000000.msgpack": ("trajectories", "answers"),
    "config.yaml": ("status", "audit", "page", "report", "trajectories", "engines"),
}
"""Record of a run → the tools that read it."""
CURES = (
    "put a copy of it back",
    "remove it if",
    "a launcher that lives writes another",
    "take another checkpoint",
)
"""What is said to do; a config says what it must be."""
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


@pytest.fixture(scope="module")
def run(tmp_path_factory, model):  # noqa: F811
    """A run that was resumed once, with every kind of record."""
    past = Past(tmp_path_factory.mktemp("past"))
    run, tokenizer = past.run, Tokenizer(model)
    past.config.model.path, past.config.resume = str(model), "auto"
    config_file.save(past.config, run.config)
    past.train(3)
    saved = past.save()
    past.train(1)
    with lease.Lease(run, 30):
        past.begin(saved)
        past.train(1)
    metrics = MetricsWriter(run)
    metrics.write("eval", 0, evaluation(0, math=(0.1, 0.08, 0.12), code=(0.2, 0.1, 0.3)))
    metrics.write("start", 1, {"engines_s": 1.0, "trainers_s": 1.0, "first_batch_s": 2.0, "over_slowest_pool": 2.0})
    metrics.write("checkpoint", 1, {"stall_s": 0.1, "seconds": 1.0, "failed": 0})
    metrics.write("resume", 3, {"incarnation": 1})
    metrics.write("update", 4, update(4))
    metrics.close()
    engine = EngineStatus(name="engine-0", state="ready", version=4, running=3, tokens_per_s=9.0)
    write_status(run, Status(phase="training", version=4, updates=50, elapsed_s=9.0, engines=[engine]))
    timeline = Timeline(run.timeline("trainer-0"), "trainer-0")
    for name in ("train", "publish"):
        timeline.event(name, 10**18, 10**18 + 10**9, tokens=9)
    timeline.close()
    write(Dump(number=0, version=0, trajectories=[answer(tokenizer, 0, "eins")]), run.trajectories)
    place = Process("engine-0", "rollout", 0, "b", (Slot("b", 0),))
    process = Log("engine-0", run.log("engine-0"))
    process.exit_code = 0
    Recorder(run, Placement((Node("b", (0,)),), (place,))).write({"engine-0": process}, 1, "stopped")
    return run


@pytest.fixture(autouse=True)
def without_waits(monkeypatch):
    """Nothing that is damaged here is about to be replaced, no disk loses its power, and what a config holds is read
    once, also where it is refused: each of its readers calls the same `load`."""
    load = config_file.load

    @cache
    def outcome(path, content):
        try:
            return load(path)
        except ConfigError as e:
            return e

    def loaded(path):
        found = outcome(path, path.read_bytes() if path.is_file() else None)
        if isinstance(found, ConfigError):
            raise found.with_traceback(None)
        return deepcopy(found)

    monkeypatch.setattr(config_file, "load", loaded)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr(records, "_WATCH_S", 0.0)
    monkeypatch.setattr(lease, "_LOOK_S", 0.001)
    for patient in (read_replaced, read_status):
        monkeypatch.setattr(patient, "__defaults__", (0.0,))


def page(run: RunFolder) -> int:
    watched = Watched(run)
    watched.refresh()
    json.dumps([watched.overview(), json.loads(watched.curves() or b"{}")], allow_nan=False)
    return 0


def answers(run: RunFolder) -> int:
    """What the page shows of trajectories."""
    Browser(run).page(config_file.load(run.config), None, 0, "")
    return 0


def spans(run: RunFolder) -> int:
    """What the report makes of timelines."""
    merge(run)
    return 0


copies = count()


def resume(run: RunFolder) -> int:
    """Begins a copy of the run again, as a launcher and its controller do."""
    copy = run.folder.with_name(f"copy-{next(copies)}")
    shutil.copytree(run.folder, copy)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    config = config_file.load(run.config)
    config.name, config.machine.lease_s = copy.name, 0.002
    try:
        with start.lease(config) as held:
            checkpoint = start.newest(held.run)
            start.begin(held.run, checkpoint)
            state.read(checkpoint.controller)
    finally:
        kept = [path for path in before if path.parent.name not in ("endpoints", copy.name)]
        assert all(path.read_bytes() == before[path] for path in kept), "a record is lost"
        shutil.rmtree(copy)
    return 0


def told(tool: Callable[[RunFolder], int]) -> Callable[[RunFolder], int]:
    """The tool, with one line for an error as in its program."""

    def run_it(run: RunFolder) -> int:
        try:
            return tool(run)
        except ConfigError as e:
            print(f"error: {e}", file=sys.stderr)
            return 2

    return run_it


def of_command_line(main: Callable[[], int], *words: str) -> int:
    sys.argv[1:] = words
    return main()


TOOLS: dict[str, Callable[[RunFolder], int]] = {
    "status": lambda run: status.main([str(run.folder)]),
    "audit": lambda run: of_command_line(audit.main, str(run.folder)),
    "page": page,
    "answers": told(answers),
    "spans": spans,
    "engines": lambda run: engines.main(["drain", str(run.folder), "engine-0"]),
    "resume": told(resume),
    "report": lambda run: of_command_line(report.main, str(run.folder)),
    "trajectories": lambda run: trajectories.main([str(run.folder)]),
}


def damages(path: Path) -> Iterator[bytes]:
    """The content with each field of each of its lines missing or of another type, and other contents altogether."""
    content = path.read_bytes()
    yield from CONTENTS
    if path.suffix == ".yaml":
        return
    yield content[: len(content) // 2]
    packed = path.suffix == ".msgpack"
    decode, encode = (msgspec.msgpack.decode, msgspec.msgpack.encode) if packed else (json.loads, as_line)
    lines = [content] if packed else content.splitlines(keepends=True)
    for number, line in enumerate(lines):
        before, after = b"".join(lines[:number]), b"".join(lines[number + 1 :])
        for other in (b"\0" * 99 + b"\n", b"\xff\n", b"[1]\n", b"[" * 9_999 + b"\n"):
            yield before + other + after
        for changed in changes(decode(line)):
            with suppress(OverflowError):  # msgpack has no such number
                yield before + encode(changed) + after


def as_line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def changes(record: object) -> Iterator[object]:
    """The record with one field missing, added, or of another value, at any depth; the first of a list for all."""
    if isinstance(record, dict):
        yield record | {"colour": "blue"}
        for key in record:
            yield {other: value for other, value in record.items() if other != key}
            yield from (record | {key: value} for value in VALUES)
            yield from (record | {key: value} for value in changes(record[key]))
    if isinstance(record, list) and record:
        yield from ([value, *record[1:]] for value in VALUES)
        yield from ([value, *record[1:]] for value in changes(record[0]))


def seal(state: Path) -> None:
    """Has complete.json say what the controller's state is now, as one of another release would."""
    path = state.with_name("complete.json")
    sealed = json.loads(path.read_bytes())
    sealed["files"][state.name] = [state.stat().st_size, zlib.crc32(state.read_bytes())]
    path.write_text(json.dumps(sealed))


def check(run: RunFolder, tool: str, name: str, damaged: bytes, capsys: pytest.CaptureFixture) -> str:
    """Has a tool read a damaged record. Returns what it says."""
    shown = f"{tool} {name}: {damaged[:300]}"
    try:
        code = TOOLS[tool](run)
    except Exception as e:
        raise AssertionError(f"{shown}: {type(e).__name__}: {e}") from e
    said = capsys.readouterr().err
    assert code in (0, 1, 2) and "Traceback" not in said, f"{shown}: {said[:500]}"
    if code == 2 and not any(answer in said for answer in ("is not running", "no engine would be left")):
        assert said.count("\n") == 1 and Path(name).name in said, f"{shown}: {said}"
        assert name == "config.yaml" or any(cure in said for cure in CURES), f"{shown}: {said}"
    assert (run.folder / name).read_bytes() == damaged, f"{shown}: it is lost"
    return said


def check_all(run: RunFolder, name: str, tried: Iterator[bytes], capsys: pytest.CaptureFixture) -> None:
    """Has every reader of a record read it damaged."""
    path = run.folder / name
    whole, sealed = path.read_bytes(), (run.folder / SEAL).read_bytes()
    try:
        for damaged in tried:
            path.write_bytes(damaged)
            for tool in READERS[name]:
                check(run, tool, name, damaged, capsys)
            if name == STATE:
                seal(path)
                for tool in READERS[name]:
                    check(run, tool, name, damaged, capsys)
                (run.folder / SEAL).write_bytes(sealed)
        path.unlink()
        for tool in READERS[name]:
            assert TOOLS[tool](run) in (0, 1, 2)
    finally:
        path.write_bytes(whole)
        (run.folder / SEAL).write_bytes(sealed)


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_record_is_said_in_one_line(run, name, capsys):
    """Each content, and of the changes every thirteenth: of those of a field there are twelve."""
    found = list(damages(run.folder / name))
    check_all(run, name, [*found[: len(CONTENTS)], *found[len(CONTENTS) :: 13]], capsys)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", READERS)
def test_every_damage_of_a_record_is_said_in_one_line(run, name, capsys):
    check_all(run, name, damages(run.folder / name), capsys)


def test_what_is_said_of_a_damaged_incarnation_brings_its_work_back(run, tmp_path, capsys):
    """Its record gone alone, the checkpoints that it wrote would not count."""
    copy = RunFolder(shutil.copytree(run.folder, tmp_path / "run"))
    (copy.incarnations / "00000.json").write_bytes(b"")
    assert f"rename {copy.incarnations}" in (check(copy, "status", "incarnations/00000.json", b"", capsys))
    copy.incarnations.rename(tmp_path / "aside")
    config = config_file.load(run.config)
    config.name, config.runs_dir, config.machine.lease_s = "run", str(tmp_path), 0.002
    with start.lease(config) as held:
        checkpoint = start.newest(held.run)
        start.begin(held.run, checkpoint)
        assert checkpoint.version == 3 and held.run.incarnation == 2
