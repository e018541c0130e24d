"""The lease on a run: real holders that live, end, are killed, stopped, on another machine, or many at once."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import msgspec
import psutil
import pytest

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.checkpoint.folder import newest
from areal_megatron.config import CheckpointConfig, Config, ConfigError, DataConfig, ModelConfig, config_file
from areal_megatron.launch.supervision import start
from areal_megatron.launch.supervision.lease import Lease, read
from areal_megatron.process.files import numbered, numbers
from areal_megatron.programs.audit import audit
from areal_megatron.run.folder import Replaced, RunFolder
from tests.conftest import ROOT, take_interrupts
from tests.unit.programs.test_audit import Past

HOLD = """
import sys, time
from areal_megatron.config import ConfigError
from areal_megatron.run.folder import Replaced, RunFolder
from areal_megatron.launch.supervision.lease import Lease
run = RunFolder(sys.argv[1])
try:
    with Lease(run, float(sys.argv[2])) as lease:
        lease.guard(int(sys.argv[3]))
        print("holds", lease.number, flush=True)
        while True:
            lease.check()
            time.sleep(0.05)
except (ConfigError, Replaced) as e:
    sys.exit(f"{type(e).__name__}: {e}")
except KeyboardInterrupt:
    pass
"""
RACE = """
import os, sys, time
from areal_megatron.config import ConfigError
from areal_megatron.run.folder import Replaced, RunFolder
from areal_megatron.launch.supervision import lease as leases
from tests.processes.launch.supervision.test_lease import note_checks, train
folder, log, where, work = sys.argv[1:]
if where == "elsewhere":
    leases._machine = lambda: f"the machine of {os.getpid()}"
with open(log, "a", buffering=1) as log:
    while True:
        run = RunFolder(folder)
        try:
            with leases.Lease(run, 1) as lease:
                print("took", lease.number, time.monotonic_ns(), file=log)
                {"note_checks": note_checks, "train": train}[work](run, lease, log)
        except Replaced:
            print("replaced", lease.number, 0, file=log)
        except ConfigError as e:
            assert "is being run by" in str(e) or "has not ended the processes" in str(e), e
"""


def note_checks(run, lease, log):
    """Notes when it may write, until it may not."""
    while True:
        lease.check()
        begun = time.monotonic_ns()
        run.check_current()
        print("may", lease.number, begun, file=log)
        time.sleep(0.01)


class Launched(Past):
    """What a launcher's processes write after it has taken the lease."""

    updates = 10**6

    def __init__(self, run):
        self.run, self.config = run, config_file.load(run.config)


def train(run, lease, log):
    """Begins where the newest checkpoint is, and trains and saves until it may not."""
    past = Launched(run)
    try:
        past.begin(start.newest(run))
        checkpoint_folder.remove_unfinished(run)
        while True:
            lease.check()
            past.train(1)
            if past.batches % 3 == 0:
                past.save()
                checkpoint_folder.tidy(run, CheckpointConfig(keep=2))
            time.sleep(0.02)
    except OSError:
        run.check_current()  # whoever replaced this one may have removed what it was about to finish
        raise


def race(run, folder, work, races):
    """Has four launchers, two of them on machines of their own, race for the lease. Mostly the holder is stopped or
    killed, until the lease has changed hands often enough. Returns the lines that they logged."""
    logs = [folder / f"log-{number}" for number in range(4)]

    def launch(number):
        where = "here" if number < 2 else "elsewhere"
        command = [sys.executable, "-c", RACE, run.folder, logs[number], where, work]
        return subprocess.Popen(command, cwd=ROOT, stderr=(folder / "errors").open("a"))

    racers, deadline = [launch(number) for number in range(4)], time.monotonic() + 60 + 6 * races
    try:
        while (newest := max(numbers(run.leases), default=0)) <= races:
            assert time.monotonic() < deadline, f"only {newest} leases in time"
            time.sleep(random.uniform(0, 1))
            holder = read(numbered(run.leases, newest)).process[0] if newest else 0
            victim = next((n for n in range(4) if racers[n].pid == holder and random.random() < 0.8), newest % 4)
            if random.random() < 0.3:
                racers[victim].kill()
            else:
                racers[victim].send_signal(signal.SIGSTOP)
                time.sleep(random.uniform(0, 3))
                racers[victim].send_signal(signal.SIGCONT)
            if racers[victim].poll() is not None:
                racers[victim] = launch(victim)
    finally:
        for racer in racers:
            racer.kill()
            racer.wait(10)
    assert (folder / "errors").read_text() == ""
    texts = [log.read_text() for log in logs if log.exists()]  # not of one that was killed before it began
    lines = [line.split() for text in texts for line in text.splitlines() if line.count(" ") == 2]
    return [(kind, int(number), int(at)) for kind, number, at in lines]


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "run")


