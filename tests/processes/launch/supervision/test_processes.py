import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from areal_megatron.launch.supervision import processes
from areal_megatron.launch.supervision.processes import Children, end_sessions
from areal_megatron.launch.supervision.shared_memory import SharedMemory
from tests.support.living import is_alive

FAMILY = (
    "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    "print(p.pid, flush=True); time.sleep(60)"
)
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
)


@pytest.fixture
def children():
    with Children() as owned:
        yield owned


def start(children, tmp_path, code, cores=frozenset()):
    return children.start("child", [sys.executable, "-c", code], dict(os.environ), tmp_path / "child.log", set(cores))


def eventually(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


SHARES = """
import sys, tempfile, time
from multiprocessing.shared_memory import SharedMemory
held = SharedMemory(create=True, size=100)
file = tempfile.NamedTemporaryFile(delete=False)
print(held.name, file.name, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_temporary_files_and_shared_memory_go_along(tmp_path, killed):
    with Children() as children:
        child = start(children, tmp_path, SHARES)
        shared, file = eventually(lambda: child.last_lines().split())
        shared = Path("/dev/shm", shared)
        assert shared.exists() and Path(file).exists()
        if killed:  # its resource tracker removes what it has made, but is killed before it can
            for process in psutil.Process(child.pid).children(recursive=True):
                process.kill()
    assert not shared.exists() and not Path(file).parent.exists()


def test_shared_memory_of_children_that_ended_by_themselves_goes_too(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_NOTE_S", 0)
    with Children() as children:
        child = start(children, tmp_path, SHARES)
        shared = Path("/dev/shm", eventually(lambda: child.last_lines().split())[0])
        children.look_after()
        for process in [*psutil.Process(child.pid).children(recursive=True), psutil.Process(child.pid)]:
            process.kill()
        assert eventually(lambda: child.exit_code) and shared.exists()
    assert not shared.exists()


def test_what_others_have_put_into_shared_memory_stays(tmp_path):
    """A model, for example: it is older than the run, or in a folder."""
    maps = (
        "import mmap, sys, time; f = [open(p, 'r+b') for p in sys.argv[1:]]; "
        "m = [mmap.mmap(i.fileno(), 0) for i in f]; print('mapped', flush=True); time.sleep(60)"
    )
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file, tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        newer = Path(folder, "model")
        for path in (Path(file.name), newer):
            path.write_bytes(b"weights")
        time.sleep(1.5)
        with Children() as children:
            newer.chmod(0o600)
            command = [sys.executable, "-c", maps, file.name, str(newer)]
            child = children.start("child", command, dict(os.environ), tmp_path / "child.log", set())
            assert eventually(child.last_lines) == "mapped"
        assert newer.exists() and Path(file.name).exists()


def test_long_logs_are_moved_aside_while_they_are_written(children, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "LOG_BYTES", 1000)
    monkeypatch.setattr(processes, "_ROTATE_S", 0)
    code = "import time\nfor n in range(100): print(n, '-' * 100, flush=True); time.sleep(0.02)"
    child = start(children, tmp_path, code)
    aside = tmp_path / "child.log.1"
    eventually(lambda: children.look_after() or child.exit_code is not None)
    lines = aside.read_text().splitlines() + child.log.read_text().splitlines()
    numbers = [int(line.split()[0]) for line in lines]
    assert numbers == sorted(set(numbers)) and numbers[-1] == 99 and numbers[0] > 50
    assert 1000 < aside.stat().st_size < 2000


def test_leaving_takes_descendants_along(tmp_path):
    with Children() as children:
        child = start(children, tmp_path, FAMILY)
        grandchild = int(eventually(child.last_lines))
    assert child.exit_code == -signal.SIGTERM
    assert not is_alive(grandchild)


def test_descendants_of_a_dead_child_are_ended(tmp_path, children):
    child = start(children, tmp_path, FAMILY)
    grandchild = int(eventually(child.last_lines))
    os.kill(child.pid, signal.SIGKILL)
    assert eventually(lambda: child.exit_code) == -signal.SIGKILL
    end_sessions({child.pid}, SharedMemory(), grace_s=0.5)
    assert not is_alive(grandchild)


def test_what_ignores_sigterm_is_killed(tmp_path, children):
    child = start(children, tmp_path, STUBBORN)
    assert eventually(child.last_lines) == "ready"
    end_sessions({child.pid}, SharedMemory(), grace_s=0.2)
    assert child.exit_code == -signal.SIGKILL


LINGERS = """
import ctypes, os, signal, sys, time
PTRACE_SEIZE, PTRACE_O_TRACEEXIT, WALL = 0x4206, ctypes.c_void_p(0x40), 0x40000000
pid = int(sys.argv[1])
assert ctypes.CDLL(None).ptrace(PTRACE_SEIZE, pid, None, PTRACE_O_TRACEEXIT) == 0
print("seized", flush=True)
os.waitpid(pid, WALL)  # it is about to end, and does not before this process has ended
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def lingers(monkeypatch):
    """Makes a process take so many seconds to end once it has been killed, as those do that free a GPU's memory."""
    monkeypatch.setattr(processes, "_KILLED_S", 0.1)
    tracers = []

    def linger(pid, seconds):
        tracer = subprocess.Popen([sys.executable, "-c", LINGERS, str(pid), str(seconds)], stdout=subprocess.PIPE)
        tracers.append(tracer)
        if tracer.stdout.readline() != b"seized\n":
            pytest.skip("processes may not be traced here")

    yield linger
    for tracer in tracers:
        tracer.kill()
        tracer.wait()
        tracer.stdout.close()


def test_a_process_is_started_once_the_one_before_is_gone(tmp_path, children, lingers, capsys):
    first = start(children, tmp_path, FAMILY)
    grandchild = int(eventually(first.last_lines))
    lingers(grandchild, 3)
    children.end()
    children.forget()
    assert is_alive(grandchild)
    start(children, tmp_path, FAMILY)
    assert not is_alive(grandchild)
    said = capsys.readouterr().err
    assert said == f"child waits for earlier processes that are ending or have memory of a GPU: {grandchild}\n"


def test_one_that_does_not_go_is_not_waited_for_without_end(tmp_path, children, lingers, capsys, monkeypatch):
    monkeypatch.setattr(processes, "_GONE_S", 1.0)
    first = start(children, tmp_path, FAMILY)
    grandchild = int(eventually(first.last_lines))
    lingers(grandchild, 30)
    second = start(children, tmp_path, "print('here')")
    assert eventually(lambda: second.exit_code == 0) and is_alive(grandchild)
    assert "child is started after 1 s beside earlier processes that are ending" in capsys.readouterr().err


def test_a_process_is_started_once_gpus_have_forgotten_the_one_before(tmp_path, children, capsys, monkeypatch):
    """nvidia-smi is a script here that lists what a file says."""
    known, program = tmp_path / "known", tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat {known}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    first = start(children, tmp_path, "import time; time.sleep(60)")
    known.write_text(f"{first.pid}\n1\n[Not Found]\n")
    threading.Timer(2, known.write_text, ["1\n"]).start()
    begin = time.monotonic()
    start(children, tmp_path, "")
    assert 1.5 < time.monotonic() - begin < 20
    said = capsys.readouterr().err
    assert said == f"child waits for earlier processes that are ending or have memory of a GPU: {first.pid}\n"


LITTLE = """
import os, pathlib, resource, sys
from areal_megatron.launch.supervision.processes import Children
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
code = '''
import resource
from areal_megatron.run.folder import from_command_line
from_command_line("anything")
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
'''
with Children() as children:
    command = [sys.executable, "-c", code, "--run", "run"]
    children.start("child", command, dict(os.environ), pathlib.Path(sys.argv[1]), set())._process.wait()
"""


def test_a_process_of_a_run_may_open_as_many_files_as_the_machine_allows(tmp_path):
    subprocess.run([sys.executable, "-c", LITTLE, tmp_path / "log"], check=True, timeout=60)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert (tmp_path / "log").read_text() == f"{hard} {hard}\n"


def test_a_log_that_cannot_be_read_says_nothing(tmp_path):
    log = processes.Log("child", tmp_path)  # a folder: reading it fails as a stale file does
    assert log.last_lines() == "" and processes.Log("child", tmp_path / "none" / "log").last_write == 0.0


OWNER = """
import os, pathlib, signal, sys
from areal_megatron.launch.supervision.processes import Children
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
with Children() as children:
    command = [sys.executable, "-c", sys.argv[1]]
    print(children.start("child", command, dict(os.environ), pathlib.Path(sys.argv[2]), set()).pid, flush=True)
    signal.pause()
"""
TAKES_ITS_TIME = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: [print("ending", flush=True), time.sleep(1.5), sys.exit()])
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGINT])
def test_an_owner_that_is_asked_to_end_more_than_once_ends_its_children_first(tmp_path, again):
    log = tmp_path / "child.log"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, TAKES_ITS_TIME, log], stdout=subprocess.PIPE, text=True)
    with owner:
        child = int(owner.stdout.readline())
        assert eventually(lambda: "ready" in log.read_text())
        owner.send_signal(signal.SIGTERM)
        assert eventually(lambda: "ending" in log.read_text())
        owner.send_signal(again)
        assert owner.wait(30) == 7 and not is_alive(child)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root chooses the id of the next process")
