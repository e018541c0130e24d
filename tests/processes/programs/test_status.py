import json
import threading
import time

import pytest

from areal_megatron.config import Config, DataConfig, ModelConfig, config_file
from areal_megatron.launch.supervision.processes import Log
from areal_megatron.launch.supervision.recorder import Recorder
from areal_megatron.observe import records
from areal_megatron.observe.console import Console
from areal_megatron.observe.metrics import MetricsWriter, read_status, write_status
from areal_megatron.observe.records import GONE_S, Pulse, read_record, state_of
from areal_megatron.observe.status import EngineStatus, Status
from areal_megatron.planning.pools import Node, Placement, Process, Slot
from areal_megatron.process.silence import Repeater
from areal_megatron.programs import status
from areal_megatron.run.folder import RunFolder

UPDATE = {"effective_tokens_per_s": 1234.0, "accuracy": 0.5, "staleness_max": 3}


def make(tmp_path, ranks=2, engines=2):
    """Returns a run that has trained, its recorder, and the processes of its launcher."""
    run = RunFolder(tmp_path / "tiny")
    run.create()
    run.config.touch()
    run.begin()
    metrics = MetricsWriter(run)
    metrics.write("update", 1, UPDATE)
    metrics.close()
    serving = [
        EngineStatus(name=f"engine-{e}", state="ready", version=7 - e, running=16, tokens_per_s=230.4)
        for e in range(engines)
    ]
    write_status(run, Status(phase="training", version=7, updates=120, engines=serving))
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
    processes["engine-0"].exit_code, processes["engine-1"].exit_code = -15, 143  # by the launcher
    recorder.write(processes, 0, outcome)
    found, shown = show(run, capsys)
    assert found == code and f": {outcome}, version 7" in shown
    assert "killed by signal 9" in shown and "failed, exit code 1" in shown
    assert "signal 15" not in shown and "code 143" not in shown and shown.count("ended with the run") == 3


def test_a_run_that_was_interrupted_names_the_command_that_resumes_it(tmp_path, capsys):
    run, _, processes = make(tmp_path)
    config_file.save(
        Config(name="tiny", updates=120, model=ModelConfig(path="m"), data=DataConfig(train="d")), run.config
    )
    recorder = Recorder(run, Placement((), ()), "areal train tiny.yaml 'data.train=a b.jsonl'")
    recorder.write(processes, 0)
    assert "areal train" not in show(run, capsys)[1], "it is running"
    recorder.write(processes, 0, "interrupted")
    resumes = "areal train tiny.yaml 'data.train=a b.jsonl' resume=auto"
    assert f"again   {resumes}, from the beginning\n" in show(run, capsys)[1]
    (saved := run.checkpoints / "version-000007").mkdir(parents=True)
    (saved / "complete.json").write_text("{}")
    assert f"resume  {resumes}\n" in show(run, capsys)[1]


def test_a_launcher_that_has_fallen_silent(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(records, "_WATCH_S", 1.0)
    run, recorder, processes = make(tmp_path)
    recorder.write(processes, 0)
    old = json.loads(run.processes.read_text())
    run.processes.write_text(json.dumps(old | {"time": time.time() - GONE_S - 1}))
    code, shown = show(run, capsys)
    assert code == 1 and ": lost," in shown and "was killed, or its node is lost" in shown


def test_a_run_whose_pools_are_out_of_balance(tmp_path, capsys):
    run, recorder, processes = make(tmp_path)
    recorder.write(processes, 0)
    config = Config(name="tiny", updates=120)
    config.model.path, config.data.train, config.rollout.max_staleness = "model", "train.jsonl", 0
    config.machine.device = "cuda"
    config_file.save(config, run.config)
    metrics = MetricsWriter(run)
    pools = {"update_s": 10.0, "trainer_wait_s": 4.0, "straggler_wait_s": 0.0, "engines_serving": 2}
    for version in range(2, 14):
        metrics.write("update", version, UPDATE | pools | {"engine_idle_share": 0.0, "engine_full_share": 1.0})
    metrics.close()
    assert "advice: engines are short: trainers wait for 40% of the time" in show(run, capsys)[1]
    metrics = MetricsWriter(run)
    metrics.write("resume", 13, {"incarnation": 1})
    metrics.close()
    assert "advice" not in show(run, capsys)[1]


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


@pytest.mark.parametrize("skew_s", [-3600, 3600])
def test_a_launcher_whose_clock_differs_lives_as_long_as_it_writes(tmp_path, skew_s):
    run, recorder, processes = make(tmp_path)
    recorder.write(processes, 0)
    record = read_record(run)

    def write():
        record.time = time.time() + skew_s
        run.processes.write_bytes(records.msgspec.json.encode(record))

    write()
    pulse = Pulse(run, silence_s=1.2)
    with Repeater(write, 0.4):
        assert state_of(run, read_record(run)) == "running"
        watch(pulse, 2.0, {"running"})
    assert "lost" in watch(pulse, 2.0, {"running", "lost"})
    record.outcome = "done"
    write()
    assert pulse.state() == "done" == state_of(run, read_record(run))


def watch(pulse, seconds, expected):
    """Returns the states of so many seconds, which are all expected; the last one is `lost` if any is."""
    deadline, states = time.monotonic() + seconds, set()
    while time.monotonic() < deadline and "lost" not in states:
        states.add(pulse.state())
        time.sleep(0.05)
    assert states <= expected
    return states


def test_a_watcher_that_was_stopped_looks_again_before_it_judges(tmp_path):
    run, recorder, processes = make(tmp_path)
    recorder.write(processes, 0)
    pulse = Pulse(run, silence_s=1.2)
    assert pulse.state() == "running"
    time.sleep(1.5)
    assert pulse.state() == "running"


UNREADABLE = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
    "no file": lambda path: (path.unlink(), path.mkdir()),  # an error of the file system, as for a stale handle
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("spoil", UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_is_unknown(tmp_path, spoil):
    run, recorder, processes = make(tmp_path)
    recorder.write(processes, 1)
    for path in (run.status, run.processes):
        spoil(path)
    assert read_status(run, patience_s=0.1) == Status() and read_record(run) is None


def test_a_run_whose_records_cannot_be_read_goes_on(tmp_path):
    """Whatever cannot be read of them is unknown, as above."""
    run, recorder, processes = make(tmp_path)
    recorder.write(processes, 1)
    pulse, console = Pulse(run, silence_s=180), Console(run, Config(name="tiny", updates=120))
    assert pulse.state() == "running"
    for path in (run.status, run.processes):
        UNREADABLE["half"](path)
    assert pulse.state() == "running"
    console.refresh()


def test_what_cannot_be_read_for_a_moment_is_read_again(tmp_path):
    run, recorder, processes = make(tmp_path)
    recorder.write(processes, 1)
    whole = {path: path.read_bytes() for path in (run.status, run.processes)}
    for path, content in whole.items():
        path.write_bytes(b"")
        threading.Timer(0.3, path.write_bytes, [content]).start()
    assert read_status(run).phase == "training" and read_record(run).restarts_left == 1


def test_a_disk_that_takes_no_record_costs_a_line(tmp_path, capsys):
    run, recorder, processes = make(tmp_path)
    run.processes.mkdir()
    for code in (None, 0, 1):
        processes["engine-0"].exit_code = code
        recorder.write(processes, 1)
    assert capsys.readouterr().err.count("processes.json cannot be written") == 1
    run.processes.rmdir()
    recorder.write(processes, 1, "failed")
    recorder.write(processes, 1)
    assert read_record(run).outcome == "failed", "nothing is written after the end"