@pytest.fixture
def starts(run):
    """starts() starts a process that takes the lease and holds it, and waits for its first line; ends it afterwards."""
    started = []

    def start(lease_s=90, guardian=0, line="holds", **options):
        command = [sys.executable, "-c", HOLD, run.folder, str(lease_s), str(guardian)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, **pipes, preexec_fn=take_interrupts, **options))
        if line:
            assert line in started[-1].stdout.readline()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def elsewhere(run):
    """Makes the newest lease one that was taken on another machine."""
    path = numbered(run.leases, max(numbers(run.leases)))
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(read(path), machine="another's")))


def taken(run, lease_s=90):
    """Takes the lease, returns its number and how long that took, and releases it."""
    begun = time.monotonic()
    with Lease(run, lease_s) as lease:
        return lease.number, time.monotonic() - begun


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_holder_that_lives_is_named_at_once(run, starts, where):
    holder = starts()
    if where == "elsewhere":
        elsewhere(run)
        time.sleep(1.5)
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=f"is being run by process {holder.pid} on .* since 2.*touch") as refused:
        Lease(run, 90)
    assert time.monotonic() - begun < 20 and "\n" not in str(refused.value)
    assert numbers(run.leases) == [1] and holder.poll() is None


def test_a_lease_is_released_at_the_end(run, starts):
    holder = starts()
    elsewhere(run)
    holder.send_signal(signal.SIGINT)
    assert holder.wait(10) == 0
    number, waited = taken(run)
    assert number == 2 and waited < 1


def test_one_whose_holder_was_killed_here_is_taken_over_at_once(run, starts):
    holder = starts()
    holder.kill()  # and not waited for: its parent may never look
    time.sleep(0.1)
    number, waited = taken(run)
    assert number == 2 and waited < 1


def test_the_processes_of_one_that_was_killed_end_first(run, starts):
    with subprocess.Popen(["sleep", "1000"]) as guardian:
        starts(guardian=guardian.pid).kill()
        threading.Timer(1.5, guardian.kill).start()
        number, waited = taken(run)
        assert number == 2 and waited > 1 and psutil.Process(guardian.pid).status() == psutil.STATUS_ZOMBIE


def test_one_whose_machine_is_gone_is_taken_over_after_its_silence(run, starts, capsys):
    starts().kill()
    elsewhere(run)
    number, waited = taken(run, lease_s=5)
    assert number == 2 and 5 <= waited < 8
    [line] = capsys.readouterr().out.splitlines()
    assert "does not say whether it lives: taking over in 2 s if it stays silent" in line


def test_one_that_hangs_here_is_ended_after_its_silence(run, starts, capsys):
    holder = starts()
    holder.send_signal(signal.SIGSTOP)
    number, waited = taken(run, lease_s=5)
    assert number == 2 and 5 <= waited < 8
    assert holder.wait(5) == -signal.SIGKILL and f"ended process {holder.pid}" in capsys.readouterr().out


def test_a_copy_of_a_run_does_not_end_the_launcher_of_the_run(run, starts, tmp_path):
    holder = starts()
    holder.send_signal(signal.SIGSTOP)
    shutil.copytree(run.folder, tmp_path / "copy")
    assert taken(RunFolder(tmp_path / "copy"), lease_s=1)[0] == 2
    holder.send_signal(signal.SIGCONT)
    with pytest.raises(ConfigError, match="is being run"):
        Lease(run, 90)


def test_a_holder_that_was_stopped_and_replaced_ends_with_one_line(run, starts):
    holder = starts()
    elsewhere(run)
    holder.send_signal(signal.SIGSTOP)
    with Lease(run, 1):
        holder.send_signal(signal.SIGCONT)
        error = holder.communicate(timeout=10)[1]
    assert f"Replaced: {run.folder} was started again by process {os.getpid()} on" in error
    assert error.count("\n") == 1