@pytest.mark.parametrize("was_killed", [False, True])
def test_a_process_that_gets_the_id_of_an_ended_one_is_left_alone(tmp_path, was_killed):
    with Children() as children:
        ended = start(children, tmp_path, "pass")
        assert eventually(lambda: ended.exit_code is not None)
        if was_killed:
            children.kill("child")
        others = []
        for _ in range(100):  # many start processes here
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(ended.pid - 1))
            others.append(subprocess.Popen(["sleep", "60"], start_new_session=True))
        assert (ended.pid in {other.pid for other in others}) == was_killed, "an ended one keeps its id until then"
    with contextlib.ExitStack() as stack:
        for other in others:
            stack.callback(other.wait)
            stack.callback(other.kill)
        assert [other.poll() for other in others] == [None] * 100


def test_children_end_when_their_owner_is_killed(tmp_path):
    owner_code = (
        "import os, sys, time; from pathlib import Path;"
        "from areal_megatron.launch.supervision.processes import Children;"
        "c = Children().start('c', [sys.executable, '-c', sys.argv[2]], dict(os.environ), Path(sys.argv[1]), set());"
        "print(c.pid, flush=True); time.sleep(60)"
    )
    log = tmp_path / "log"
    owner = subprocess.Popen([sys.executable, "-c", owner_code, str(log), FAMILY], stdout=subprocess.PIPE, text=True)
    pid = int(owner.stdout.readline())
    grandchild = int(eventually(lambda: log.exists() and log.read_text()))
    owner.kill()
    owner.communicate()
    assert eventually(lambda: not is_alive(pid) and not is_alive(grandchild))


