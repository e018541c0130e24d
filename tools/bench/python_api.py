"""What a run from Python costs beside the same run by command: its start, and its updates.

    python tools/bench/python_api.py [--repetitions 5] [--json FILE] [--out runs/bench-python-N]

A repetition is a run of each kind, the one and the other first in turn. The script has its reward travel as source and
reads the metrics as they come. *start* is the time from the call of a program until the launcher begins the run, *first
update* until that update is done, *update* the mean time of those after it. Differences and ratios are of one
repetition.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from areal_megatron.observe.metrics import read_metrics
from areal_megatron.process.files import new_folder
from areal_megatron.run.folder import RunFolder
from tools.bench import common
from tools.bench.common import ROOT, Figure, spread, spreads
from tools.make_arithmetic import make_world

UPDATES = 30
CONFIG = "configs/tiny_cpu.yaml"
REWARD = """
def short(prompt, response, answer):
    return -float(len(response))
"""
SCRIPT = f"""import json
import sys

import areal_megatron as areal

{REWARD}

run = areal.Run("{CONFIG}", reward={{"function": short}}, **json.loads(sys.argv[1]))
run.start(quiet=True, tied=True)
for line in run.metrics():
    print(line["version"], line["reward_mean"], flush=True)
run.wait()
"""


def measure(command: list[str], folder: Path) -> dict[str, float]:
    """Has a command make the run of this folder, and returns its figures in seconds. Exits with what it has printed if
    it fails."""
    printed = folder.with_name(f"{folder.name}.log")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder.parent)])}
    called = time.time()
    with printed.open("wb") as file:
        code = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        ).returncode
    if code:
        sys.exit(f"{printed.read_text(encoding='utf-8')[-3000:]}\nerror: {folder.name} ended with exit code {code}")
    run = RunFolder(folder)
    ends = [line["time"] for line in read_metrics(run) if line["kind"] == "update"]
    return {
        "start_s": run.starts()[0].time - called,
        "first_update_s": ends[0] - called,
        "update_s": (ends[-1] - ends[0]) / (len(ends) - 1),
    }


def commands(out: Path, name: str) -> dict[str, list[str]]:
    """Returns by kind what makes a run of this name, of the same keys."""
    keys = {"name": name, "runs_dir": str(out), "updates": UPDATES}
    sections = {
        "model": {"path": str(out / "world" / "model")},
        "data": {"train": str(out / "world" / "train.jsonl"), "eval": ""},
    }
    words = [f"{key}={value}" for key, value in keys.items()]
    words += [f"{section}.{key}={value}" for section, own in sections.items() for key, value in own.items()]
    return {
        "command": ["-m", "areal_megatron.command", "train", CONFIG, *words, "reward.function=bench_reward:short"],
        "script": [str(out / "script.py"), json.dumps(keys | sections)],
    }


def summary(found: dict[str, list[dict[str, float]]]) -> dict[str, Figure]:
    """Returns the figures of each kind, and what the script costs beside the command."""
    figures = {f"{kind} {key}": figure for kind, runs in found.items() for key, figure in spreads(runs).items()}
    pairs = list(zip(found["script"], found["command"], strict=True))
    for key in ("start_s", "first_update_s"):
        figures[f"script − command {key}"] = spread(script[key] - command[key] for script, command in pairs)
    figures["script / command update_s"] = spread(script["update_s"] / command["update_s"] for script, command in pairs)
    return figures


def main() -> None:
    common.end_when_told()
    options = common.parser(__doc__, repetitions=5, out="bench-python").parse_args()
    out = new_folder("bench-python", options.out)
    make_world(out / "world", seed=1)
    (out / "bench_reward.py").write_text(REWARD, encoding="utf-8")
    (out / "script.py").write_text(SCRIPT, encoding="utf-8")
    found: dict[str, list[dict[str, float]]] = {"command": [], "script": []}
    for repetition in range(options.repetitions):
        for kind in [*found][:: -1 if repetition % 2 else 1]:
            name = f"{kind}-{repetition}"
            found[kind].append(measure(commands(out, name)[kind], out / name))
            print(f"{name}: {', '.join(f'{key} {value:.3f}' for key, value in found[kind][-1].items())}", flush=True)
    print("median (lowest – highest):")
    print(common.report(summary(found), digits=3))
    common.keep(options.json, summary(found))


if __name__ == "__main__":
    main()
