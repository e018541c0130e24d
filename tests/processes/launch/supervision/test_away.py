"""A run folder that is renamed, replaced, unmounted or cleared while a launcher and its writers are at work.

The writer below is a launcher with its lease and what a run writes: metrics, ledger, status and sealed checkpoints.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.launch.supervision import lease as lease_module
from areal_megatron.launch.supervision import start
from areal_megatron.launch.supervision.lease import Holder, Lease
from areal_megatron.process.files import numbers
from areal_megatron.run.folder import Away, RunFolder
from tests.conftest import take_interrupts
from tests.support import failing_disk
from tests.support.small_disk import run_on_small_disk

ROOT = Path(__file__).parents[4]
LEASE_S = 0.5
"""Less than a beat: the first look that finds the folder away ends the run."""
WRITER = """
import logging, os, sys, threading, time
from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.config import CheckpointConfig, Config, ConfigError
from areal_megatron.process.files import numbers
from areal_megatron.observe.background import AppendedFile
from areal_megatron.observe.metrics import MetricsWriter, StatusWriter
from areal_megatron.run.folder import Replaced, RunFolder
from areal_megatron.launch.supervision import start

def write(run, version):
    '''What trainers, controller and launcher write, as they write it.'''
    metrics, status = MetricsWriter(run), StatusWriter(run)
    ledger = AppendedFile(run.ledger(0), kept=True, check=run.look)
    while True:
        version += 1
        metrics.write("update", version, {})
        status.write({"phase": "training", "version": version})
        ledger.write(b"%d\\n" % version)
        try:
            run.check_current()
            partial = checkpoint_folder.partial(run, version)
            for folder in (partial, partial / "trainer"):
                folder.mkdir(exist_ok=True)
            (partial / "trainer" / "__0_0.distcp").write_bytes(b"%d" % version)
            (partial / "controller.msgpack").write_bytes(b"state")
            checkpoint_folder.seal(run, version, version)
            checkpoint_folder.tidy(run, CheckpointConfig(keep=10**6))
        except OSError:
            pass  # this one is lost, and training goes on
        except Replaced:
            return
        time.sleep(0.05)

parent = os.getppid()
logging.basicConfig(filename=sys.argv[1] + ".log")
config = Config(name=sys.argv[2], runs_dir=sys.argv[1], resume="auto")
config.machine.lease_s = float(sys.argv[3])
try:
    with start.lease(config) as lease:
        run = lease.run
        checkpoint = start.newest(run)
        start.begin(run, checkpoint)
        version = checkpoint.version if checkpoint else 0
        worker = RunFolder(run.folder, incarnation=run.incarnation)
        checkpoint_folder.remove_unfinished(worker)
        threading.Thread(target=write, args=(worker, version), daemon=True).start()
        print("begun at", version, flush=True)
        while os.getppid() == parent:
            lease.check()
            time.sleep(0.05)
except (ConfigError, Replaced) as e:
    print(f"error: {e}", file=sys.stderr)
    sys.exit(2 if isinstance(e, ConfigError) else 4)
except KeyboardInterrupt:
    sys.exit(130)
