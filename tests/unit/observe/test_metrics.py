import json
import subprocess
import sys

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from areal_megatron.observe.metrics import MetricsReader, MetricsWriter, read_metrics, read_status, write_status
from areal_megatron.run import Run


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run")
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


def test_broken_line_in_the_middle_is_named(run):
    run.metrics.write_text('{"kind": "update"}\nbroken\n{"kind": "update"}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: "):
        read_metrics(run)


def test_reader_follows_and_waits_for_the_end_of_a_line(run):
    reader = MetricsReader(run)
    assert reader.new() == []
    with run.metrics.open("a", buffering=1) as file:
        file.write('{"version": 1}\n{"ver')
        file.flush()
        assert reader.new() == [{"version": 1}]
        file.write('sion": 2}\n')
        assert reader.new() == [{"version": 2}]
    assert reader.new() == []


def test_status_is_replaced_as_a_whole(run):
    assert read_status(run) == {}
    write_status(run, {"phase": "training", "version": 1, "engines": [{"name": "engine-0", "version": np.int32(1)}]})
    write_status(run, {"phase": "training", "version": 2})
    assert read_status(run) == {"phase": "training", "version": 2}
    assert not list(run.folder.glob(".*")), "a temporary file was left behind"


def test_needs_no_torch():
    code = "import sys, areal_megatron.observe.metrics; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.strip() == "[]"
