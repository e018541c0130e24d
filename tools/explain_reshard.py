"""Who sends which weights to whom, how many bytes that is, and how long it should take. Starts nothing.

    python tools/explain_reshard.py CONFIG [key=value …] [--rank TRAINER] [--link 45] [--memory 2000] [--json FILE]
                                    [--changed 0.015] [--look 2]

CONFIG is a run's config. Of the model only model.path/config.json is read, so that a cluster's plan can be inspected
anywhere (configs/models has those of some models). --rank lists what one trainer rank sends. The prediction assumes
that every rank sends and receives at --link GB/s at the same time, that all engines are updated at once, and that a
commit reads and writes the engine rank's shard once at --memory GB/s. Where trainers send what has changed
(reshard.update), the share --changed of the elements has, and each rank looks through what it sends, once for all
engines, at --look GB/s, while the changes that it has found are on their way.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from math import prod
from pathlib import Path

from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.hub import hub
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.models.pattern import NUMBER, taken_numbers
from areal_megatron.process.files import write_json
from areal_megatron.process.shown import guard
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.plan import Plan, Planner, Transfer
from areal_megatron.reshard.trainer_layout import MegatronSizes

CHANGE_BYTES = {"none": 2.05, "zstd": 1.34}
"""What a change takes of bfloat16 weights at a learning rate of 1e-6 (docs/measurements.md)."""
ROWS = 16
"""Trainer ranks listed before the table is cut short."""


class Explained:
    """The plans of all engines and their sums, in elements unless a name says otherwise."""

    def __init__(self, config: Config):
        hf_config = read_config(config.model.path)
        self.config, self.model = config, architecture(hf_config)
        self.trainers, self.engine = MegatronSizes.of(config.trainer), EngineSizes.of(config.rollout)
        self.element = ITEMSIZE[config.model.dtype]
        start = time.process_time()
        planner = Planner.of(config, hf_config, self.trainers)
        self.plans = [planner.plan(number) for number in range(config.rollout.engines)]
        self.seconds = time.process_time() - start
        self.slices = [layout.size for layout in planner.destinations]
        self.traffic = planner.traffic
        self.received = [[0] * self.engine.ranks for _ in self.plans]
        looked: set[Transfer] = set()
        self.looked = [0] * self.trainers.ranks
        """Trainer rank → the elements that it sends, those that several engines take counted once."""
        for number, plan in enumerate(self.plans):
            for transfer in plan.transfers:
                if transfer not in looked:
                    looked.add(transfer)
                    self.looked[transfer.source] += transfer.send.box.size
                self.received[number][transfer.destination] += transfer.receive.box.size

    def figures(self, link: float, memory: float, changed: float, look: float) -> dict[str, float]:
        """Returns what --json writes; `link`, `memory` and `look` in GB/s."""
        change = changed * CHANGE_BYTES[self.config.reshard.compression] / self.element
        sent, received = max(self.traffic.sent) * self.element, max(map(max, self.received)) * self.element
        shard = max(self.slices) * self.element
        return {
            "model_gb": sum(map(prod, self.model.canonical.values())) * self.element / 1e9,
            "bytes_over_minimum": max(
                got / own for rank in self.received for got, own in zip(rank, self.slices, strict=True)
            ),
            "received_gb_per_engine_rank": received / 1e9,
            "sent_gb_per_trainer_rank_max": sent / 1e9,
            "sources_per_engine_rank": self.traffic.sources,
            "messages_per_engine_rank": max(len(self.plans[0].received_by(rank)) for rank in range(self.engine.ranks)),
            "communicators_per_trainer_rank": max(map(len, self.traffic.peers)),
            "busiest_sender_over_mean": self.traffic.busiest_over_mean,
            "busiest_sender_over_least": self.traffic.busiest_over_least,
            "predicted_transfer_s": max(sent, received) / 1e9 / link,
            "predicted_transfer_of_changes_s": max(
                max(self.looked) * self.element / 1e9 / look, change * max(sent, received) / 1e9 / link
            ),
            "predicted_commit_s": 2 * shard / 1e9 / memory,
            "planning_s": self.seconds,
            "planning_peak_mb": _peak_mb(),
        }


def _peak_mb() -> float:
    """Returns the most memory that this program has had; getrusage would count that of its parent before the start."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def describe(explained: Explained, figures: Mapping[str, float], options: argparse.Namespace) -> str:
    config, trainers = explained.config, explained.trainers
    stages = "+".join(map(str, trainers.stage_sizes(explained.model.dimensions.layers)))
    lines = [
        f"{Path(config.model.path).name}: {figures['model_gb']:,.1f} GB in {config.model.dtype}",
        f"{trainers.ranks} trainer ranks: tp {trainers.tp}, pp {trainers.pp} ({stages} layers), dp {trainers.dp}, "
        f"ep {trainers.ep}, etp {trainers.expert_tp}, vpp {trainers.vpp}",
        f"{config.rollout.engines} engines of {explained.engine.ranks} ranks: tp {explained.engine.tp}"
        + (", expert parallel" if explained.engine.expert_parallel else ""),
        "",
        f"{'trainer rank':>12}{'tp':>4}{'dp':>4}{'pp':>4}{'ep':>4}{'MB sent':>12}"
        f"{'to engines':>12}{'to their ranks':>16}",
    ]
    for rank in range(min(trainers.ranks, ROWS)):
        at, megabytes = trainers.coordinates(rank), explained.traffic.sent[rank] * explained.element / 1e6
        peers = explained.traffic.peers[rank]
        lines.append(
            f"{rank:>12}{at.tp:>4}{at.dp:>4}{at.pp:>4}{at.ep:>4}{megabytes:>12,.2f}{len(peers):>12}{sum(peers):>16}"
        )
    if trainers.ranks > ROWS:
        lines.append(f"{'…':>12}  and {trainers.ranks - ROWS} more; --rank N lists what one of them sends")
    lines += [
        "",
        f"each engine rank receives at most {figures['received_gb_per_engine_rank']:,.3f} GB, "
        f"{figures['bytes_over_minimum']:.3f} of its own slice, in at most "
        f"{figures['messages_per_engine_rank']:,} messages from {figures['sources_per_engine_rank']} trainer ranks",
        f"the busiest trainer rank sends {figures['sent_gb_per_trainer_rank_max']:,.3f} GB, "
        f"{figures['busiest_sender_over_mean']:.3f} of the mean and {figures['busiest_sender_over_least']:.3f} of the "
        "least that the layouts allow",
        f"predicted: transfer {figures['predicted_transfer_s']:.3f} s at {options.link:g} GB/s a rank, while engines "
        f"generate; commit {1e3 * figures['predicted_commit_s']:.1f} ms at {options.memory:g} GB/s, plus vLLM's fixed "
        "pause",
        f"with {options.changed:.1%} of the elements changed: transfer "
        f"{figures['predicted_transfer_of_changes_s']:.3f} s, looked through at {options.look:g} GB/s a rank",
        f"planned in {figures['planning_s']:.2f} s of one core with {figures['planning_peak_mb']:,.0f} MB",
    ]
    return "\n".join(lines)