"""


def renamed(run):
    os.rename(run, run.with_name("moved"))
    return run.with_name("moved")


def renamed_and_replaced_by_nothing(run):
    moved = renamed(run)
    run.mkdir()
    return moved


def replaced_by_a_copy(run):
    """As of a folder that is moved to another disk."""
    with suppress(shutil.Error):  # what was renamed meanwhile
        shutil.copytree(run, run.with_name("copy"))
    moved = renamed(run)
    os.rename(run.with_name("copy"), run)
    return moved


def runs_folder_renamed(run):
    os.rename(run.parent, run.parent.with_name("runs.away"))
    return run.parent.with_name("runs.away") / run.name


def moved_aside(name):
    def move(run):
        os.rename(run / name, run / f"{name}.away")
        return run

    return move


def checkpoints_moved_aside(run):
    time.sleep(2 * lease_module.BEAT_S)  # the launcher has seen that there are some
    return moved_aside("checkpoints")(run)


def checkpoints_unmounted(run):
    """As where they are on a disk of their own, whose mount point is empty."""
    checkpoints_moved_aside(run)
    (run / "checkpoints").mkdir()
    return run


def cleared(name):
    def clear(run):
        for path in (run / name).iterdir():
            path.unlink()
        return run

    return clear


CHANGES = {
    "renamed": renamed,
    "renamed, an empty folder in its place": renamed_and_replaced_by_nothing,
    "a copy in its place": replaced_by_a_copy,
    "the folder of runs renamed": runs_folder_renamed,
    "incarnations/ cleared": cleared("incarnations"),
    "incarnations/ moved aside": moved_aside("incarnations"),
    "leases/ cleared": cleared("leases"),
    "leases/ moved aside": moved_aside("leases"),
    "checkpoints/ moved aside": checkpoints_moved_aside,
    "checkpoints/ unmounted": checkpoints_unmounted,
}


STARTED = []


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    while STARTED:
        STARTED.pop().kill()


def begin(runs, lease_s=LEASE_S, environment=os.environ):
    runs.mkdir(exist_ok=True)
    command = [sys.executable, "-c", WRITER, runs, "run", str(lease_s)]
    pipe = subprocess.PIPE
    writer = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True, preexec_fn=take_interrupts
    )
    STARTED.append(writer)
    while not (line := writer.stdout.readline()).startswith("begun at"):
        assert line.startswith("resuming from"), writer.communicate(timeout=60)[1]
    return writer, int(line.split()[-1])


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def sealed(folder):
    """Versions of the checkpoints that are sealed in a run folder, each of which must be whole."""
    return {checkpoint_folder.read(path).version for path in folder.glob("checkpoints*/version-*")}


def everything(folder):
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*")) if folder.exists() else None


def sizes(folder):
    return {path: path.stat().st_size for path in folder.rglob("*")}


def lose(runs, change):
    """Has a run lose its folder at a random moment. Returns the writer, ended, and where the folder is now."""
    run = runs / "run"
    writer, _ = begin(runs)
    wait_for(lambda: len(sealed(run)) >= 2)
    time.sleep(random.uniform(0, 0.5))
    before = sealed(run)
    place = change(run)
    other = run if place != run else None
    time.sleep(0.2)  # a write that had passed its check just before
    seen = everything(other) if other else None
    out, told = writer.communicate(timeout=60)
    assert other is None or everything(other) == seen, "something was written at the old path"
    assert before <= sealed(place), "a sealed checkpoint is lost"
    return writer, out, told, place


def come_back(runs, place):
    """Puts everything back. Returns the versions of the checkpoints that are there now."""
    run = runs / "run"
    for name in ("incarnations", "leases", "checkpoints"):
        if (away := place / f"{name}.away").exists():
            with suppress(FileNotFoundError):
                (place / name).rmdir()  # nothing was written into it
            os.rename(away, place / name)
    if place != run:
        if run.exists():
            shutil.rmtree(run)
        if place.parent != runs:
            with suppress(OSError):
                runs.rmdir()
            os.rename(place.parent, runs)
        else:
            os.rename(place, run)
    return sealed(run)


def check(runs, change):
    writer, out, told, place = lose(runs, change)
    assert runs.with_suffix(".log").read_text().count("nothing is written until it is back") <= 2
    assert writer.returncode == 4, told
    assert told.count("\n") == 2 and "Traceback" not in told and "warning" not in out, told
    assert str(runs / "run") in told and "nothing is written until it is back" in told and "resume=auto" in told
    there = come_back(runs, place)
    again, version = begin(runs)
    assert version == max(there)
    ledger = runs / "run" / "ledger"
    wait_for(lambda: max(sealed(runs / "run")) > version and len([*ledger.iterdir()]) == 2)
    again.send_signal(signal.SIGINT)
    again.communicate(timeout=60)
    assert again.returncode == 130 and there <= sealed(runs / "run")
    assert {path.name for path in ledger.iterdir()} == {"trainer-0.00000.jsonl", "trainer-0.00001.jsonl"}


QUICK = ("renamed", "a copy in its place", "incarnations/ cleared", "leases/ moved aside", "checkpoints/ unmounted")


@pytest.mark.parametrize("change", QUICK)
def test_a_run_whose_folder_goes_away_writes_nothing_ends_and_resumes(tmp_path, change):
    check(tmp_path / "runs", CHANGES[change])


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_run_whose_folder_goes_away_at_200_random_moments(tmp_path):
    """Six at a time: they mostly wait."""
    changes = [change for change in CHANGES.values() for _ in range(200 // len(CHANGES))]
    places = [tmp_path / f"{number}" / "runs" for number in range(len(changes))]
    for place in places:
        place.parent.mkdir()
    with ThreadPoolExecutor(6) as pool:
        for _ in pool.map(check, places, changes):
            pass


SOAK = [pytest.param(change, marks=pytest.mark.soak) for change in (runs_folder_renamed, moved_aside("incarnations"))]


@pytest.mark.parametrize("change", [renamed, moved_aside("leases"), *SOAK])
def test_a_run_whose_folder_comes_back_goes_on_as_if_nothing_had_been(tmp_path, change):
    runs = tmp_path / "runs"
    writer, _ = begin(runs, lease_s=30)
    wait_for(lambda: sealed(runs / "run"))
    place = change(runs / "run")
    wait_for(lambda: "nothing is written" in writer.stderr.readline())
    there = come_back(runs, place)
    wait_for(lambda: max(sealed(runs / "run")) > max(there))
    assert "is back after" in writer.stderr.readline()
    writer.send_signal(signal.SIGINT)
    _, told = writer.communicate(timeout=60)
    assert writer.returncode == 130 and there <= sealed(runs / "run")
    assert not told, told
    written = (runs / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(written) == len({line.split('"version"')[1] for line in written}), "no line was written twice"


UNMOUNTED = f"""
import os, subprocess, sys, time
from pathlib import Path
runs, disk, root = map(Path, sys.argv[1:])
sys.path.insert(0, str(root))
os.chdir(root)
from tests.processes.launch.supervision import test_away as away
subprocess.run(["mount", "--bind", disk, runs], check=True)
away.ROOT = root
writer, _ = away.begin(runs, lease_s={LEASE_S})
away.wait_for(lambda: len(away.sealed(runs / "run")) >= 2)
before = away.sealed(runs / "run")
subprocess.run(["umount", "--lazy", runs], check=True)
_, told = writer.communicate(timeout=60)
assert writer.returncode == 4 and told.count("\\n") == 2, told
assert not list(runs.iterdir()), "made again below the mount point"
subprocess.run(["mount", "--bind", disk, runs], check=True)
assert before <= away.sealed(runs / "run")
again, version = away.begin(runs)
assert version == max(away.sealed(runs / "run")) or version in away.sealed(runs / "run")
again.kill()
"""


def test_a_run_whose_file_system_is_unmounted_makes_nothing_below_the_mount_point(tmp_path):
    for name in ("runs", "disk"):
        (tmp_path / name).mkdir()
    code, _, told = run_on_small_disk(
        tmp_path / "small", 64, UNMOUNTED, tmp_path / "runs", tmp_path / "disk", ROOT, timeout_s=90
    )
    assert code == 0, told


@pytest.mark.parametrize("seconds", [4 * LEASE_S, pytest.param(30, marks=pytest.mark.soak)])
def test_a_file_server_that_is_away_is_waited_for(tmp_path, seconds):
    """Everything below the folder of runs fails with EIO meanwhile, for the launcher and its writers."""
    runs = tmp_path / "runs"
    with failing_disk.below(tmp_path, runs) as disk:
        writer, _ = begin(runs, environment=disk.environment)
        wait_for(lambda: len(sealed(runs / "run")) >= 2)
        disk.fail()
        time.sleep(0.5)  # what had been opened before
        before = sizes(runs)
        time.sleep(seconds)
        assert writer.poll() is None, "it cannot be told whether the folder is away"
        assert sizes(runs) == before
        disk.mend()
        there = sealed(runs / "run")
        wait_for(lambda: max(sealed(runs / "run")) > max(there))
        writer.send_signal(signal.SIGINT)
        _, told = writer.communicate(timeout=60)
    assert writer.returncode == 130 and there <= sealed(runs / "run") and not told, told
    written = (runs / "run" / "metrics.jsonl").read_text().splitlines()
    versions = [json.loads(line)["version"] for line in written]
    assert versions == list(range(1, len(versions) + 1)), "no line is missing, none is there twice"


def settings(runs, **changes):
    return Config(name="run", runs_dir=str(runs), **changes)


def test_a_start_that_never_began_leaves_no_folder_and_removes_nothing_else(tmp_path):
    with start.lease(settings(tmp_path)):
        pass
    assert not list(tmp_path.iterdir())
    with start.lease(settings(tmp_path)):
        (tmp_path / "run" / "notes.txt").write_text("of somebody")
    assert (tmp_path / "run" / "notes.txt").read_text() == "of somebody"


def test_a_launcher_removes_nothing_of_a_folder_that_took_the_place_of_its_own(tmp_path):
    with start.lease(settings(tmp_path)):
        os.rename(tmp_path / "run", tmp_path / "moved")
        (tmp_path / "run" / "incarnations").mkdir(parents=True)
    assert (tmp_path / "run" / "incarnations").exists() and (tmp_path / "moved" / "secret").exists()


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run with two sealed checkpoints, whose launcher has ended."""
    runs = tmp_path_factory.mktemp("ended") / "runs"
    writer, _ = begin(runs)
    wait_for(lambda: len(sealed(runs / "run")) >= 2)
    writer.send_signal(signal.SIGINT)
    writer.communicate(timeout=60)
    return runs / "run"


