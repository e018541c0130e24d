"""A launcher prints into a disk that is full, or to nobody."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from areal_megatron.launch.supervision import output
output.never_fail()
from rich.console import Console
for _ in range(3):
    print("a line", flush=True)
    print("a warning", file=sys.stderr, flush=True)
    Console().print("a table")
sys.exit(75)
"""


@pytest.mark.parametrize("into", ["full disk", "pipe that nobody reads"])
def test_what_cannot_be_printed_ends_no_launcher(into, tmp_path):
    if into == "full disk":
        with open("/dev/full", "w") as full:
            assert subprocess.run([sys.executable, "-c", PROGRAM], stdout=full, stderr=full).returncode == 75
    else:
        program = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        program.stdout.close()
        program.stderr.close()
        assert program.wait(60) == 75
