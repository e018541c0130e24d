"""Plans a run without starting it: `areal plan CONFIG [key=value …] --nodes 48 --gpus 8`.

Prints which process gets which slots, the memory of the fullest ranks and the size of a checkpoint. All it needs of the
model is config.json, which it fetches if model.path names a model on the hub. Exit code 2 if the run cannot work, with
one line that says what to change. With --best it first searches the sizes with which the run is fastest on the cluster
(docs/measurements.md), and plans those. Imports neither torch nor vllm, and so works on a laptop or a login node.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.config.algorithms import PUBLISHED
from areal_megatron.engine.kv_cache import machine_bytes
from areal_megatron.hub import hub
from areal_megatron.model_check import check_model, trained_config
from areal_megatron.planning.best import (
    add_best,
    assumed_lengths,
    check_alone,
    described_again,
    described_time,
    described_weights,
    prefilled_again,
    report,
    search,
    slow,
    text,
    trainer_time,
)
from areal_megatron.planning.forecast.accelerators import accelerator
from areal_megatron.planning.memory import MemoryPlan, plan_memory
from areal_megatron.planning.memory.engine import crowded
from areal_megatron.planning.memory.parts import GIB, RankMemory
from areal_megatron.planning.memory.served import served_memory
from areal_megatron.planning.option_check import check_for_device, check_options, uncounted
from areal_megatron.planning.pools import Node, Placement, allocate
from areal_megatron.planning.sizes import Sizes, add_sizes
from areal_megatron.process.shown import guard
from areal_megatron.reward import function
from areal_megatron.run.arguments import Parser, write_output
from areal_megatron.workflows import workflow

ASK_BEST = "whether other sizes are faster on these GPUs: areal plan … --best --gpu h100"


@dataclass(frozen=True)
class ClusterPlan:
    placement: Placement
    memory: MemoryPlan
    warnings: Sequence[str] = ()
    """A line each on what works, but slowly or badly."""
    limit: str = ""
    """What limits the learning rate, in a line; empty if nothing does."""

    def table(self, searched: bool = False) -> str:
        """Returns the plan for people; `searched`: whether its sizes come from `areal plan --best`."""
        lines = [self.placement.table(), "", self.memory.table()]
        most = max(Counter(rank.node for rank in self.placement.pool("trainer")).values())
        on_host = {"optimizer.on_host": self.memory.host}
        if self.memory.gpu_gib:  # otherwise it is a part of a trainer rank's memory
            on_host["reshard.update"] = self.memory.published
        lines += [
            f"{key}: {size / GIB:,.2f} GiB of the host's memory for a trainer rank, {most * size / GIB:,.2f} for the "
            f"{most} of a node"
            for key, size in on_host.items()
            if size
        ]
        lines += [self.limit] if self.limit else []
        if self.memory.engine and self.memory.gpu_gib and not self.memory.shared and not searched:
            lines += [ASK_BEST]
        return "\n".join(lines)

    def report(self) -> dict[str, Any]:
        """Returns what `--json` writes; sizes in bytes."""
        engines = self.placement.pool("rollout")
        return {
            "nodes": len(self.placement.nodes),
            "trainer_ranks": len(self.placement.pool("trainer")),
            "engines": len(engines),
            **self.memory.report(),
        }


def plan(
    config: Config,
    nodes: Sequence[Node],
    rollout_nodes: Sequence[Node] = (),
    *,
    gpu_gib: float = 0,
    weights: bool = True,
) -> ClusterPlan:
    """Returns what runs where and how much memory it takes, for a config whose machine.device is decided.

    `rollout_nodes`: nodes of the engines alone; without them both pools share `nodes`. `gpu_gib`: memory of a GPU in
    GiB; 0 if unknown. `weights`: whether the model's weights must exist too. Raises ConfigError for whatever cannot
    work.
    """
    if config.mode == "rl":
        function.check_name(config.reward.function)
        workflow.check_name(config.rollout.workflow)
        for number, own in enumerate(config.environments):
            function.check_name(own.reward or config.reward.function, f"environments.{number}.reward")
            workflow.check_name(own.workflow or config.rollout.workflow, f"environments.{number}.workflow")
    placement = allocate(config, nodes, rollout_nodes)
    _check_parts(config, placement)
    _check_link(config)
    check_model(config, weights)
    check_for_device(config)
    memory = replace(plan_memory(config, trained_config(config), gpu_gib), served=served_memory(config, gpu_gib))
    said = (_spread(config, placement), _sudden_steps(config), _unusual_clip(config), _unbounded(config))
    said += (*uncounted(config), _crowded(config, memory), overfull(config, placement, memory))
    return ClusterPlan(placement, memory, [line for line in said if line], _limit(config))


def _sudden_steps(config: Config) -> str:
    o = config.optimizer
    if config.is_supervised or config.is_driven or o.lr <= 5e-6 or o.eps >= 1e-6:
        return ""
    return (
        f"optimizer.lr: with optimizer.eps={o.eps:g} each step moves every weight by nearly the whole rate of "
        f"{o.lr:g}, however small its gradient: such rates go with eps=1e-5, and eps=1e-8 with 1e-6 to 5e-6"
    )


def _unusual_clip(config: Config) -> str:
    """Clips scale with an algorithm's ratios: ratios of whole sequences are hundreds of times nearer to 1."""
    algorithm = config.ppo.algorithm
    for name in ("clip_low", "clip_high") if not config.is_supervised else ():
        value, published = getattr(config.ppo, name), getattr(PUBLISHED[algorithm], name)
        if value < 1 and not 0.1 <= value / published <= 10:
            return f"ppo.{name}: {value:g}, where {algorithm} is published with {published:g}, its default"
    return ""