@pytest.fixture
def past(ended, tmp_path):
    """The same, to be changed."""
    return shutil.copytree(ended, tmp_path / "runs" / "run")


def test_a_run_without_records_of_its_incarnations_is_not_begun_anew(past):
    cleared("incarnations")(past)
    with pytest.raises(ConfigError, match="exists: choose another"), start.lease(settings(past.parent)):
        pass
    there = sealed(past)
    again, version = begin(past.parent)
    again.kill()
    again.communicate(timeout=60)
    assert version == max(there) and numbers(past / "incarnations") == [1], "0 was given already"


def test_a_run_whose_checkpoints_are_away_is_refused(past):
    moved_aside("checkpoints")(past)
    with (
        pytest.raises(ConfigError, match="checkpoints is not there although"),
        start.lease(settings(past.parent, resume="auto")) as lease,
    ):
        start.newest(lease.run)
    assert not (past / "checkpoints").exists()


def test_a_run_that_has_saved_checkpoints_and_has_none_is_not_begun_anew(past):
    checkpoints_unmounted(past)
    (past / "metrics.jsonl").write_text(
        '{"time": 1, "kind": "checkpoint", "version": 2, "failed": 0}\n'
        '{"time": 2, "kind": "checkpoint", "version": 4, "failed": 1, "error": "no room"}\n'
    )
    auto = settings(past.parent, resume="auto")
    with pytest.raises(ConfigError, match=r"is empty although that of version 2 was saved"), start.lease(auto) as lease:
        start.newest(lease.run)
    (past / "metrics.jsonl").write_text('{"time": 2, "kind": "checkpoint", "version": 4, "failed": 1}\n')
    with start.lease(auto) as lease:
        assert start.newest(lease.run) is None, "it ended before its first checkpoint"