def test_a_replaced_launcher_begins_nothing_and_its_processes_write_nothing(run):
    with Lease(run, 90) as lease:
        run.begin()
        old = RunFolder(run.folder, incarnation=0)
        engine = RunFolder(run.folder, lease=lease.number)
        run.begin()
        engine.announce("engine-0", "http://127.0.0.1:1")
        old = RunFolder(run.folder, incarnation=1)
        old.check_current()
        numbered(run.leases, 2).write_bytes(numbered(run.leases, 1).read_bytes())
        for refused in (run.begin, old.check_current, lambda: engine.announce("engine-0", "http://127.0.0.1:2")):
            with pytest.raises(Replaced):
                refused()
        time.sleep(1.5)
        with pytest.raises(Replaced):
            lease.check()
        assert len(run.starts()) == 2


def test_an_incarnation_begun_at_the_last_moment_by_one_that_was_replaced_is_followed_by_another(run):
    """It passed its check just before the next lease was taken, and was stopped there."""
    with Lease(run, 90):
        run.begin()
    last = RunFolder(run.folder)
    last.hold(1)
    with Lease(run, 90):
        last.check_lease = lambda: None
        last.begin()
        run.begin(version=5)
        assert [(start.lease, start.version) for start in run.starts()] == [(1, 0), (1, 0), (2, 5)]
        RunFolder(run.folder, incarnation=2).check_current()
        with pytest.raises(Replaced):
            RunFolder(run.folder, incarnation=1).check_current()


def test_of_several_that_wait_one_gets_the_lease(run, starts):
    holder = starts()
    elsewhere(run)
    holder.send_signal(signal.SIGSTOP)
    waiting = [starts(lease_s=6, line="") for _ in range(3)]
    assert all("was left by" in process.stdout.readline() for process in waiting)
    time.sleep(6)
    ended = [process for process in waiting if process.poll() is not None]
    assert len(ended) == 2 and numbers(run.leases) == [1, 2]
    [winner] = [process for process in waiting if process not in ended]
    assert all(f"is being run by process {winner.pid} on" in process.communicate()[1] for process in ended)


def test_time_in_which_a_waiting_start_was_stopped_itself_does_not_count(run, starts):
    holder = starts()
    elsewhere(run)
    holder.send_signal(signal.SIGSTOP)
    waiting = starts(lease_s=5, line="taking over in 2 s")
    waiting.send_signal(signal.SIGSTOP)
    time.sleep(4)
    for process in (holder, waiting):
        process.send_signal(signal.SIGCONT)
    assert f"is being run by process {holder.pid}" in waiting.communicate(timeout=10)[1]


def test_a_full_disk_does_not_silence_a_holder(run, starts):
    holder = starts()
    resource.prlimit(holder.pid, resource.RLIMIT_FSIZE, (0, 0))
    before = numbered(run.leases, 1).stat().st_mtime
    time.sleep(2.5)
    assert numbered(run.leases, 1).stat().st_mtime >= before + 1


def test_a_damaged_lease_is_named(run):
    run.create()
    numbered(run.leases, 1).write_text("")
    words = r"leases/00001\.json is of another release or damaged: .*; remove it if no launcher runs"
    with pytest.raises(ConfigError, match=words):
        Lease(run, 90)


RACES = [4, pytest.param(50, marks=pytest.mark.soak)]


@pytest.mark.parametrize("races", RACES)
def test_never_may_two_write(run, tmp_path, races):
    run.create()
    events = race(run, tmp_path, "note_checks", races)
    took = {number: at for kind, number, at in events if kind == "took"}
    assert len([number for kind, number, _ in events if kind == "took"]) == len(took), "two took the same lease"
    allowed = [(number, at) for kind, number, at in events if kind == "may"]
    replaced = sum(kind == "replaced" for kind, _, _ in events)
    print(f"{len(took)} leases, {len(allowed)} checks passed, {replaced} launchers were replaced alive")
    for number, at in allowed:
        assert not any(other > number and at > taken_at for other, taken_at in took.items()), "it had been replaced"
    assert len(took) >= races * 0.7 and len(allowed) > 100


@pytest.mark.parametrize("races", RACES)
def test_a_run_that_launchers_race_for_is_clean(tmp_path, races):
    """Each trains from the newest checkpoint on until it is stopped, killed or replaced."""
    run = Past(tmp_path).run
    events = race(run, tmp_path, "train", races)
    replaced = sum(kind == "replaced" for kind, _, _ in events)
    (_, last), checkpoint = max((start.incarnation, start) for start in run.starts()), newest(run)[0]
    print(f"{len(run.starts())} incarnations, {checkpoint.batches} batches, {replaced} launchers were replaced alive")
    assert audit(run) == []
    assert last.batches > 10 and checkpoint.batches >= last.batches


