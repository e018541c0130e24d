"""What the launcher's loop does while it has to wait, and after failures: with real processes of a few lines."""

import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.config import Config
from areal_megatron.launch.supervision import recorder, start, supervise
from areal_megatron.launch.supervision.hosts import Here
from areal_megatron.launch.supervision.lease import Lease
from areal_megatron.launch.supervision.start import Beginning
from areal_megatron.launch.supervision.supervise import Outcome
from areal_megatron.observe.records import read_record
from areal_megatron.planning.memory import plan_memory
from areal_megatron.planning.plan import ClusterPlan
from areal_megatron.planning.pools import Node, Placement, Process
from areal_megatron.programs.closing import closing
from areal_megatron.run.folder import RunFolder
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


class Scripted(Here):
    """Runs programs in place of a run's processes, each told how often it was started before."""

    def __init__(self, **programs):
        super().__init__()
        self._programs, self.starts = programs, Counter()

    def start(self, order):
        program = "import os, sys, time, pathlib; n, status = int(sys.argv[1]), pathlib.Path(sys.argv[2]);"
        command = [sys.executable, "-c", program + self._programs[order.name.partition("-")[0]]]
        status = Path(order.log).parent.parent / "status.json"
        order.command, order.cores = [*command, str(self.starts[order.name]), str(status)], []
        self.starts[order.name] += 1
        super().start(order)


WAIT = "time.sleep(60)"


def supervised(tmp_path, hosts, restarts, engines=0):
    run = RunFolder(tmp_path / "run")
    run.create()
    run.begin()
    names = ["controller", "trainer-0", *(f"engine-{n}" for n in range(engines))]
    pools = {"engine": "rollout"}
    processes = (Process(n, pools.get(p := n.partition("-")[0], p), 0, "n", ()) for n in names)
    config = Config(name="run", updates=1)
    plan = ClusterPlan(Placement((Node("n", (0,)),), tuple(processes)), plan_memory(config, CONFIG))
    options = start.parser("areal_megatron.launch.local", "").parse_args(["config", f"--restarts={restarts}"])
    with Lease(run, 90) as lease:
        return supervise.supervise(Beginning(config, run, plan, None), hosts, options, lease)


REFUSES = "print('error: rollout.max_running: 5', flush=True)"


@pytest.mark.parametrize("refusing", ["controller", "trainer"])
def test_what_a_process_refuses_ends_the_run_at_once(tmp_path, signals, capsys, refusing):
    """It cannot mend itself: restarts are for what can."""
    hosts = Scripted(**{"controller": WAIT, "trainer": WAIT} | {refusing: f"{REFUSES}; sys.exit(2)"})
    assert supervised(tmp_path, hosts, restarts=20) == Outcome.REFUSED == 2
    said = capsys.readouterr().err
    assert max(hosts.starts.values()) == 1 and said.count("rollout.max_running: 5") == 1 and said.count("\n") == 1
    assert read_record(RunFolder(tmp_path / "run")).outcome == "refused"


@pytest.mark.parametrize(
    "program",
    [
        "raise ValueError(f'heads of 16, at {id(sys):#x} after {time.time()} s')",
        "print(n, flush=True); os.abort()",
        "sys.exit(1)",
        "raise [ValueError, KeyError][n % 2]('eos')",
        "sys.exit(1) if n % 2 == 0 else os.kill(os.getpid(), 9)",
    ],
)
def test_a_failure_that_repeats_by_itself_ends_the_run_after_two_tries(tmp_path, signals, capsys, program):
    """Each of several causes by turns, too."""
    hosts = Scripted(controller=WAIT, trainer=program)
    assert supervised(tmp_path, hosts, restarts=20) == Outcome.REFUSED
    assert hosts.starts["trainer-0"] == (3 if "%" in program else 2)
    assert "twice in the same way and at the same point" in capsys.readouterr().err.splitlines()[-1]


class Unstartable(Here):
    """A trainer that the system does not start."""

    def __init__(self, change):
        super().__init__()
        self._change, self.starts = change, 0

    def start(self, order):
        order.command, order.cores = [sys.executable, "-c", "import time; time.sleep(60)"], []
        if order.name == "trainer-0":
            self.starts += 1
            self._change(order)
        super().start(order)


def without_log(order):
    order.log += "/of/nothing"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda order: order.command.__setitem__(0, "/no/such"), "/no/such cannot be started: [Errno 2] "),
        (without_log, "cannot be started: [Errno 2] "),
    ],
)
def test_what_cannot_be_started_is_tried_twice(tmp_path, signals, capsys, change, says):
    hosts = Unstartable(change)
    assert supervised(tmp_path, hosts, restarts=20) == Outcome.REFUSED and hosts.starts == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_real_time_signals_are_named_by_their_numbers(tmp_path, signals, capsys):
    hosts = Scripted(controller=WAIT, trainer="os.kill(os.getpid(), 35)")
    assert supervised(tmp_path, hosts, restarts=0) == Outcome.FAILED
    assert "trainer-0 was killed by signal 35" in capsys.readouterr().err