def test_what_this_code_did_not_make_stays_beside_the_checkpoints(past):
    """A replaced checkpoint that was not put back is the last of its version; snapshots of the file server are its."""
    version = max(sealed(past))
    folder = past / "checkpoints" / f"version-{version:06d}"
    os.rename(folder, folder.with_name(f".{folder.name}.replaced"))
    (past / "checkpoints" / ".snapshot").mkdir()
    (past / "checkpoints" / ".version-000009.incarnation-0.partial").mkdir()
    checkpoint_folder.remove_unfinished(RunFolder(past, incarnation=0))
    assert version in sealed(past) and (past / "checkpoints" / ".snapshot").exists()
    assert not (past / "checkpoints" / ".version-000009.incarnation-0.partial").exists()


def test_a_process_that_is_bound_to_a_folder_tells_that_it_is_away(past):
    run = RunFolder(past, incarnation=0)
    run.look()
    renamed(past)
    with pytest.raises(Away, match="it is not there"):
        run.look()
    past.mkdir()
    with pytest.raises(Away, match="another folder is in its place"):
        run.look()


def test_a_start_that_waits_makes_no_folder_where_that_of_its_run_was(past):
    """It would begin anew there, from model.path, as if there had never been a run."""
    elsewhere = Holder.here(past / "leases")
    elsewhere.machine = "another"
    (past / "leases" / "00001.json").write_bytes(msgspec.json.encode(elsewhere))
    os.utime(past / "leases" / "00001.json", (7, 7))
    moving = threading.Timer(0.7, renamed, [past])
    moving.start()
    config = settings(past.parent, resume="auto")
    config.machine.lease_s = 1.5
    with pytest.raises(ConfigError, match="went away"), start.lease(config):
        pass
    moving.join()
    assert not past.exists() and sealed(past.with_name("moved"))


