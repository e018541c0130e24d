"""Files of a disk that is full, or hangs: nothing waits for them, and metrics lose no line."""

import json
import logging
import os
import threading
import time

from areal_megatron.observe.background import AppendedFile, LatestFile
from tests.support.small_disk import run_on_small_disk

FULL = """
import json, sys, time
from pathlib import Path
from areal_megatron.observe.metrics import MetricsWriter, StatusWriter, read_metrics, read_status
from areal_megatron.observe.spans import read_spans
from areal_megatron.observe.timeline import Timeline
from areal_megatron.run.folder import RunFolder
from tests.support.small_disk import fill
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

run = RunFolder(Path(sys.argv[1]) / "run")
run.create()
metrics, status, timeline = MetricsWriter(run), StatusWriter(run), Timeline(run.timeline("controller"), "controller")
slowest = 0.0

def write(number):
    global slowest
    begin = time.monotonic()
    metrics.write("update", number, {"loss": number / 7, "note": "x" * 300})
    status.write({"phase": "training", "version": number})
    timeline.event("train", number * 10**9, number * 10**9 + 1, number=number)
    slowest = max(slowest, time.monotonic() - begin)
    time.sleep(0.02)

for number in range(10):
    write(number)
metrics.flush()
ballast = fill(run.folder)
for number in range(10, 60):
    write(number)
time.sleep(0.5)
before = len(read_metrics(run)), status.failures
ballast.unlink()
write(60)
for file in (metrics, status, timeline):
    file.close()
board = EventAccumulator(str(run.folder / "tensorboard"))
board.Reload()
print(json.dumps({
    "before": before,
    "versions": [line["version"] for line in read_metrics(run)],
    "board": [event.step for event in board.Scalars("update/loss")],
    "status": read_status(run).version,
    "spans": [span.args["number"] for span in read_spans(run)],
    "slowest": slowest,
    "left": sorted(path.name for path in run.folder.glob(".*")),
}))
"""


def test_a_full_disk_costs_pictures_and_delays_metrics(tmp_path):
    code, out, told = run_on_small_disk(tmp_path / "disk", 512, FULL, tmp_path / "disk")
    assert code == 0, told
    said = json.loads(out)
    written, refused = said["before"]
    assert 10 <= written < 60 and refused > 0, "the disk was full"
    assert said["versions"] == list(range(61)), "each line once, in order"
    assert said["board"] == list(range(61))
    assert said["status"] == 60 and said["left"] == []
    assert set(said["spans"]) >= {*range(10), 60} and said["spans"] == sorted(set(said["spans"]))
    assert said["slowest"] < 0.2
    lines = [line for line in told.splitlines() if "metrics.jsonl" in line]
    assert len(lines) == 2 and "cannot be written: No space left on device" in lines[0], "said once"
    assert "bytes wait in memory until it can" in lines[0] and "can be written again" in lines[1]
    assert sum("status.json cannot" in line for line in told.splitlines()) == 1


def test_a_disk_that_hangs_holds_nobody_up(tmp_path):
    """Opening a pipe that nobody reads hangs as a file does whose server is gone."""
    hung = tmp_path / "hung"
    os.mkfifo(hung)
    file, latest = AppendedFile(hung, kept=True, lines=False), LatestFile(tmp_path / "status", lambda _: None)
    begin = time.monotonic()
    for number in range(1000):
        file.write(b"%d\n" % number)
        latest.write(number)
    assert not file.flush(0.3)
    assert time.monotonic() - begin < 2
    reader = os.open(hung, os.O_RDONLY | os.O_NONBLOCK)  # lets the thread that writes for all tests go on
    file.close(0.2)
    os.close(reader)
    latest.close()


def test_of_what_is_replaced_only_the_latest_is_written(tmp_path):
    stored, begun, written = [], threading.Event(), threading.Event()

    def store(content):
        begun.set()
        assert written.wait(60)
        stored.append(content)

    file = LatestFile(tmp_path / "status", store)
    file.write(0)
    assert begun.wait(60)
    for number in range(1, 50):
        file.write(number)
    written.set()
    file.close()
    assert stored == [0, 49]


def test_best_effort_is_bounded_and_kept_is_not(tmp_path, caplog):
    missing = tmp_path / "file" / "below"
    (tmp_path / "file").touch()
    with caplog.at_level(logging.ERROR):
        kept, best = AppendedFile(missing, kept=True), AppendedFile(missing.with_name("other"), kept=False)
        for _ in range(100):
            kept.write(b"x" * 9999 + b"\n")
            best.write(b"x" * 9999 + b"\n")
        best.flush(2)
        time.sleep(0.3)
        assert best.failures > 0 and kept._waiting() == "1,000,000 bytes"
        kept.close(0.2)
        best.close(0.2)
    assert f"{missing}: 1,000,000 bytes could not be written" in caplog.text


def test_a_torn_line_is_not_continued(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"1\n2")
    file = AppendedFile(path, kept=True)
    file.write(b"3\n")
    file.close()
    assert path.read_bytes() == b"1\n3\n"


LARGE = """
import sys
from pathlib import Path
from areal_megatron.process.files import write_atomically
folder = Path(sys.argv[1])
try:
    write_atomically(folder / "large", b"x" * 100_000)
except OSError as e:
    print(e.strerror, [path.name for path in folder.iterdir()])
"""


def test_a_file_that_cannot_be_written_leaves_no_part_of_it(tmp_path):
    _, out, told = run_on_small_disk(tmp_path / "disk", 64, LARGE, tmp_path / "disk")
    assert out == "No space left on device []\n", told
