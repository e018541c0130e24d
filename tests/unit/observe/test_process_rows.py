"""The processes of a run as rows of a table."""

from areal_megatron.observe.process_rows import HEAD, rows
from areal_megatron.observe.records import LaunchRecord, ProcessRecord
from areal_megatron.observe.status import EngineStatus, Status


def test_engines_that_have_no_version_yet_show_none():
    processes = [ProcessRecord(f"engine-{n}", "node1", [n], None) for n in range(2)]
    record = LaunchRecord("node1", 0.0, 0, "", processes)
    engines = [EngineStatus(name="engine-0", state="ready", version=7), EngineStatus(name="engine-1", state="starting")]
    shown = [row[HEAD.index("version")] for row in rows(record, Status(engines=engines), every=True)]
    assert shown == ["7", ""]
