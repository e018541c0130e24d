import json
import math
import subprocess
import sys

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from areal_megatron.observe.metrics import MetricsReader, MetricsWriter, read_metrics, read_status, write_status
from areal_megatron.observe.status import EngineStatus, Status
from areal_megatron.run.folder import RunFolder


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    return run


def test_lines_read_back_as_written(run):
    writer = MetricsWriter(run)
    writer.write("update", 1, {"reward_mean": np.float32(0.5), "staleness_histogram": {0: np.int64(3), 1: 5}})
    writer.write("eval", 1, {"accuracy": 0.25, "items": 4, "files": {"math": {"items": 4}}})
    writer.flush()
    update, evaluation = read_metrics(run)
    writer.close()
    assert update.pop("time") <= evaluation.pop("time")
    assert update == {"kind": "update", "version": 1, "reward_mean": 0.5, "staleness_histogram": {"0": 3, "1": 5}}
    assert evaluation == {"kind": "eval", "version": 1, "accuracy": 0.25, "items": 4, "files": {"math": {"items": 4}}}


def test_tensorboard_holds_the_scalars(run):
    writer = MetricsWriter(run)
    for version, reward in enumerate([-1.0, 0.5, 2.0]):
        writer.write("update", version, {"reward_mean": reward, "staleness_histogram": {"0": 3}, "note": "text"})
    writer.close()
    board = EventAccumulator(str(run.folder / "tensorboard"))
    board.Reload()
    assert board.Tags()["scalars"] == ["update/reward_mean"]
    assert [(e.step, e.value) for e in board.Scalars("update/reward_mean")] == [(0, -1.0), (1, 0.5), (2, 2.0)]


def test_tensorboard_shows_the_files_of_an_evaluation(run):
    writer = MetricsWriter(run)
    average = {"value": 0.25, "low": 0.125, "high": 0.5}
    writer.write("eval", 7, {"accuracy": 0.25, "files": {"a/math": {"items": 4, "avg@2": average}}})
    writer.close()
    board = EventAccumulator(str(run.folder / "tensorboard"))
    board.Reload()
    shown = {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    assert shown == {
        "eval/accuracy": [(7, 0.25)],
        "eval/a/math/items": [(7, 4)],
        "eval/a/math/avg@2": [(7, 0.25)],
        "eval/a/math/avg@2/low": [(7, 0.125)],
        "eval/a/math/avg@2/high": [(7, 0.5)],
    }


def test_non_finite_numbers_stay_valid_json(run):
    writer = MetricsWriter(run)
    writer.write("update", 1, {"grad_norm": np.float32("nan"), "loss": float("inf")})
    writer.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads(run.metrics.read_text(), parse_constant=refuse)
    assert line["grad_norm"] is None and line["loss"] is None


def test_value_that_is_no_number_is_refused_and_leaves_no_line(run):
    writer = MetricsWriter(run)
    with pytest.raises(TypeError, match="ndarray"):
        writer.write("update", 1, {"loss": np.zeros(3)})
    writer.close()
    assert read_metrics(run) == []


def test_torn_last_line_is_not_read_and_not_continued(run):
    writer = MetricsWriter(run)
    writer.write("update", 1, {"loss": 1.0})
    writer.close()
    with run.metrics.open("a") as file:
        file.write('{"time": 3.0, "kind": "upd')
    assert [m["version"] for m in read_metrics(run)] == [1]
    writer = MetricsWriter(run)
    writer.write("update", 2, {"loss": 0.5})
    writer.close()
    assert [m["version"] for m in read_metrics(run)] == [1, 2]


LINE = {"time": 1.0, "kind": "update", "version": 1}


@pytest.mark.parametrize(
    "broken",
    [
        b"broken",
        b"",
        b"\0" * 100,
        b"\xff\xfe",
        b"[]",
        b'"text"',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"kind": "update"}',
        json.dumps(LINE | {"kind": None}).encode(),
        json.dumps(LINE | {"version": "1"}).encode(),
        json.dumps(LINE | {"version": 10**400}).encode(),
        json.dumps(LINE | {"time": 1e300}).encode(),
        json.dumps(LINE | {"accuracy": math.nan}).encode(),
        json.dumps(LINE | {"accuracy": [1]}).encode(),
        json.dumps(LINE | {"accuracy": 10**400}).encode(),
        json.dumps(LINE | {"staleness_histogram": {"x": 1}}).encode(),
        json.dumps(LINE | {"staleness_histogram": {"1": None}}).encode(),
        json.dumps(LINE | {"kind": "eval", "files": []}).encode(),
        json.dumps(LINE | {"kind": "eval", "files": {"math": {"avg@1": {"low": 1}}}}).encode(),
    ],
)
def test_lines_that_cannot_be_read_are_left_out_counted_and_named(run, broken):
    lines = [json.dumps(LINE | {"version": n}).encode() for n in range(3)]
    run.metrics.write_bytes(b"\n".join([lines[0], broken, lines[1], broken, lines[2], b'{"torn']))
    problems = []
    assert [line["version"] for line in read_metrics(run, problems.append)] == [0, 1, 2]
    (problem,) = problems
    assert problem.startswith(f"{run.metrics}:2 is of another release or damaged: ") and "\n" not in problem
    assert problem.endswith("; 2 lines are left out")


def test_lines_of_another_release_are_read_as_far_as_they_are_known(run):
    lines = [LINE | {"accuracy": "high"}, LINE | {"kind": "weather", "sun": [1, "x"]}, LINE | {"more": None}]
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    problems = []
    assert read_metrics(run, problems.append) == [LINE, *lines[1:]] and problems == []


def test_reader_follows_and_waits_for_the_end_of_a_line(run):
    reader = MetricsReader(run)
    assert reader.new() == []
    with run.metrics.open("a", buffering=1) as file:
        file.write('{"time": 1, "kind": "sft", "version": 1}\n{"time": 2, "kind": "sft", "ver')
        file.flush()
        assert reader.new() == [{"time": 1, "kind": "sft", "version": 1}]
        file.write('sion": 2}\n')
        assert reader.new() == [{"time": 2, "kind": "sft", "version": 2}]
    assert reader.new() == []


def test_status_is_replaced_as_a_whole(run):
    assert read_status(run) == Status()
    write_status(run, Status(phase="training", version=1, engines=[EngineStatus(name="engine-0", state="ready")]))
    write_status(run, Status(phase="training", version=2))
    assert read_status(run) == Status(phase="training", version=2)
    assert not list(run.folder.glob(".*")), "a temporary file was left behind"


def test_needs_no_torch():
    code = "import sys, areal_megatron.observe.metrics; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.strip() == "[]"