def _limit(config: Config) -> str:
    share, eta = config.optimizer.staleness_kl, config.rollout.max_staleness
    if config.is_supervised or not share or not eta:
        return ""
    return (
        f"optimizer.staleness_kl: rates up to {config.optimizer.lr:g} are scaled down where the policy would leave its "
        f"samples, which are up to {eta} versions old, by more than {share:g} of the entropy"
    )


def _unbounded(config: Config) -> str:
    """Bounds of a ratio that is 1 at every step bound nothing."""
    ppo, named = config.ppo, config.ppo.algorithm in ("gspo", "cispo", "sapo")
    limited = config.optimizer.staleness_kl > 0 or not config.rollout.max_staleness
    if config.is_supervised or not ppo.has_unit_ratio or (limited and not named):
        return ""
    return (
        f"ppo.minibatches: with 1 and ppo.objective={ppo.objective} the bounds of {ppo.algorithm} have no effect: the "
        "policy is its own proximal policy at the only step"
        + ("" if limited else "; nothing limits a step but optimizer.lr: set optimizer.staleness_kl")
    )


def _crowded(config: Config, memory: MemoryPlan) -> str:
    size = memory.engine.of("KV cache") if memory.engine else 0
    on_cuda = config.machine.device == "cuda"
    return crowded(config, trained_config(config), size, on_cuda) if size else ""


def overfull(config: Config, placement: Placement, memory: MemoryPlan, machine: int = 0) -> str:
    """Returns a line about ranks on CPU that need more memory together than a node has; "" if they fit. `machine`: its
    bytes (0: as many as this machine has)."""
    if config.machine.device == "cuda":
        return ""
    ranks: dict[str, RankMemory | None] = {"trainer": memory.trainer, "rollout": memory.engine, **memory.served}
    needed, machine = Counter(), machine or machine_bytes()
    for process in placement.processes:
        for slot in process.slots:
            rank = ranks[process.pool]
            needed[slot.node] += rank.total if rank else 0
    if max(needed.values()) <= machine:
        return ""
    largest = max(memory.trainer.parts, key=lambda part: part.bytes)
    return (
        f"memory: by the plan the ranks of a machine need {max(needed.values()) / GIB:,.2f} GiB together (a trainer "
        f"rank {memory.trainer.total / GIB:,.2f}, its {largest.name} {largest.bytes / GIB:,.2f}), and this one has "
        f"{machine / GIB:,.2f}: lower trainer.microbatch_tokens={config.trainer.microbatch_tokens}, set "
        "trainer.recompute=full or take a smaller model; --dry-run lists the parts"
    )