def test_a_start_that_never_began_leaves_a_folder_with_files_of_others_as_it_was(tmp_path):
    with start.lease(settings(tmp_path)):
        before = sorted((tmp_path / "run").rglob("*"))
        (tmp_path / "run" / "leases" / "notes.txt").write_text("of somebody")
    assert sorted((tmp_path / "run").rglob("*")) == sorted([*before, tmp_path / "run" / "leases" / "notes.txt"])
    with start.lease(settings(tmp_path)) as lease:
        lease.run.begin()


def test_a_beginning_that_fails_leaves_no_folder(tmp_path):
    with pytest.raises(ConfigError), start.lease(settings(tmp_path)) as lease:
        config_file.save(settings(tmp_path), lease.run.config)  # which is written before it begins
        raise ConfigError("the disk is full")
    assert not list(tmp_path.iterdir())


def test_a_start_that_waits_while_another_discards_its_run_gets_a_whole_one(tmp_path):
    refused, over = [], threading.Event()

    def fail():
        while not over.is_set():
            with suppress(ConfigError), start.lease(settings(tmp_path)):
                pass

    failing = threading.Thread(target=fail)
    failing.start()
    try:
        for _ in range(40):
            try:
                lease = Lease(RunFolder(tmp_path / "run"), LEASE_S)
            except ConfigError as e:
                refused.append(str(e))
                continue
            with lease:
                assert lease.run.token and lease.run.keys and lease.run.announced_engines() == []
                lease.run.look()
                lease.run.discard()
    finally:
        over.set()
        failing.join()
    assert len(refused) < 40 and all("is being run by" in line for line in refused), refused


def test_a_lease_is_taken_in_the_folder_that_was_looked_at(tmp_path, monkeypatch):
    """Not in one that another start has made since: its holder has the first there, and would be replaced."""
    first, others, watch = Lease(RunFolder(tmp_path / "run"), 30), [], lease_module._watch

    def slow_watch(*given):
        if not others:
            first.rest()
            first.run.discard()
            others.append(Lease(RunFolder(tmp_path / "run"), 30))
            return None
        return watch(*given)

    monkeypatch.setattr(lease_module, "_watch", slow_watch)
    with pytest.raises(ConfigError, match="is being run by"):
        Lease(RunFolder(tmp_path / "run"), 30)
    with others[0] as lease:
        lease.run.look()


def test_no_lease_is_taken_in_a_folder_that_is_being_removed(tmp_path, monkeypatch):
    rename, tried = os.rename, []

    def rename_late(old, new):
        with pytest.raises(FileExistsError):
            lease_module._write(lease.run.leases, lease.run.leases, lease.number + 1)
        tried.append(old)
        rename(old, new)

    with Lease(RunFolder(tmp_path / "run"), 30) as lease:
        lease.rest()
        monkeypatch.setattr(os, "rename", rename_late)
        lease.run.discard()
    assert tried == [tmp_path / "run"] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("lost", [["incarnations"], ["ledger"], ["incarnations", "ledger", "checkpoints"]])