def test_an_engine_that_fails_by_itself_is_started_twice_whatever_others_train(tmp_path, signals, capsys):
    counts = "import json\nfor i in range(600): status.write_text(json.dumps(dict(phase='training', version=i)));"
    dies = "time.sleep(1); raise RuntimeError('head_dim=16')"
    hosts = Scripted(controller=f"{counts} time.sleep(0.1)", trainer=WAIT, engine=dies)
    assert supervised(tmp_path, hosts, restarts=20, engines=1) == Outcome.REFUSED
    assert hosts.starts == {"controller": 1, "trainer-0": 1, "engine-0": 2}
    assert "engine-0 ended with exit code 1: RuntimeError: head_dim=16" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "program",
    [
        "os.kill(os.getpid(), 9)",  # as from outside
        "status.write_text('{\"version\": %d}' % n); raise ValueError('once in a while')",  # after progress
        "raise [ValueError, KeyError, OSError, EOFError][n]('another each time')",
    ],
)
def test_other_failures_use_up_their_restarts(tmp_path, signals, program):
    hosts = Scripted(controller=WAIT, trainer=program)
    assert supervised(tmp_path, hosts, restarts=3) == Outcome.FAILED == 1
    assert hosts.starts["trainer-0"] == 4


def test_an_engine_that_fails_while_the_run_folder_is_away_is_started_when_it_is_back(tmp_path, signals, capsys):
    """Alone, and without using up a restart, of which there is none."""
    moved, over = tmp_path / "moved", f"pathlib.Path({str(tmp_path / 'over')!r})"
    until_over = f"\nwhile not {over}.exists(): time.sleep(0.1)"
    goes_away = f"time.sleep(0.5); os.rename(status.parent, {str(moved)!r}); sys.exit(1)"
    hosts = Scripted(
        controller=f'status.write_text(\'{{"phase": "training"}}\');{until_over}',
        trainer=until_over,
        engine=f"\nif n: {over}.touch(); {WAIT}\nelse: {goes_away}",
    )

    def come_back():
        while not moved.exists():
            time.sleep(0.05)
        time.sleep(2)
        moved.rename(tmp_path / "run")

    coming_back = threading.Thread(target=come_back)
    coming_back.start()
    assert supervised(tmp_path, hosts, restarts=0, engines=1) == Outcome.DONE
    coming_back.join()
    assert hosts.starts == {"controller": 1, "trainer-0": 1, "engine-0": 2}
    assert "it is not there (renamed, unmounted or cleared?); the run goes on when it can" in capsys.readouterr().err


READS_SECRET = "from areal_megatron.run.folder import RunFolder; RunFolder(status.parent).token; time.sleep(1 - n);"


@pytest.mark.parametrize("share", ["a+r", "g+w"])
def test_sharing_the_logs_does_not_end_the_run(tmp_path, signals, share):
    shares = f"n or (os.system(f'chmod -R {share} {{status.parent}}'), os.kill(os.getpid(), 9))"
    hosts = Scripted(controller=f"{READS_SECRET} time.sleep(60 - 60 * n)", trainer=f"{READS_SECRET} {shares}")
    assert supervised(tmp_path, hosts, restarts=1) == Outcome.DONE
    assert hosts.starts == {"controller": 2, "trainer-0": 2}


def test_records_go_on_while_the_launcher_waits(tmp_path, monkeypatch, signals):
    monkeypatch.setattr(recorder, "RECORD_S", 0.2)
    run = RunFolder(tmp_path / "run")
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
    options = start.parser("areal_megatron.launch.local", "").parse_args(["config"])
    begin = time.time()
    with Lease(run, 90) as lease:
        assert supervise.supervise(beginning, Slow(), options, lease) == Outcome.DONE
    looking.join(10)
    assert read_record(run).outcome == "done"
    assert len([at for at in times if at < begin + 2.5]) >= 3


def test_a_launcher_closes_with_what_was_kept_and_what_to_do_next(tmp_path, signals, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert supervised(tmp_path, Scripted(controller=WAIT, trainer=f"{REFUSES}; sys.exit(2)"), 0) == Outcome.REFUSED
    look = "look    areal status --web run   or, as one file to pass on, areal report run"
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "kept    no checkpoint; metrics and logs in run",
        "again   the same command with resume=auto, from the beginning",
        look,
    ]


def test_the_closing_lines_name_checkpoint_model_and_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, config = RunFolder(tmp_path / "runs" / "my run"), Config(name="my run", updates=40)
    run.create()
    run.begin()
    driven = Config(name="my run", mode="driven")
    assert [line[:4] for line in closing(run, driven, True, "areal train c.yaml").splitlines()] == ["kept", "look"]
    partial = checkpoint_folder.partial(run, 20)
    (partial / "trainer").mkdir(parents=True)
    (partial / "trainer" / "__0_0.distcp").write_bytes(b"state")
    checkpoint_folder.seal(run, 20, 20)
    kept = "kept    checkpoint 'runs/my run/checkpoints/version-000020'"
    assert closing(run, config, False, "areal train 'c d.yaml' updates=40").splitlines()[:2] == [
        kept,
        "resume  areal train 'c d.yaml' updates=40 resume=auto",
    ]
    assert closing(run, driven, True, "").splitlines()[:2] == [kept, "resume  the same program with resume=auto"]
    run.hf.mkdir()
    (run.hf / "config.json").touch()
    assert closing(run, config, True, "areal train 'c d.yaml' updates=40").splitlines() == [
        f"{kept}, the model for transformers and vLLM in 'runs/my run/hf'",
        "go on   areal train 'c d.yaml' resume=auto updates=80",
        "look    areal status --web 'runs/my run'   or, as one file to pass on, areal report 'runs/my run'",
    ]
