"""The clock by which launchers and supervisors judge each other's silence."""

import os
import signal
import subprocess
import sys
import time

from areal_megatron.process.silence import AwakeClock, sign_interval

READING = """
import sys, time
from areal_megatron.process.silence import AwakeClock
clock = AwakeClock(6)  # signs of life every second
print(f"{clock.now():.1f}", flush=True)
for _ in range(10):
    time.sleep(0.05)
    clock.now()
print(f"{clock.now():.1f}", flush=True)
sys.stdin.readline()
print(clock.now())
"""


def test_it_begins_at_0_and_counts_a_pause_as_one_interval():
    with subprocess.Popen([sys.executable, "-c", READING], stdin=-1, stdout=-1, text=True) as reader:
        assert reader.stdout.readline() == "0.0\n"
        assert 0.5 <= float(reader.stdout.readline()) < 3
        os.kill(reader.pid, signal.SIGSTOP)
        time.sleep(4)
        os.kill(reader.pid, signal.SIGCONT)
        said, _ = reader.communicate("\n")
        assert 0.5 + 0.9 <= float(said) < 3.9, "four seconds count as one"


def test_several_signs_fit_into_a_silence():
    assert [sign_interval(silence_s) for silence_s in (6, 30, 180)] == [1, 5, 5]
    assert 0 <= AwakeClock(30).now() < 1
