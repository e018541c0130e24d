"""What a program in the sandbox costs, compared with another commit.

    python tools/bench/sandbox.py [--against main] [--repetitions 20] [--json FILE]

Both run the same programs in turns, so that what else the machine does meets both alike. Figures are CPU milliseconds
of all processes of one sandbox and their ratio, this checkout over that commit, as medians with the lowest and highest
repetition.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

from areal_megatron.process.files import write_json
from tools.bench.common import cell, spreads

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAMS = {
    "nothing": "",
    "imports": "import collections, decimal, heapq, itertools, json, random, re, typing",
    "input and output": "import sys\nfor line in sys.stdin: print(int(line) ** 2)",
    "system calls": "import os\nfor _ in range(100_000): os.getppid()",
    "calls with rules": "import fcntl\nfor _ in range(50_000): fcntl.fcntl(0, fcntl.F_GETFL)",
    "threads": "import threading as t\nfor _ in range(200): x = t.Thread(target=sum, args=([],)); x.start(); x.join()",
    "memory": "for _ in range(20): x = bytearray(b'x') * (20 << 20)",
}
RUNS = 3
"""Sandboxes of each program in a repetition."""
MEASURE = """
import json, resource, sys
from areal_megatron.reward.sandbox import Limits, run
programs, runs = json.load(sys.stdin)
spent_ms = {}
def spent():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (used.ru_utime + used.ru_stime)
for name, program in programs.items():
    before = spent()
    for _ in range(runs):
        outcome = run(program, "12345\\n" * 10_000, Limits(wall_s=60))
        assert outcome.good, outcome
    spent_ms[name] = (spent() - before) / runs
print(json.dumps(spent_ms))
"""


def measure(tree: Path) -> dict[str, float]:
    """Returns program → CPU milliseconds of a sandbox, with the code in a checkout."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        input=json.dumps([PROGRAMS, RUNS]),
        env=os.environ | {"PYTHONPATH": str(tree)},
        cwd=tree,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
        encoding="utf-8",
        errors="replace",
    )
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="main", metavar="COMMIT")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    archive = ["git", "archive", arguments.against, "areal_megatron"]
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(archive, cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
        with tarfile.open(fileobj=BytesIO(packed)) as files:
            files.extractall(folder, filter="data")
        pairs = [(measure(ROOT), measure(Path(folder))) for _ in range(arguments.repetitions)]
    here, there = (spreads([pair[side] for pair in pairs]) for side in (0, 1))
    ratios = spreads([{name: ours[name] / theirs[name] for name in PROGRAMS} for ours, theirs in pairs])
    print(f"{'program':<20}{'here, ms':>26}{arguments.against + ', ms':>26}{'ratio':>24}")
    for name in PROGRAMS:
        print(f"{name:<20}{cell(here[name], 1):>26}{cell(there[name], 1):>26}{cell(ratios[name], 3):>24}")
    if arguments.json:
        write_json(arguments.json, {"here": here, "there": there, "ratio": ratios})


if __name__ == "__main__":
    main()
