"""Incarnations of a run: begun whole or not at all, each by one launcher, and none writes after a newer one."""

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from areal_megatron.config import ConfigError
from areal_megatron.launch.supervision.recorder import Recorder
from areal_megatron.observe.metrics import MetricsWriter, write_status
from areal_megatron.observe.status import Status
from areal_megatron.planning.pools import Placement
from areal_megatron.run.folder import Away, Replaced, RunFolder

BEGIN = "import sys; from areal_megatron.run.folder import RunFolder as F; F(sys.argv[1]).begin(checkpoint='c' * 2000)"
RACE = """
import sys
from areal_megatron.run.folder import Replaced, RunFolder
sys.stdin.readline()
for _ in range(20):
    try:
        run = RunFolder(sys.argv[1])
        run.begin()
        print(run.incarnation)
    except Replaced:
        pass
"""


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    run.begin()
    return run


def files_of_at_most_a_kilobyte():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))


def test_an_incarnation_that_could_not_be_written_whole_was_never_begun(run):
    """As on a full disk: the write ends in the middle."""
    torn = subprocess.run([sys.executable, "-c", BEGIN, run.folder], preexec_fn=files_of_at_most_a_kilobyte)
    assert torn.returncode
    assert [start.incarnation for start in RunFolder(run.folder).starts()] == [0]
    run.begin(version=3)
    assert RunFolder(run.folder).start.version == 3 and RunFolder(run.folder).incarnation == 1


def test_of_launchers_that_begin_an_incarnation_at_once_one_does(run):
    command = [sys.executable, "-c", RACE, run.folder]
    racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for racer in racers:
        racer.stdin.write("\n")
        racer.stdin.flush()
    begun = {racer.pid: list(map(int, racer.communicate(timeout=60)[0].split())) for racer in racers}
    numbers = sorted(number for own in begun.values() for number in own)
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= 20
    for pid, own in begun.items():
        assert all(f"process {pid}" in run.starts()[number].launcher for number in own)
    assert not list(run.incarnations.glob(".*"))


def test_a_process_knows_its_own_incarnation_whatever_has_begun_since(run):
    run.begin(version=1)
    RunFolder(run.folder).begin(version=2)
    assert (run.incarnation, run.start.version) == (1, 1)
    assert RunFolder(run.folder, incarnation=0).start.version == 0
    assert RunFolder(run.folder).start.version == 2


def test_a_process_that_was_replaced_writes_nothing(run):
    metrics = MetricsWriter(run)
    metrics.write("update", 0, {})
    metrics.flush()
    recorder = Recorder(run, Placement((), ()))
    written = [
        lambda: (metrics.write("update", 1, {}), metrics.flush()),
        lambda: metrics.write("update", 1, {}),
        lambda: MetricsWriter(run).flush(),
        lambda: write_status(run, Status(phase="training")),
        lambda: run.announce("controller", "tcp://127.0.0.1:1"),
        lambda: recorder.write({}, 0, "done"),
        lambda: run.begin(),
    ]
    newer = RunFolder(run.folder)
    newer.begin()
    newer.announce("controller", "tcp://127.0.0.1:2")
    before = contents(run.folder)
    for write in written:
        with pytest.raises(Replaced) as refused:
            write()
        assert f"process {os.getpid()}" in str(refused.value) and "\n" not in str(refused.value)
        assert str(run.folder) in str(refused.value)
    assert contents(run.folder) == before
    write_status(newer, Status(phase="training"))


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("module", ["areal_megatron.controller.controller", "areal_megatron.train"])
def test_a_process_that_is_started_too_late_ends_with_one_line(run, module):
    run.begin()
    command = [sys.executable, "-m", module, "--run", run.folder, "--incarnation", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1 and done.stdout == ""
    assert "was started again by" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\0" * 64,
        b"\xff{}",
        b"[]",
        b"{}",
        b"[" * 9999,
        b'{"incarnation": "x"}',
        b'{"incarnation": 1, "colour": 2}',
    ],
)
def test_a_record_of_an_incarnation_that_cannot_be_read_is_named(run, damage):
    """And it is there: who was replaced by it writes nothing more."""
    path = run.incarnations / "00001.json"
    path.write_bytes(damage)
    with pytest.raises(ConfigError, match=rf"^{path} is of another release or damaged: [^\n]*; put a copy of it back"):
        RunFolder(run.folder).starts()
    with pytest.raises(Replaced, match="by another launcher"):
        run.check_current()


