"""What the launcher's loop does while it has to wait."""

import signal
import sys
import threading
import time

import pytest

from areal_megatron.config import Config
from areal_megatron.run import Run
from launch import records, start, supervise
from launch.hosts import Here
from launch.lease import Lease
from launch.memory import plan_memory
from launch.plan import ClusterPlan
from launch.pools import Node, Placement, Process
from launch.records import read_record
from launch.start import Beginning
from launch.supervise import Outcome
from tests.support.reshard_oracle import CONFIG


class Slow(Here):
    """Runs a process of three seconds, and waits as long for a file server whenever it looks."""

    def start(self, order):
        order.command = [sys.executable, "-c", "import time; time.sleep(3)"]
        super().start(order)

    def refresh(self):
        time.sleep(3)
        super().refresh()


@pytest.fixture
def signals():
    """What supervise does with signals ends with the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_records_go_on_while_the_launcher_waits(tmp_path, monkeypatch, signals):
    monkeypatch.setattr(records, "RECORD_S", 0.2)
    run = Run(tmp_path / "run")
    run.create()
    placement = Placement((Node("n", (0,)),), (Process("controller", "controller", 0, "n", ()),))
    config = Config(name="run", updates=1)
    beginning = Beginning(config, run, ClusterPlan(placement, plan_memory(config, CONFIG)), None)
    times = set()

    def look():
        while not (record := read_record(run)) or not record.outcome:
            times.update([record.time] if record else [])
            time.sleep(0.05)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    options = start.parser("launch.local", "").parse_args(["config"])
    begin = time.time()
    with Lease(run, 90) as lease:
        assert supervise.supervise(beginning, Slow(), options, lease) == Outcome.DONE
    looking.join(10)
    assert read_record(run).outcome == "done"
    assert len([at for at in times if at < begin + 2.5]) >= 3
