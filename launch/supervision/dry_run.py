"""`--dry-run`: what a launcher would start, and where. Starts nothing and writes nothing."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from areal_megatron.config import SERVED, Config, ConfigError, config_file
from areal_megatron.launch.supervision import start
from areal_megatron.launch.supervision.orders import MODULES
from areal_megatron.launch.supervision.start import Beginning
from areal_megatron.planning.sizes import Sizes, add_sizes, read_header
from areal_megatron.run.network import check_network


def add_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="print who gets which slots, and how much memory; start nothing"
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--dry-run` with the sizes of a cluster that is not at hand."""
    add_flag(parser)
    sizes = parser.add_argument_group("where the nodes are not there yet, --dry-run with")
    add_sizes(sizes, required=False)
    sizes.add_argument(
        "--batch-script", type=Path, metavar="FILE", help="take the number of nodes and GPUs from its #SBATCH lines"
    )


def imagined(options: argparse.Namespace, here: bool) -> Sizes | None:
    """Returns the sizes that the flags of a launcher give; None if the nodes are to be asked, which `here` says are
    there. Raises ConfigError for half a size, and for sizes without --dry-run."""
    if options.nodes is None and options.gpus is None:
        asked = options.dry_run and options.batch_script and not here
        return read_header(options.batch_script) if asked else None
    if not options.dry_run:
        raise ConfigError("--nodes and --gpus go with --dry-run: a run takes the nodes that it is given")
    if options.nodes is None or options.gpus is None:
        raise ConfigError("--dry-run: --nodes and --gpus go together")
    return Sizes.given(options)


def show_imagined(options: argparse.Namespace, sizes: Sizes) -> int:
    """Prints what the launcher with these options would start on a cluster of those sizes, and returns the exit code.
    Raises ConfigError for a run that could not start there."""
    config = config_file.load(options.config, options.overrides)
    print(text(check_imagined(config, sizes, options.python), options.python))
    return 0


def check_imagined(config: Config, sizes: Sizes, python: Mapping[str, Sequence[str]] = {}) -> Beginning:
    """Checks all that can be checked without the nodes; `python` as in start.check. Raises ConfigError."""
    nodes = sizes.place(config)
    if config.machine.host[:1].isdigit():  # an interface is looked up where the run will be
        check_network(config.machine.host, {node.name for node in nodes})
    if config.shares_gpus and not sizes.gpu_gib:
        raise ConfigError("machine.shared: say by --gpu-gb how much memory a GPU has, which the pools are to divide")
    return start.check(config, nodes, gpu_gib=sizes.gpu_gib, python=python)


def text(beginning: Beginning, python: Mapping[str, Sequence[str]]) -> str:
    """Returns who gets which slots and how much memory, and the processes that would be started. `python`: the command
    of another interpreter for a pool. Raises ConfigError if the run exists and is not to be resumed."""
    config, checkpoint = beginning.config, beginning.checkpoint
    start.is_new(config)
    pools = [("controller", "controller"), ("trainer", "trainer rank"), ("rollout", "engine")]
    pools += [(model, f"{model} engine") for model in config.served_models]
    counts = {kind: (pool, len(beginning.plan.placement.pool(pool))) for pool, kind in pools}
    whence = f"resumed from {checkpoint.folder}, policy version {checkpoint.version}" if checkpoint else "a new run"
    lines = [beginning.plan.table(), "", f"would start {beginning.run.folder}, {whence}:"]
    for kind, (pool, count) in counts.items():
        if count:
            command = " ".join([*python.get("rollout" if pool in SERVED else pool, ["python"]), "-m", MODULES[pool]])
            lines.append(f"  {count:,} {kind}{'s' * (count > 1)}: {command}")
    return "\n".join(lines)