def list_rank(explained: Explained, rank: int) -> str:
    """Lists every tensor that trainer rank `rank` sends, by engine rank, with the boxes of one tensor together."""
    lines = [f"{'engine':>6}{'rank':>5}{'MB':>12}{'boxes':>7}  tensor, layers and experts"]
    for number, plan in enumerate(explained.plans):
        for (destination, tensor), transfers in _by_tensor(plan, rank).items():
            megabytes = sum(transfer.receive.box.size for transfer in transfers) * explained.element / 1e6
            lines.append(
                f"{number:>6}{destination:>5}{megabytes:>12,.3f}{len(transfers):>7}  {_numbers(tensor, transfers)}"
            )
    return "\n".join(lines)


def _by_tensor(plan: Plan, rank: int) -> dict[tuple[int, str], list[Transfer]]:
    found: dict[tuple[int, str], list[Transfer]] = defaultdict(list)
    for transfer in plan.transfers:
        if transfer.source == rank:
            found[transfer.destination, transfer.receive.tensor].append(transfer)
    return dict(sorted(found.items()))


def _numbers(tensor: str, transfers: list[Transfer]) -> str:
    """Returns the name with the ranges of its numbers, such as model.layers.{0–6}.mlp…"""
    boxes, name = [transfer.receive.box for transfer in transfers], tensor
    for axis, taken in enumerate(taken_numbers(tensor)):
        first = taken[min(box.start[axis] for box in boxes)]
        last = taken[max(box.stop[axis] for box in boxes) - 1]
        name = NUMBER.sub(f"{{{first}–{last}}}" if first < last else str(first), name, count=1)
    return name


def main() -> None:
    guard()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--rank", type=int, help="list what this trainer rank sends")
    parser.add_argument("--link", type=float, default=45.0, help="GB/s that a rank sends and receives")
    parser.add_argument("--memory", type=float, default=2000.0, help="GB/s of an engine rank's memory")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--changed", type=float, default=0.015, help="share of elements that an update changes")
    parser.add_argument("--look", type=float, default=2.0, help="GB/s of weights that a trainer rank looks through")
    options = parser.parse_intermixed_args()
    try:
        config = config_file.load(options.config, options.overrides)
        config.model.path = hub.model_folder(config.model.path, "model.path", weights=False)
        explained = Explained(config)
        if options.rank is not None and not 0 <= options.rank < explained.trainers.ranks:
            raise ConfigError(f"--rank: {options.rank} is none of the {explained.trainers.ranks} trainer ranks")
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    figures = explained.figures(options.link, options.memory, options.changed, options.look)
    if options.rank is None:
        print(describe(explained, figures, options))
    else:
        print(list_rank(explained, options.rank))
    if options.json:
        write_json(options.json, figures)


if __name__ == "__main__":
    main()
