"""Processes that end without the interpreter's last look at all objects."""

import subprocess
import sys

PROGRAM = """
import atexit, sys
from areal_megatron.process.ending import end
class Thing:
    def __del__(self): print("released")
thing = Thing()
thing.itself = thing
atexit.register(print, "at exit")
print("buffered", file=sys.stderr, end="")
print("done", end=" ")
if sys.argv[1:]: end()
"""


def test_everything_is_written_and_nothing_is_released():
    def run(*arguments):
        return subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=60)

    assert run().stdout == "done at exit\nreleased\n"
    ended = run("end")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done at exit\n", "buffered")