def test_a_run_whose_records_are_moved_aside_is_not_taken_for_one_that_never_began(past, lost):
    (past / "metrics.jsonl").touch()
    for name in lost:
        moved_aside(name)(past)
    with pytest.raises(ConfigError, match="exists: choose another"), start.lease(settings(past.parent)):
        pass
    if "checkpoints" in lost:
        auto = settings(past.parent, resume="auto")
        with pytest.raises(ConfigError, match="checkpoints is not there although"), start.lease(auto) as lease:
            start.newest(lease.run)


def test_a_link_to_a_disk_that_is_not_mounted_is_refused(tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "run")
    with pytest.raises(ConfigError, match="not mounted"), start.lease(settings(tmp_path, resume="auto")):
        pass
    assert not (tmp_path / "disk").exists()


def test_resume_says_that_there_is_nothing_to_resume(tmp_path, capsys):
    config = settings(tmp_path, resume="auto")
    with start.lease(config) as lease:
        start.Beginning(config, lease.run, None, None).begin()
    assert f"no run in {tmp_path / 'run'}: it begins from model.path=" in capsys.readouterr().out


def test_a_lease_whose_file_is_damaged_is_held_on(tmp_path):
    with Lease(RunFolder(tmp_path / "run"), 30) as lease:
        path = lease.run.leases / "00001.json"
        path.write_text("")
        beat = path.stat().st_mtime
        wait_for(lambda: path.stat().st_mtime > beat > 1e9 or path.stat().st_mtime < 1e9)
        beat = path.stat().st_mtime
        wait_for(lambda: path.stat().st_mtime > beat)
        lease.check()


def test_a_silent_launcher_of_a_folder_on_another_disk_is_not_ended(tmp_path):
    """A copy of a run may have the inode of its original, there."""
    run = RunFolder(tmp_path / "run")
    with subprocess.Popen(["sleep", "60"]) as other:
        holder = Lease(run, 30)
        holder.__exit__()
        path = run.leases / "00001.json"
        record = msgspec.json.decode(path.read_bytes(), type=Holder)
        record.process = (other.pid, int(Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]))
        record.device += 1
        path.write_bytes(msgspec.json.encode(record))
        with Lease(run, 1) as lease:
            assert lease.number == 2 and other.poll() is None
        other.kill()


ORDINARY = """
cp -a $RUN $RUN.copy
tar cf $RUN.tar -C $RUN .
find $RUN -exec touch {} +
chmod -R g+rX,o-w $RUN
chmod -R u+w $RUN
rm -rf $RUN/logs/* $RUN/tensorboard/* $RUN/leases/*.guardian $RUN.copy
touch $RUN/notes.txt $RUN/leases/notes.txt $RUN/incarnations/._00000.json
mkdir -p $RUN/.snapshot $RUN/leases/.snapshot $RUN/checkpoints/mine
ln -s $RUN $RUN/checkpoints/link
rm -r $RUN/checkpoints/version-000001
"""


def test_what_people_do_with_the_folder_of_a_living_run_does_not_end_it(tmp_path):
    runs = tmp_path / "runs"
    writer, _ = begin(runs)
    wait_for(lambda: len(sealed(runs / "run")) >= 2)
    done = subprocess.run(
        ["sh", "-c", ORDINARY], env=os.environ | {"RUN": runs / "run"}, capture_output=True, text=True
    )
    assert "version-000001" not in done.stderr
    time.sleep(LEASE_S + 1.5)
    there = sealed(runs / "run")
    wait_for(lambda: max(sealed(runs / "run")) > max(there))
    writer.send_signal(signal.SIGINT)
    _, told = writer.communicate(timeout=60)
    assert writer.returncode == 130 and not told, told
    assert (runs / "run" / "checkpoints" / "mine").exists() and (runs / "run" / "leases" / "notes.txt").exists()
