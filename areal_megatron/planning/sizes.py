"""Sizes of a cluster that is not at hand: from flags, or from the `#SBATCH` lines of a batch script."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from areal_megatron.config import Config, ConfigError
from areal_megatron.planning.pools import Node

_GPUS = re.compile(r"(?:^|,)gpu:(?:[^:,(]+:)?(\d+)")
"""The number in gpu:8, gpu:nvidia_a100-sxm4-80gb:8 and gpu:8(S:0-1),nvme:1."""


@dataclass(frozen=True)
class Sizes:
    """A number of nodes, all alike."""

    nodes: int
    gpus: int
    """GPUs of a node; 0: it computes on cores."""
    gpu_gib: float = 0
    """Memory of a GPU in GiB; 0: unknown, and nothing is refused for it."""

    @classmethod
    def given(cls, options: argparse.Namespace) -> Sizes:
        """Returns the sizes that flags give. Raises ConfigError for sizes of no cluster."""
        sizes = cls(options.nodes, options.gpus, options.gpu_gb)
        if sizes.nodes < 1 or sizes.gpus < 0 or not 0 <= sizes.gpu_gib < math.inf:
            raise ConfigError(
                f"--nodes {sizes.nodes} --gpus {sizes.gpus} --gpu-gb {sizes.gpu_gib:g}: expected at least one node and "
                "one GPU"
            )
        return sizes

    def place(self, config: Config) -> list[Node]:
        """Decides machine.device where it is `auto` and returns the nodes, node01 and so on, with the slots that the
        config uses. Raises ConfigError if there are no GPUs where the config wants some, and if nobody says how many
        cores a node has."""
        machine = config.machine
        if machine.device == "auto":
            machine.device = "cuda" if self.gpus else "cpu"
        if machine.device == "cuda" and self.gpus < max(machine.slots, 1):
            raise ConfigError(
                f"--gpus {self.gpus}: expected at least {max(machine.slots, 1)}, for machine.device=cuda and "
                f"machine.slots={machine.slots}"
            )
        if machine.device == "cpu" and not machine.slots:
            raise ConfigError("machine.slots: say how many cores of each node the run is to take")
        count = machine.slots or self.gpus
        width = len(str(self.nodes))
        return [Node(f"node{number:0{width}}", tuple(range(count))) for number in range(1, self.nodes + 1)]


def add_sizes(parser: argparse.ArgumentParser | argparse._ArgumentGroup, required: bool) -> None:
    parser.add_argument("--nodes", type=int, required=required, metavar="N", help="nodes of the cluster")
    parser.add_argument("--gpus", type=int, required=required, metavar="N", help="GPUs of a node")
    parser.add_argument(
        "--gpu-gb",
        type=float,
        default=0,
        metavar="GIB",
        help="GiB of a GPU; without it nothing is refused for its memory",
    )


def read_header(script: Path) -> Sizes:
    """Returns the sizes that a batch script asks Slurm for. Raises ConfigError if it cannot be read, asks for nodes of
    several kinds (a heterogeneous job), or does not say how many nodes."""
    try:
        lines = script.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(
            f"--batch-script: cannot read {script}: {getattr(e, 'strerror', None) or 'not text'}"
        ) from None
    asked = [line.removeprefix("#SBATCH") for line in lines if line.startswith("#SBATCH")]
    if any(line.strip() == "hetjob" for line in asked):
        raise ConfigError(
            f"--batch-script: {script} asks for nodes of several kinds: plan each pool by --nodes and --gpus"
        )
    try:
        words = [word for line in asked for word in shlex.split(line, comments=True)]
    except ValueError as e:
        raise ConfigError(f"--batch-script: cannot read the #SBATCH lines of {script}: {e}") from None
    found, _ = _header().parse_known_args(words)
    if not found.nodes.isdigit():
        raise ConfigError(f"--batch-script: {script} has no line '#SBATCH --nodes=N': give --nodes and --gpus")
    gpus = _GPUS.search(found.gpus)
    return Sizes(int(found.nodes), int(gpus[1]) if gpus else 0)


def _header() -> argparse.ArgumentParser:
    """Returns a parser of sbatch's options, of those about sizes."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-N", "--nodes", default="")
    parser.add_argument("--gres", dest="gpus", default="")
    parser.add_argument("--gpus-per-node", dest="gpus", type="gpu:{}".format)
    return parser