def config(folder, **changes):
    keys = {"name": "run", "updates": 1, "model": ModelConfig(path="m"), "data": DataConfig(train="t")}
    return Config(runs_dir=str(folder), **(keys | changes))


def test_a_run_that_never_began_leaves_no_folder(run, tmp_path):
    with pytest.raises(ConfigError, match="no model"), start.lease(config(tmp_path)):
        raise ConfigError("no model")
    assert not run.folder.exists()
    with start.lease(config(tmp_path)) as lease:
        lease.run.begin()
    assert run.folder.exists()
    with pytest.raises(ConfigError, match="resume=auto"), start.lease(config(tmp_path)):
        pass
    with start.lease(config(tmp_path, resume="auto")):
        pass
    assert len(run.starts()) == 1


def test_a_run_is_its_users_alone_whatever_the_umask(run):
    before = os.umask(0o002)
    try:
        run.create()
    finally:
        os.umask(before)
    files = {path.name: path.stat().st_mode & 0o777 for path in run.folder.iterdir() if path.is_file()}
    folders = [path.stat().st_mode & 0o777 for path in (run.folder, *run.folder.iterdir()) if path.is_dir()]
    private = "secret", "controller.key", "trainers.key", "site.pem", "agents.pem"
    assert files == dict.fromkeys(private, 0o600) and set(folders) == {0o700}
    assert not run.make_private()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda run: run.folder.chmod(0o775), r"others may write .*/run: forbid it with 'chmod -R go-w "),
        (
            lambda run: run.folder.chmod(0o711) or (run.folder / "endpoints").chmod(0o777),
            "others may write .*/endpoints",
        ),
        (
            lambda run: run.folder.chmod(0o750) or run.config.touch() or run.config.chmod(0o664),
            "others may write .*/config.yaml",
        ),
        (
            lambda run: (run.folder / "secret").rename(run.folder / "s") and (run.folder / "secret").symlink_to("s"),
            "secret is not a file of this user",
        ),
        (
            lambda run: (run.folder / "secret").unlink() or os.mkfifo(run.folder / "secret", 0o600),
            "secret is not a file of this user",
        ),
        pytest.param(
            lambda run: os.chown(run.folder / "secret", 65534, 65534),
            "secret is not a file of this user",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
        pytest.param(
            lambda run: os.chown(run.folder / "incarnations", 65534, 65534),
            "incarnations belongs to another user",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
    ],
)
def test_a_run_that_others_may_change_is_refused(run, tmp_path, spoil, words):
    run.create()
    spoil(run)
    with pytest.raises(ConfigError, match=words) as refused, start.lease(config(tmp_path, resume="auto")):
        pass
    assert "\n" not in str(refused.value) and not numbers(run.leases)


@pytest.mark.parametrize("share", ["a+r", "g+w", "a+rw", "a+rX"])
def test_rights_that_chmod_has_given_are_taken_back(run, tmp_path, capsys, share):
    run.create()
    (run.checkpoints / "version-000002").mkdir()
    (run.checkpoints / "link").symlink_to(tmp_path)
    subprocess.run(["chmod", "-R", share, run.folder], check=True)
    tmp_path.chmod(0o722)
    with start.lease(config(tmp_path, resume="auto")):
        secret = {path.name: path.stat().st_mode & 0o777 for path in run.folder.iterdir() if path.is_file()}
    said = capsys.readouterr().err
    assert set(secret.values()) == {0o600} and said.count("\n") == 1 and "others had rights on " in said
    assert ("whoever has read a secret" in said) == (share == "a+rX"), "others could enter the folder"
    written = (run.folder, run.incarnations, run.leases, run.checkpoints / "version-000002")
    assert all(not path.stat().st_mode & 0o022 for path in written)
    assert tmp_path.stat().st_mode & 0o777 == 0o722, "what a link leads to is not the run's"


def test_each_launcher_makes_a_secret_of_its_own(run):
    run.create()
    first = run.token
    run.renew_secret()
    assert len(first) == len(run.token) == 64 and first != run.token
    assert (run.folder / "secret").stat().st_mode & 0o777 == 0o600
