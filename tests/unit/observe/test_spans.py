import itertools
import json
import random
import threading
import time
from functools import partial

import pytest

from areal_megatron.observe.spans import Span, merge, overlap, read_spans, speeds_with_and_without, union
from areal_megatron.observe.timeline import Timeline
from areal_megatron.run.folder import RunFolder


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    return run


def test_spans_read_back_as_recorded(run):
    timeline = Timeline(run.timeline("trainer-0"), "trainer-0")
    timeline.event("train", 2_000_000_000, 3_500_000_000, version=7)
    timeline.event("publish", 1_000_000_000, 1_250_000_000)
    timeline.close()
    with run.timeline("trainer-0").open("a") as file:
        file.write('{"name": "torn')
    publish, train = read_spans(run)
    assert (train.process, train.thread, train.name, train.args) == ("trainer-0", "MainThread", "train", {"version": 7})
    assert (train.start, train.end, train.duration) == pytest.approx((2.0, 3.5, 1.5))
    assert (publish.name, publish.start, publish.end) == ("publish", 1.0, 1.25)


class Queue:
    """The queue of a device: its events are passed one by one, when it is told to."""

    def __init__(self):
        self.passed = []

    def event(self):
        class Event(threading.Event):
            def record(_self):
                self.passed.append(_self)

            def synchronize(_self):
                assert _self.wait(10)

        return Event()


def test_spans_of_a_device_end_when_it_has_done_what_was_launched(run):
    device = Queue()
    timeline = Timeline(run.timeline("trainer-0"), "trainer-0", device.event)
    begun = time.time()
    for name in ("proximal", "train"):
        with timeline.device_span(name, tokens=7):
            pass
    assert time.time() - begun < 1, "the host waited"
    times = []
    for place in (0, 1, 2, 3):
        time.sleep(0.1)
        times.append(time.time())
        device.passed[place].set()
    timeline.close()
    spans = read_spans(run)
    assert [(s.name, s.thread, s.args) for s in spans] == [
        ("proximal", "MainThread", {"tokens": 7}),
        ("train", "MainThread", {"tokens": 7}),
    ]
    found = [moment for span in spans for moment in (span.start, span.end)]
    assert all(passed <= moment for passed, moment in zip(times, found, strict=True))
    assert all(moment < later for moment, later in zip(found, times[1:], strict=False))


@pytest.mark.gpu
def test_spans_of_a_gpu_last_as_long_as_its_work(run):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    timeline = Timeline(run.timeline("trainer-0"), "trainer-0", partial(torch.cuda.Event, blocking=True))
    torch.cuda.synchronize()
    begun = time.monotonic()
    with timeline.device_span("train"):
        torch.cuda._sleep(2_000_000_000)
    launched = time.monotonic() - begun
    torch.cuda.synchronize()
    took = time.monotonic() - begun
    timeline.close()
    [span] = read_spans(run)
    assert launched < took / 2 and abs(span.duration - took) < 0.2 * took


def test_merged_trace_names_processes_and_threads(run):
    for process in ("controller", "engine-0"):
        timeline = Timeline(run.timeline(process), process)
        with timeline.span("work", kind=process):
            pass
        timeline.close()
    events = json.loads(merge(run).read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    work = [e for e in events if e["ph"] == "X"]
    assert sorted(names.values()) == ["controller", "engine-0"]
    assert len(work) == 2
    for event in work:
        assert names[event["pid"]] == event["args"]["kind"]
        assert threads[event["pid"], event["tid"]] == "MainThread"


def test_overlapping_requests_of_one_thread_get_lanes_of_their_own(run):
    timeline = Timeline(run.timeline("engine-0"), "engine-0")
    rng = random.Random(2)
    for k in range(60):
        start = rng.randrange(10**9)
        timeline.event(rng.choice(["generate", "commit"]), start, start + rng.randrange(1, 2 * 10**8), number=k)
    timeline.event("generate", 0, 4 * 10**9, number=60)
    timeline.close()
    trace = json.loads(merge(run).read_text())["traceEvents"]
    events = [e for e in trace if e["ph"] == "X"]
    assert sorted(e["args"]["number"] for e in events) == list(range(61))
    for lane in {e["tid"] for e in events}:
        for a, b in itertools.combinations([e for e in events if e["tid"] == lane], 2):
            if a["ts"] > b["ts"]:
                a, b = b, a
            apart = a["ts"] + a["dur"] <= b["ts"] + 1
            nested = a["name"] != b["name"] and b["ts"] + b["dur"] <= a["ts"] + a["dur"] + 1
            assert apart or nested
    names = [e["args"]["name"] for e in trace if e["name"] == "thread_name"]
    assert "MainThread" in names and "MainThread (2)" in names


def test_union_and_overlap_agree_with_counting_on_a_grid():
    rng = random.Random(0)
    for _ in range(200):
        intervals = [(a, a + rng.randrange(1, 8)) for a in (rng.randrange(40) for _ in range(rng.randrange(6)))]
        cells = {cell for a, b in intervals for cell in range(a, b)}
        disjoint = union(intervals)
        assert all(left[1] < right[0] for left, right in itertools.pairwise(disjoint))
        start, end = sorted(rng.sample(range(50), 2))
        assert overlap(disjoint, start, end) == len(cells & set(range(start, end)))


def test_speed_of_work_that_meets_a_publish():
    work = [Span("a", "main", "train", k, k + (0.5 if k % 2 else 0.4), {"tokens": 40}) for k in range(60)]
    publish = [Span("a", "sender", "publish", k + 0.1, k + 0.15) for k in range(1, 60, 2)]
    elsewhere = [Span("b", "sender", "publish", 0, 100)]
    assert speeds_with_and_without(work, publish + elsewhere) == pytest.approx((80, 100))


def test_speed_is_unknown_without_both_kinds_of_work():
    work = [Span("a", "main", "train", k, k + 1, {"tokens": 100}) for k in range(60)]
    assert speeds_with_and_without(work, []) is None
    assert speeds_with_and_without(work, [Span("a", "sender", "publish", 0, 200)]) is None
    assert speeds_with_and_without(work, [Span("a", "sender", "publish", 1.1, 1.2)]) is None, "one span tells nothing"
    assert speeds_with_and_without([], []) is None
