"""`areal plan --best`: the options of the search for the fastest sizes, and what it has found as YAML to paste."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from areal_megatron.config import Config, ConfigError, LoraConfig, config_file
from areal_megatron.model_check import trained_config
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.planning.forecast.accelerators import Accelerator
from areal_megatron.planning.forecast.layouts import Cluster
from areal_megatron.planning.forecast.lengths import AnswerLengths
from areal_megatron.planning.forecast.pace import BatchLengths, draw_batches, pace
from areal_megatron.planning.forecast.search import Found, Proposal, Search, SearchBounds
from areal_megatron.planning.forecast.step_limit import StepLimit
from areal_megatron.planning.forecast.times import times_of
from areal_megatron.planning.forecast.trainer_time import TrainerTime
from areal_megatron.planning.forecast.weights_time import WeightsTime
from areal_megatron.planning.length_options import add_lengths, given_lengths
from areal_megatron.planning.memory import plan_memory
from areal_megatron.planning.memory.parts import GIB
from areal_megatron.planning.sizes import Sizes
from areal_megatron.run.folder import RunFolder

PROPOSED = 4
"""Proposals that are printed."""
_ALWAYS = {
    "trainer": ("tp", "pp", "dp"),
    "rollout": ("engines", "tp", "max_staleness", "max_running"),
    "reshard": (),
    "checkpoint": (),
}
_IF_CHANGED = {"trainer": ("cp", "vpp", "ep", "etp"), "rollout": (), "reshard": ("staging",), "checkpoint": ("every",)}
"""Keys that are written if they differ from the default, or from what the config has."""
_MUCH = 2.0
_NEEDS = {"max_staleness": "best", "mtbf_hours": "best", "steps_of": "best", "median": "gpu", "lengths_of": "gpu"}
"""Option → the option without which it has no meaning."""


def add_best(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--best", action="store_true", help="search the sizes with which the run is fastest")
    parser.add_argument(
        "--gpu", help="a100, h100, h800, h200, b200, or a JSON file with its rates: say what an update would take"
    )
    parser.add_argument("--max-staleness", type=int, metavar="N", help="largest rollout.max_staleness; the config's")
    parser.add_argument(
        "--mtbf-hours", type=float, metavar="H", help="mean time between failures of a node: chooses checkpoint.every"
    )
    parser.add_argument(
        "--steps-of",
        type=Path,
        metavar="RUN_FOLDER",
        help="weigh speed against the learning rate that staleness leaves, as this run has shown it",
    )
    add_lengths(parser)


def check_alone(options: argparse.Namespace) -> None:
    """Raises ConfigError for options that have no meaning without another."""
    for name, needed in _NEEDS.items():
        if getattr(options, name) is not None and not getattr(options, needed):
            raise ConfigError(f"--{name.replace('_', '-')}: has no meaning without --{needed}")
    if options.best and not options.gpu:
        raise ConfigError("--best: say which GPUs, --gpu h100 for example")


def trainer_time(config: Config, gpu: Accelerator, lengths: AnswerLengths, node_gpus: int) -> dict[str, float]:
    """Returns what takes the time of an update on the trainers, in seconds (TrainerTime.shares); the recomputation of
    `config` must be decided."""
    time = TrainerTime(config, trained_config(config), gpu, node_gpus)
    [(prompts, answers), *_] = draw_batches(lengths, config, config.batch_size)
    return time.shares(time.packed(np.repeat(prompts, answers.shape[1]), answers.ravel()))


def described_time(seconds: Mapping[str, float], gpu: Accelerator) -> str:
    """Returns a line for people."""
    total = sum(seconds.values())
    rest = sorted(((name, each / total) for name, each in seconds.items() if name != "useful"), key=lambda r: -r[1])
    others = ", ".join(f"{name} {share:.0%}" for name, share in rest if share >= 0.005)
    return f"an update on the trainers, {gpu.name}: {total:,.1f} s, MFU {seconds['useful'] / total:.0%}; {others}"


def described_weights(config: Config, gpu: Accelerator) -> str:
    """Returns a line about an update of the engines; with adapters also about one of all weights."""

    def times(of: Config) -> str:
        found = WeightsTime.of(of, trained_config(of), gpu)
        return f"{1e3 * found.transfer:,.0f} ms on their way, a pause of {1e3 * found.commit:,.0f} ms"

    if not config.engines_adapt:
        return f"new weights for the engines, {gpu.name}: {times(config)}"
    whole = times(replace(config, lora=LoraConfig()))
    return f"new adapters for the engines, {gpu.name}: {times(config)}; all weights would be {whole}"


def prefilled_again(
    config: Config, gpu: Accelerator, lengths: AnswerLengths, node_gpus: int, gib: float, trainer_s: float
) -> dict[str, float]:
    """Returns how many tokens an engine computes again at an update, in how many seconds, and the seconds between two
    updates, by the formulas of `pace`; trainers need `trainer_s` for a batch."""
    config, times = times_of(config, gpu, node_gpus, gib)
    drawn = BatchLengths.of(draw_batches(lengths, config))
    found = pace(config, drawn, times.engine, times.weights, times.kv_tokens, trainer_s, times.reward_s)
    return {"tokens": found.again, "seconds": found.again_s, "update_s": found.update}


def described_again(figures: Mapping[str, float]) -> str:
    """Returns a line for people, of rounded figures."""
    tokens, share = float(f"{figures['tokens']:.2g}"), figures["seconds"] / figures["update_s"]
    return (
        f"rollout.kv_policy=recompute: at an update an engine prefills about {tokens:,.0f} tokens again, in "
        f"{figures['seconds']:,.1f} s of {figures['update_s']:,.0f}, {share:.0%}"
    )


def search(
    config: Config, sizes: Sizes, options: argparse.Namespace, gpu: Accelerator, lengths: AnswerLengths
) -> Found:
    """Returns what fits the cluster best. Raises ConfigError if nothing fits."""
    steps = StepLimit()
    if options.steps_of is not None:
        trained = config_file.load_run(options.steps_of)
        updates = [line for line in read_metrics(RunFolder(options.steps_of)) if line["kind"] == "update"]
        steps = StepLimit.of(updates, trained, config)
    nodes = sizes.place(config)
    most = options.max_staleness if options.max_staleness is not None else config.rollout.max_staleness
    mtbf_s = 3600 * (options.mtbf_hours if options.mtbf_hours is not None else float("inf"))
    cluster = Cluster(len(nodes), len(nodes[0].slots), sizes.gpu_gib)
    print(f"searching for {cluster.size} GPUs; this may take a minute", file=sys.stderr)
    return Search(config, nodes, cluster, gpu, lengths, SearchBounds(most, mtbf_s, steps)).best(PROPOSED)


def assumed_lengths(options: argparse.Namespace, config: Config) -> AnswerLengths:
    """Returns the lengths of the options; without any it prints and takes a median of a quarter of
    rollout.max_new_tokens. Raises ConfigError."""
    quarter = config.rollout.max_new_tokens / 4
    lengths = given_lengths(options, config, quarter)
    if options.median is None and not options.lengths_of:
        print(
            f"# answers: median {quarter:,.0f} tokens, a quarter of rollout.max_new_tokens, unless --median or "
            "--lengths-of says otherwise"
        )
    return lengths


def text(config: Config, found: Found, gib: float) -> str:
    """Returns the proposals as YAML, each below comments with what it would be like; then the config's own sizes."""
    lines = []
    for number, each in enumerate(found.proposals, 1):
        lines += [*_described(str(number), each, gib), *yaml_lines(each.config, config), ""]
    if found.own:
        lines += _described("as it is", found.own, gib)
    else:
        lines.append(f"# as it is: not on this cluster: {found.own_problem}")
    return "\n".join(lines)