def test_a_key_that_cannot_be_read_is_named(run):
    for name, damage in {"controller.key": b"\xff", "trainers.key": b"no hex"}.items():
        (run.folder / name).write_bytes(damage)
        with pytest.raises(ConfigError, match=rf"{name} is damaged: remove it$"):
            _ = run.keys
        run.begin()
    run.folder.chmod(0o711)
    (run.folder / "trainers.key").chmod(0o666)
    with pytest.raises(ConfigError, match="others may have replaced"):
        _ = run.keys


def fails(number):
    """Has the file fail to open, as on a disk that does not answer."""

    def spoil(path, monkeypatch):
        really = os.open

        def opening(name, *given, **more):
            if Path(name) == path:
                raise OSError(number, os.strerror(number), name)
            return really(name, *given, **more)

        monkeypatch.setattr(os, "open", opening)

    return spoil


def replaced(make):
    def spoil(path, monkeypatch):
        path.unlink()
        make(path)

    return spoil


UNREAD = {
    **{name: (fails(getattr(errno, name)), Away, "leave it") for name in ("EIO", "ESTALE", "ETIMEDOUT", "EMFILE")},
    "missing": (replaced(lambda path: None), Away, "is not there"),
    "a link": (
        replaced(lambda path: path.symlink_to("config.yaml")),
        ConfigError,
        "not a file of this user: remove it",
    ),
    "a folder": (replaced(os.mkdir), ConfigError, "not a file of this user: remove"),
    "a socket": (replaced(lambda path: os.mknod(path, stat.S_IFSOCK)), ConfigError, "not a file of this user: remove"),
    "forbidden": (fails(errno.EACCES), ConfigError, "may not be read by this user: allow it with 'chmod -R u.rwX "),
}


PRIVATE = {
    "secret": "token",
    "trainers.key": "keys",
    "site.pem": "credentials",
    "agents.pem": "credentials_of_agents",
}


@pytest.mark.parametrize("kind", UNREAD)
def test_a_secret_is_only_to_be_removed_where_it_is_no_file_of_this_user(run, monkeypatch, kind):
    spoil, error, words = UNREAD[kind]
    for name, read in PRIVATE.items():
        with monkeypatch.context() as own:
            spoil(run.folder / name, own)
            with pytest.raises(error, match=rf"^[^\n]*{name}[^\n]*{words}[^\n]*$") as raised:
                getattr(run, read)
        assert ("remove" in str(raised.value)) == ("remove" in words)


@pytest.mark.parametrize("mode", [0o640, 0o660, 0o666])
def test_a_process_reads_a_secret_that_others_had_rights_on_but_could_not_reach(run, capsys, mode):
    before = run.token, run.keys
    for name in ("secret", "controller.key", "trainers.key", "site.pem", "agents.pem"):
        (run.folder / name).chmod(mode)
    assert (RunFolder(run.folder).token, RunFolder(run.folder).keys) == before
    assert capsys.readouterr().err.count("\n") == 1
    assert run.credentials.path.stat().st_mode & 0o777 == (run.folder / "secret").stat().st_mode & 0o777 == 0o600


def test_a_secret_that_others_may_have_replaced_is_read_by_nobody_until_it_is_drawn_anew(run):
    run.folder.chmod(0o750)
    (run.folder / "secret").chmod(0o660)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"others may have replaced .*/secret: start the run again, which draws"):
            _ = run.token
    before = (run.folder / "secret").read_text()
    assert run.make_private()
    run.renew_secret()
    assert not run.make_private() and run.token != before


def test_a_file_system_that_forbids_nothing_is_named(run, monkeypatch):
    """As some of Windows' servers are: they take each mode and keep their own."""
    (run.folder / "secret").chmod(0o644)
    monkeypatch.setattr(Path, "chmod", lambda *_: None)
    with pytest.raises(ConfigError, match=r"others may use .*/secret, and its file system forbids nothing: choose"):
        run.make_private()


def test_an_announcement_is_told_from_the_one_before_though_both_say_the_same(run):
    assert run.announced("controller") is None
    run.announce("controller", "tcp://127.0.0.1:1")
    before = run.announced("controller")
    assert before is not None and run.announced("controller") == before
    run.announce("controller", "tcp://127.0.0.1:1")
    assert run.announced("controller") not in (None, before)