def _spread(config: Config, placement: Placement) -> str:
    t = config.trainer
    ranks, size = placement.pool("trainer"), t.tp * t.cp
    nodes = max(len({rank.node for rank in ranks[first : first + size]}) for first in range(0, len(ranks), size))
    if t.cp == 1 or nodes == 1:
        return ""
    return (
        f"trainer.cp: the {size} ranks of tp={t.tp} × cp={t.cp} are on {nodes} nodes, and exchange keys and values "
        "over the network in every layer, twice; ranks of one node do so faster"
    )


def _check_parts(config: Config, placement: Placement) -> None:
    for engine in placement.pool("rollout"):
        if config.machine.device == "cpu" and len(engine.slots) > len(engine.parts) > 1:
            here = len(engine.slots) // len(engine.parts)
            raise ConfigError(
                f"rollout.tp: an engine of {len(engine.slots)} spans {len(engine.parts)} nodes with {here} "
                "cores each: on CPU vLLM wants one rank on each, set machine.slots=1"
            )


def _check_link(config: Config) -> None:
    if config.shares_gpus and config.reshard.link == "device":
        raise ConfigError(
            "reshard.link: NCCL connects no two processes on one GPU, where machine.shared puts a trainer rank and an "
            "engine: set it to host, or leave it out"
        )


def main(arguments: list[str] | None = None) -> int:
    guard()
    parser = Parser("areal_megatron.planning.plan", __doc__)
    parser.add_config()
    add_sizes(parser, required=True)
    add_best(parser)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_intermixed_args(arguments)
    try:
        sizes, found, gpu, lengths = Sizes.given(options), None, None, None
        check_alone(options)
        config = config_file.load(options.config, options.overrides)
        config.machine.device = "cuda"
        config.model.path = hub.model_folder(config.model.path, "model.path", weights=False)
        if teacher := config.ppo.penalty.kl_folder:
            config.ppo.penalty.kl_model = hub.model_folder(teacher, "ppo.penalty.kl_model", weights=False)
        for name, model in config.served_models.items():
            model.path = hub.model_folder(model.path, f"served.{name}.path", weights=False)
        if options.gpu:
            gpu, lengths = accelerator(options.gpu), assumed_lengths(options, config)
            sizes = replace(sizes, gpu_gib=sizes.gpu_gib or gpu.gib)
        if options.best:
            assert gpu is not None and lengths is not None  # see check_alone
            found = search(config, sizes, options, gpu, lengths)
            print(text(config, found, sizes.gpu_gib), end="\n\n")
            config = found.proposals[0].config
        nodes = sizes.place(config)
        planned = plan(config, nodes, gpu_gib=sizes.gpu_gib, weights=False)
        print(planned.table(searched=options.best))
        times, again = {}, {}
        if gpu is not None and lengths is not None and config.mode == "rl":
            times = trainer_time(planned.memory.recompute.apply(config), gpu, lengths, len(nodes[0].slots))
            print(described_time(times, gpu), described_weights(config, gpu), sep="\n")
            if config.rollout.kv_policy == "recompute" and not config.machine.shared:
                node_gpus, trainer_s = len(nodes[0].slots), sum(times.values())
                again = prefilled_again(config, gpu, lengths, node_gpus, sizes.gpu_gib, trainer_s)
                print(described_again(again))
        for warning in [*planned.warnings, *check_options(config, python={}), *(slow(found) if found else ())]:
            print(f"warning: {warning}", file=sys.stderr)
        figures = planned.report() | ({"trainer_s": times} if times else {})
        figures |= ({"prefilled_again": again} if again else {}) | (report(found) if found else {})
        write_output("--json", options.json, figures)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