def slow(found: Found) -> Iterator[str]:
    """Yields a line if the config's own sizes are _MUCH slower than the best."""
    own, best = found.own, found.proposals[0]
    if own and (times := best.progress / own.progress) >= _MUCH:
        yield f"as it is the run would take {times:.1f} times as long as with proposal 1, on the same GPUs"


def yaml_lines(proposed: Config, config: Config) -> Iterator[str]:
    """Yields a line for each section of `config` with the keys that make it the proposed one."""
    defaults = Config()
    for section, always in _ALWAYS.items():
        values = {}
        for key in (*always, *_IF_CHANGED[section]):
            value, before, default = (getattr(getattr(each, section), key) for each in (proposed, config, defaults))
            if key in always or value != before or value != default:
                values[key] = value
        if values:
            yield f"{section}: {{{', '.join(f'{key}: {value}' for key, value in values.items())}}}"


def report(found: Found) -> dict[str, Any]:
    """Returns what --json adds: the figures of each proposal and its sizes by section."""
    return {"proposals": [_figures(each) for each in found.proposals], "own": found.own and _figures(found.own)}


def _figures(each: Proposal) -> dict[str, Any]:
    run, keys = each.run, {section: (*own, *_IF_CHANGED[section]) for section, own in _ALWAYS.items()}
    return {
        "tokens_per_s": run.tokens_per_s,
        "lr_factor": each.steps,
        "update_s": each.update_s,
        "hours": each.hours,
        "trainer_idle": each.trainer_idle,
        "engine_idle": 1 - run.engine_busy,
        "binds": each.binds,
        "least_s": asdict(each.candidate.pace),
        "sizes": {
            section: {key: getattr(getattr(each.config, section), key) for key in own} for section, own in keys.items()
        },
    }


def _described(name: str, each: Proposal, gib: float) -> list[str]:
    run, config = each.run, each.config
    memory, r = plan_memory(config, trained_config(config), gib), config.rollout
    assert memory.engine is not None  # a proposal is of two pools
    shorter = f" at {each.steps:.2f} of the rate" if each.steps < 1 else ""
    return [
        f"# {name}: {run.tokens_per_s:,.0f} tokens/s, an update in {each.update_s:,.1f} s, {each.hours:,.1f} h for "
        f"{config.updates} updates{shorter}; {each.binds} binds",
        f"# trainers: {config.trainer_ranks} GPUs, {memory.trainer.total / GIB:.2f} of {gib:g} GiB, idle "
        f"{each.trainer_idle:.0%}; engines: {r.engines} × {r.tp} GPUs, {memory.engine.of('KV cache') / GIB:.2f} GiB "
        f"for KV, idle {1 - run.engine_busy:.0%}",
    ]
