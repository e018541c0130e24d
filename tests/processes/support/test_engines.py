"""What tests start ends with them, also where they are killed and clean up nothing."""

import subprocess
import sys

import psutil
import pytest

from tests.conftest import ROOT
from tests.support.living import left_over

STANDIN = """
import sys, time
from areal_megatron.run.folder import RunFolder
from tests.support.engines import standin_engine
run = RunFolder(sys.argv[1])
run.create()
with standin_engine(run):
    print("started", flush=True)
    time.sleep(600)
"""
LAUNCHER = """
import subprocess, sys, time
from tests.conftest import take_interrupts
subprocess.Popen(["sleep", "600"], preexec_fn=take_interrupts)
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("program", [STANDIN, LAUNCHER], ids=["engine", "launcher"])
def test_a_killed_test_leaves_nothing_behind(program, tmp_path):
    command = [sys.executable, "-c", program, tmp_path / "run"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as test:
        assert test.stdout.readline() == "started\n"
        started = psutil.Process(test.pid).children(recursive=True)
        assert started
        test.kill()
    left = left_over(started, 20)
    for process in left:
        process.kill()
    assert left == []
