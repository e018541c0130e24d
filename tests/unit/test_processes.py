import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from launch.processes import Child, stop

FAMILY = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print(p.pid, flush=True); time.sleep(60)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
)


def start(tmp_path, code, cores=frozenset()):
    return Child("child", [sys.executable, "-c", code], dict(os.environ), tmp_path / "child.log", set(cores))


def eventually(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_stop_takes_descendants_along(tmp_path):
    child = start(tmp_path, FAMILY)
    grandchild = int(eventually(child.last_lines))
    stop([child])
    assert child.exit_code == -signal.SIGTERM
    assert not alive(grandchild)


def test_stop_takes_descendants_of_a_dead_child_along(tmp_path):
    child = start(tmp_path, FAMILY)
    grandchild = int(eventually(child.last_lines))
    os.kill(child.pid, signal.SIGKILL)
    assert eventually(lambda: child.exit_code) == -signal.SIGKILL
    stop([child], grace_s=0.5)
    assert not alive(grandchild)


def test_stop_kills_what_ignores_sigterm(tmp_path):
    child = start(tmp_path, STUBBORN)
    assert eventually(child.last_lines) == "ready"
    stop([child], grace_s=0.2)
    assert child.exit_code == -signal.SIGKILL


def test_child_ends_when_its_parent_is_killed(tmp_path):
    parent_code = (
        "import os, sys, time; from pathlib import Path; from launch.processes import Child;"
        "c = Child('c', [sys.executable, '-c', 'import time; time.sleep(60)'], dict(os.environ), Path(sys.argv[1]), set());"
        "print(c.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_code, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    assert eventually(lambda: not alive(pid))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to tell pinning from none")
def test_child_is_pinned_to_its_cores(tmp_path):
    core = max(os.sched_getaffinity(0))
    child = start(tmp_path, "import os; print(*os.sched_getaffinity(0))", {core})
    assert eventually(lambda: child.exit_code is not None)
    assert child.last_lines() == str(core)
