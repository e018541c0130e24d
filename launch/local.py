"""Launches a run on this machine: `areal train CONFIG [key=value …] [--dry-run] [--restarts N]`.

Allocates the pools, starts controller, engines and trainer ranks side by side, shows progress, and ends all of them
when one fails or at Ctrl-C. Exit code 0: done, 1: a process failed, 2: wrong input, or a failure that repeats by
itself, 4: replaced, 75: stopped after a checkpoint because SIGUSR1 asked for it, 130: interrupted. Imports neither
torch nor vllm.
"""

from __future__ import annotations

import os
import shlex
import sys

from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.launch.supervision import dry_run, gpus, start
from areal_megatron.launch.supervision.hosts import Here
from areal_megatron.launch.supervision.supervise import Outcome, supervise
from areal_megatron.planning.pools import Node
from areal_megatron.process import lifeline
from areal_megatron.process.shown import guard
from areal_megatron.run import descriptors
from areal_megatron.run.folder import Replaced
from areal_megatron.run.network import check_network


def main(arguments: list[str] | None = None) -> int:
    guard()
    lifeline.hold(guardian_s=0.0)  # of a program that drives the run
    parser = start.parser("areal_megatron.launch.local", __doc__)
    dry_run.add_flag(parser)
    options = parser.parse_intermixed_args(arguments)
    options.again = _again(parser.prog, sys.argv[1:] if arguments is None else arguments)
    try:
        config = config_file.load(options.config, options.overrides)
        check_network(config.machine.host, ["this machine"])
        config.machine.device = device_of(config)
        gpu_gib = gpus.smallest_gib(gpus.visible()) if config.machine.device == "cuda" else 0
        if options.dry_run:
            beginning = start.check(config, [this_node(config)], gpu_gib=gpu_gib, python=options.python)
            print(dry_run.text(beginning, options.python))
            return 0
        start.check_packages(config, options.python)
        with start.lease(config) as lease:
            beginning = start.check(config, [this_node(config)], gpu_gib=gpu_gib, run=lease.run, python=options.python)
            if config.trainer.recompute == "auto":
                print(beginning.plan.memory.recompute, flush=True)
            beginning.begin()
            return supervise(beginning, Here(), options, lease)
    except (ConfigError, Replaced) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else Outcome.REPLACED


def _again(program: str, arguments: list[str]) -> str:
    """Returns the command that starts the run once more."""
    return shlex.join([*program.split(), *(word for word in arguments if not word.startswith("resume="))])


def device_of(config: Config) -> str:
    """Returns machine.device, where `auto` is decided by what this machine has. Raises ConfigError if it lacks what was
    asked for."""
    return start.decide_device(config, {"this machine": gpus.visible()})


def this_node(config: Config) -> Node:
    """Returns this machine with the slots that the config uses; machine.device must be decided. Raises ConfigError if
    it has fewer GPUs."""
    slots = config.machine.slots
    if config.machine.device != "cuda":
        return Node("localhost", tuple(range(slots or len(os.sched_getaffinity(0)))), files=descriptors.hard_limit())
    found = gpus.visible()
    if slots > len(found):
        raise ConfigError(f"machine.slots={slots} but this machine has {len(found)} GPUs")
    return Node("localhost", tuple(found[: slots or None]), files=descriptors.hard_limit())


if __name__ == "__main__":
    sys.exit(main())
