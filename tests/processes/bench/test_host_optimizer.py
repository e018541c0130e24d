"""tools/bench/host_optimizer.py as it is called."""

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.soak)])
def test_both_ways_to_step_give_the_same_parameters(tmp_path, dtype):
    file = tmp_path / "figures.json"
    sizes = ["--elements", "20000", "--parameters", "7", "--dtype", dtype, "--repetitions", "2"]
    command = [sys.executable, "tools/bench/host_optimizer.py", *sizes, "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    assert figures["largest difference of a parameter"]["median"] == 0
    assert figures["times as fast"]["median"] > 0 and "a bucket at a time" in done.stdout
