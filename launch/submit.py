"""Has Slurm start a run: `areal submit CONFIG [key=value …] --nodes 48 --gpus 8 [--time 24:00:00]`.

Downloads models and data named on the hub, and checks config, model, data and the plan for those nodes: a job that
cannot start never waits in the queue. Then writes a batch script, as those in slurm/ are, and hands it to sbatch: the
job calls launch/slurm.py with this Python in this folder, is queued again before its time limit and when it is
preempted, and resumes where it was. All nodes must see the folder, the model and this installation. `--dry-run` prints
the plan and the script. Exit code 0: submitted, 2: wrong input, or Slurm refuses the job. Imports neither torch nor
vllm.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.launch.supervision import dry_run, start
from areal_megatron.planning.sizes import Sizes, add_sizes
from areal_megatron.process.shown import guard
from areal_megatron.programs.fetch import fetch_all
from areal_megatron.run.folder import RunFolder

_SBATCH_S = 60.0
_AHEAD_S = 600
"""How long before the time limit the run is asked to stop, in seconds."""
_ASKED = ["resume=auto", "machine.host=auto"]
"""Overrides of every job; the user's come after them and win."""


def main(arguments: list[str] | None = None) -> int:
    guard()
    parser = start.parser("areal_megatron.launch.submit", __doc__)
    parser.set_defaults(restarts=10)
    add_sizes(parser, required=True)
    job = parser.add_argument_group("the job")
    job.add_argument(
        "--time", default="24:00:00", metavar="LIMIT", help="of one job, as sbatch has it; default 24:00:00"
    )
    for name in ("account", "partition", "qos"):
        job.add_argument(f"--{name}", metavar="NAME", help="as sbatch has it")
    job.add_argument(
        "--cpus", type=int, default=0, metavar="N", help="cores of a node; default: whole nodes, exclusively"
    )
    job.add_argument("--mem", default="", metavar="SIZE", help="memory of a node, e.g. 200G; default: all of it")
    job.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="another option, e.g. --sbatch=--constraint=h100",
    )
    dry_run.add_flag(parser)
    options = parser.parse_intermixed_args(arguments)
    try:
        overrides = [*_ASKED, *options.overrides]
        config = config_file.load(options.config, overrides)
        written = script(config, overrides, options)
        if not options.dry_run:  # here, since nodes often have no network
            fetch_all(config, RunFolder(config.run_dir))
        planned = dry_run.text(dry_run.check_imagined(config, Sizes.given(options), options.python), options.python)
        if options.dry_run:
            print(f"{planned}\n\nwould submit with 'sbatch':\n{written}", end="")
            return 0
        start.check_packages(config, options.python)
        number = submit(written)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    state = f"areal status {shlex.quote(str(config.run_dir))}"
    print(f"submitted job {number}: its output is slurm-{number}.out, its state: {state}")
    return 0


def script(config: Config, overrides: Sequence[str], options: argparse.Namespace) -> str:
    """Returns the batch script. Raises ConfigError for an option of sbatch that is none, and for too little time."""
    if seconds(options.time) < 2 * _AHEAD_S:
        raise ConfigError(
            f"--time {options.time}: give at least {2 * _AHEAD_S // 60} minutes: the run is asked to save and stop "
            f"{_AHEAD_S // 60} minutes ahead of the limit"
        )
    share = ["--ntasks-per-node=1", f"--cpus-per-task={options.cpus}"] if options.cpus else ["--exclusive"]
    lines = [
        f"--job-name={config.name}",
        f"--nodes={options.nodes}",
        *([f"--gpus-per-node={options.gpus}"] if options.gpus else []),
        *share,
        f"--mem={options.mem or 0}",
        "--requeue",
        "--no-kill",
        "--open-mode=append",
        f"--signal=B:USR1@{_AHEAD_S}",
        f"--time={options.time}",
        "--output=slurm-%j.out",
        *(f"--{name}={value}" for name in ("account", "partition", "qos") if (value := getattr(options, name))),
        *options.sbatch,
    ]
    for line in lines:
        if not line.startswith("-") or not line.isprintable():
            raise ConfigError(f"{line!r} is no option of sbatch: expected e.g. --sbatch=--constraint=h100")
    command = [sys.executable, "-m", "areal_megatron.launch.slurm", options.config, f"--restarts={options.restarts}"]
    command += [f"--python={pool}={shlex.join(words)}" for pool, words in options.python.items()]
    header = "".join(f"#SBATCH {shlex.quote(line)}\n" for line in lines)
    return (
        f"#!/bin/bash\n{header}"
        'export PYTHONUNBUFFERED="${PYTHONUNBUFFERED:-1}"\n'
        'export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"\n'
        "# exec: the signal before the time limit goes to this process, which must therefore be the launcher.\n"
        f"exec {shlex.join([*command, *overrides])}\n"
    )


def seconds(limit: str) -> float:
    """Returns a time limit in seconds; it is written as for sbatch: minutes, minutes:seconds, hours:minutes:seconds,
    days-hours, days-hours:minutes, days-hours:minutes:seconds, or UNLIMITED. Raises ConfigError for others."""
    if limit.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    if not re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}", limit):
        raise ConfigError(f"--time {limit}: expected a limit such as 24:00:00, 90 (minutes) or 2-12 (days-hours)")
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


def submit(written: str) -> str:
    """Hands a batch script to Slurm and returns the number of the job. Raises ConfigError with what Slurm says if it
    refuses it, and where there is no Slurm."""
    command = ["sbatch", "--parsable"]
    try:
        done = subprocess.run(
            command,
            input=written,
            capture_output=True,
            text=True,
            timeout=_SBATCH_S,
            encoding="utf-8",
            errors="replace",
        )
    except FileNotFoundError:
        raise ConfigError(
            "there is no sbatch here: submit on a login node of the cluster; --dry-run shows the script, and areal "
            "train starts a run on this machine"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"sbatch did not answer within {_SBATCH_S:.0f} s; 'squeue --me' says whether it took the job"
        ) from None
    if done.returncode:
        raise ConfigError(f"sbatch refuses the job: {' '.join(done.stderr.split())}")
    return done.stdout.strip().partition(";")[0]


if __name__ == "__main__":
    sys.exit(main())
