import json
import time

import pytest

from areal_megatron.observe.metrics import MetricsWriter, write_status
from areal_megatron.run import Run
from launch import status
from launch.pools import Node, Placement, Process, Slot
from launch.processes import Log
from launch.records import GONE_S, Recorder, read_record

UPDATE = {"effective_tokens_per_s": 1234.0, "accuracy": 0.5, "staleness_max": 3}


def make(tmp_path, ranks=2, engines=2):
    """Returns a run that has trained, its recorder, and the processes of its launcher."""
    run = Run(tmp_path / "tiny")
    run.create()
    run.config.touch()
    run.begin()
    metrics = MetricsWriter(run)
    metrics.write("update", 1, UPDATE)
    metrics.close()
    write_status(
        run,
        {
            "phase": "training",
            "version": 7,
            "updates": 120,
            "engines": [
                {"name": f"engine-{e}", "state": "ready", "version": 7 - e, "running": 16, "tokens_per_s": 230.4}
                for e in range(engines)
            ],
        },
    )
    places = [Process("controller", "controller", 0, "a1", ())]
    places += [Process(f"trainer-{r}", "trainer", r, f"a{r // 8}", (Slot(f"a{r // 8}", r % 8),)) for r in range(ranks)]
    places += [Process(f"engine-{e}", "rollout", e, "b1", (Slot("b1", e),)) for e in range(engines)]
    processes = {place.name: Log(place.name, run.log(place.name)) for place in places}
    for process in processes.values():
        process.exit_code = None
    return run, Recorder(run, Placement((Node("a1", (0, 1)), Node("b1", (0, 1))), tuple(places))), processes


def show(run, capsys, *options):
    code = status.main([str(run.folder), *options])
    return code, capsys.readouterr().out


def test_a_running_run(tmp_path, capsys):
    run, recorder, processes = make(tmp_path)
    recorder.write(processes, 3)
    code, shown = show(run, capsys)
    assert code == 0
    assert "running, training, version 7 of 120" in shown
    assert "1,234 trained tokens/s, accuracy 50%, staleness at most 3" in shown
    assert "no checkpoint yet" in shown and "started once, 3 restarts are left" in shown
    assert str(run.folder / "logs" / "PROCESS.log") in shown
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.split()}
    assert rows["engine-1"] == ["engine-1", "b1", "1", "ready", "6", "16", "230"]
    assert rows["trainer-1"] == ["trainer-1", "a0", "1", "running"]


@pytest.mark.parametrize(("outcome", "code"), [("done", 0), ("stopped", 0), ("failed", 1), ("interrupted", 1)])
def test_a_run_that_has_ended(tmp_path, capsys, outcome, code):
    run, recorder, processes = make(tmp_path)
    processes["trainer-1"].exit_code = -9
    processes["controller"].exit_code = 1
    recorder.write(processes, 0, outcome)
    found, shown = show(run, capsys)
    assert found == code and f": {outcome}, version 7" in shown
    assert "killed by signal 9" in shown and "failed, exit code 1" in shown and "ended with the run" in shown


def test_a_launcher_that_has_fallen_silent(tmp_path, capsys):
    run, recorder, processes = make(tmp_path)
    recorder.write(processes, 0)
    old = json.loads(run.processes.read_text())
    run.processes.write_text(json.dumps(old | {"time": time.time() - GONE_S - 1}))
    code, shown = show(run, capsys)
    assert code == 1 and ": lost," in shown and "was killed, or its node is lost" in shown


def test_many_ranks_share_a_line(tmp_path, capsys):
    run, recorder, processes = make(tmp_path, ranks=96, engines=72)
    processes["trainer-5"].exit_code = 1
    recorder.write(processes, 0)
    _, shown = show(run, capsys)
    assert "trainer-0 … 4" in shown and "trainer-6 … 95" in shown and "engine-0 … 71" in shown
    assert "1,152" in shown, "requests of all engines"
    assert len(shown.splitlines()) < 20
    assert len(show(run, capsys, "--all")[1].splitlines()) > 160


def test_it_writes_when_something_happens_and_now_and_then(tmp_path):
    run, recorder, processes = make(tmp_path)
    recorder.write(processes, 1)
    first = read_record(run).time
    recorder.write(processes, 1)
    assert read_record(run).time == first
    processes["engine-0"].exit_code = 0
    recorder.write(processes, 1)
    assert read_record(run).time > first


def test_what_is_no_run(tmp_path, capsys):
    assert status.main([str(tmp_path)]) == 2
    assert "is no run folder" in capsys.readouterr().err
