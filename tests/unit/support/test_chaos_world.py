"""The machine of its own in which a run is disturbed: its disk, network and clocks do fail, and return."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT

PROBE = """
import errno, json, pathlib, socket, subprocess, sys, time
from tests.support import chaos_world
chaos_world.enter()
found = {}
with chaos_world.World(pathlib.Path(sys.argv[1]), disk_mb=8) as world:
    world.folder.mkdir()
    (world.folder / "logs").mkdir()
    (world.folder / "kept").write_text("here")
    with world.full_disk():
        try:
            (world.folder / "more").write_bytes(bytes(4096))
        except OSError as e:
            found["full"] = e.errno == errno.ENOSPC
    (world.folder / "after").write_bytes(bytes(4096))

    server = "import socket; s = socket.create_server(('10.201.0.2', 4711)); print(1, flush=True)\\nwhile 1: s.accept()"
    far = subprocess.Popen([*world.far(), sys.executable, "-c", server], stdout=subprocess.PIPE, text=True)
    far.stdout.readline()
    def reaches():
        try:
            socket.create_connection(("10.201.0.2", 4711), timeout=1).close()
            return True
        except OSError:
            return False
    found["network"] = [reaches()]
    with world.no_network():
        found["network"].append(reaches())
    while not reaches():
        time.sleep(0.1)
    far.kill()

    clock = "from time import *; print(time(), monotonic(), flush=True); input(); print(time(), monotonic())"
    told = subprocess.Popen([world.python, "-c", clock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    first = [float(word) for word in told.stdout.readline().split()]
    world.set_clock(told.pid, -3600)
    time.sleep(1)
    second = [float(word) for word in told.communicate("now\\n")[0].split()]
    found["clock"] = [after - before for before, after in zip(first, second)]
    found["own clock"] = time.time() - first[0]
    found["has clocks"] = world.has_clocks
print(json.dumps(found))
"""


def test_disk_network_and_clocks_fail_and_return(tmp_path):
    probe = [sys.executable, "-c", PROBE, tmp_path / "run"]
    done = subprocess.run(probe, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no namespaces here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["full"] and found["network"] == [True, False]
    if found["has clocks"]:
        wall, monotonic = found["clock"]
        assert -3600 <= wall < -3590 and 1 <= monotonic < 10 and 0 < found["own clock"] < 60
    assert (tmp_path / "run" / "kept").read_text() == "here" and (tmp_path / "run" / "after").exists()
    assert not (tmp_path / ".run.chaos").exists(), "nothing else is left"