LOOKING = """
import os, pathlib, sys, time
from areal_megatron.launch.supervision import processes
processes._GUARD_S = 0.1
children = processes.Children()
command = [sys.executable, "-c", sys.argv[1]]
child = children.start("child", command, dict(os.environ), pathlib.Path(sys.argv[2]), set())
print(children.guardian, child.pid, flush=True)
if len(sys.argv) > 3:
    time.sleep(60)
guardian = children.guardian
while children.guardian == guardian:
    children.look_after()
    time.sleep(0.05)
print(children.guardian, flush=True)
time.sleep(60)
"""
HOLDS = """
import os, subprocess, sys, time
if len(sys.argv) == 1:  # as engines do, which become vLLM's server
    os.execv(sys.executable, [sys.executable, "-c", os.environ["HOLDS"], "become"])
from areal_megatron.process import lifeline
lifeline.hold(0.5)
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
time.sleep(60)
"""


def started_by_another(tmp_path, code, *more):
    """Returns the process that starts a child, its guardian, and the child."""
    command, environment = [sys.executable, "-c", LOOKING, code, str(tmp_path / "log"), *more], {"HOLDS": HOLDS}
    owner = subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=os.environ | environment)
    return owner, *map(int, owner.stdout.readline().split())


def test_a_guardian_that_was_killed_has_a_successor(tmp_path):
    owner, guardian, child = started_by_another(tmp_path, FAMILY)
    with owner:
        grandchild = int(eventually(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text()))
        os.kill(guardian, signal.SIGKILL)
        successor = int(owner.stdout.readline())
        assert successor != guardian and is_alive(successor) and is_alive(child)
        owner.kill()
        said = f"process {guardian}, which ends all others if this one is killed, has ended: another is started\n"
        assert owner.stderr.read() == said
    assert eventually(lambda: not is_alive(child) and not is_alive(grandchild) and not is_alive(successor))


def test_what_is_started_after_the_death_of_the_guardian_is_known_to_the_next(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(processes, "_GUARD_S", 0)
    with Children() as children:
        os.kill(children.guardian, signal.SIGKILL)
        assert eventually(lambda: not is_alive(children.guardian))
        child = start(children, tmp_path, "import time; time.sleep(60)")
        children.look_after()
        assert is_alive(children.guardian) and is_alive(child.pid)
    assert capsys.readouterr().err.count("\n") == 1 and child.exit_code == -signal.SIGTERM


def test_without_owner_and_guardian_a_process_ends_itself_and_its_own(tmp_path):
    owner, guardian, child = started_by_another(tmp_path, HOLDS, "do not look")
    with owner:
        grandchild = int(eventually(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text()))
        for pid in (guardian, owner.pid):
            os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not is_alive(child) and not is_alive(grandchild))


THREADS = """
import threading
from areal_megatron.run.folder import from_command_line
from_command_line("anything")
print(*sorted(thread.name for thread in threading.enumerate()))
"""


@pytest.mark.parametrize("started_by_a_launcher", [True, False])
def test_every_process_that_a_launcher_starts_looks_out_for_its_end(tmp_path, children, started_by_a_launcher):
    command, log = [sys.executable, "-c", THREADS, "--run", str(tmp_path)], tmp_path / "log"
    if started_by_a_launcher:
        children.start("child", command, dict(os.environ), log, set())._process.wait(60)
    else:
        log.write_bytes(subprocess.run(command, capture_output=True, timeout=60).stdout)
    assert log.read_text() == ("MainThread lifeline\n" if started_by_a_launcher else "MainThread\n")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to tell pinning from none")
def test_child_is_pinned_to_its_cores(tmp_path, children):
    core = max(os.sched_getaffinity(0))
    child = start(children, tmp_path, "import os; print(*os.sched_getaffinity(0))", {core})
    assert eventually(lambda: child.exit_code is not None)
    assert child.last_lines() == str(core)
