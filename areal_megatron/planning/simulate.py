"""Simulates a run without starting it: `areal simulate CONFIG [key=value …] --gpu h800 --median 7600`.

The run's own decisions (admission, forming and packing batches, the senders of weights) on times predicted from the
GPU's rates (docs/measurements.md). Of the model it needs config.json. Answers have lognormal lengths, or with
--lengths-of those trained by a run with rollout.dump=true. Exit code 2 with one line and the remedy if the run cannot
work. Imports neither torch nor vllm.
"""

from __future__ import annotations

import math
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.hub import hub
from areal_megatron.observe.advice import advise
from areal_megatron.planning.forecast.accelerators import Accelerator, accelerator
from areal_megatron.planning.forecast.simulator import Circumstances, SimulatedRun, Simulator, Times, TrainedUpdate
from areal_megatron.planning.forecast.times import times_of
from areal_megatron.planning.length_options import add_lengths, given_lengths
from areal_megatron.process.shown import guard
from areal_megatron.run.arguments import Parser, write_output

QUIET_S = 5.0
"""Seconds after which the command says how far it is, and again after as many."""


def table(config: Config, gpu: Accelerator, times: Times, run: SimulatedRun) -> str:
    trained = sum(run.staleness.values())
    shares = " ".join(f"{value}: {number / trained:.1%}" for value, number in sorted(run.staleness.items()))
    weights, last = times.weights, run.steady
    rows = {
        "GPUs": f"{run.gpus} {gpu.name}: trainers {config.trainer_ranks}, engines {config.rollout.engines} × "
        f"{config.rollout.tp}{', shared' if config.machine.shared else ''}",
        "trained tokens/s": f"{run.tokens_per_s:,.0f}, {run.tokens_per_s / run.gpus:,.0f} a GPU",
        "update": f"{run.update_s:,.1f} s; trainers work for {sum(u.training for u in last) / len(last):,.1f} s of it",
        "run": f"{run.hours(config.updates):,.2f} h for {config.updates} updates, {len(run.updates)} of them simulated",
        "idle": f"engines {1 - run.engine_busy:.1%}, trainers {1 - run.trainer_busy:.1%} of the time",
        "stragglers": f"trainers waited for them for {run.straggler_wait:.1%} of the time",
        "staleness": f"{shares} of the answers",
        "tokens": f"{run.sampled:,.0f} sampled, {run.wasted:.1%} of them wasted; {run.preempted:,} answers preempted",
        "prefilled again": f"{run.prefilled_again:,.0f} tokens an engine and update, in {run.prefilling_again:.1%} of "
        f"its time; rollout.kv_policy={config.rollout.kv_policy}",
        "weights": f"transfer {weights.transfer:.2f} s, pause {1e3 * weights.commit:.0f} ms",
        "checkpoint": f"trainers pause for {weights.checkpoint:.2f} s",
    }
    if run.failures:
        rows["failures"] = ", ".join(f"{kind} {count}" for kind, count in sorted(run.failures.items()))
    if advice := advise(config, update_lines(config, run)):
        rows["advice"] = advice.line
    return "\n".join(f"{name:<18}{text}" for name, text in rows.items())


def update_lines(config: Config, run: SimulatedRun) -> list[dict[str, Any]]:
    """Returns what advice needs of the lines that the run would have written into metrics.jsonl, but for the first.

    How idle and how full engines were is known of the whole run alone.
    """
    return [
        {
            "version": update.version + 1,
            "update_s": update.end - before.end,
            "trainer_wait_s": update.end - before.end - update.training,
            "straggler_wait_s": update.straggler_wait,
            "engine_idle_share": 1 - run.engine_busy,
            "engine_full_share": run.engine_full,
            "engines_serving": config.rollout.engines,
        }
        for before, update in pairwise(run.updates)
    ]


def report(config: Config, run: SimulatedRun) -> dict[str, object]:
    """Returns what --json writes."""
    return {
        "gpus": run.gpus,
        "tokens_per_s": run.tokens_per_s,
        "update_s": run.update_s,
        "hours": run.hours(config.updates),
        "engine_idle": 1 - run.engine_busy,
        "trainer_idle": 1 - run.trainer_busy,
        "straggler_wait": run.straggler_wait,
        "prefilled_again": run.prefilled_again,
        "prefilling_again": run.prefilling_again,
        "wasted": run.wasted,
        "failures": dict(run.failures),
        "staleness": {str(value): number for value, number in sorted(run.staleness.items())},
        "updates": [
            {
                "version": update.version,
                "end_s": update.end,
                "tokens": update.tokens,
                "training_s": update.training,
                "straggler_wait_s": update.straggler_wait,
            }
            for update in run.updates
        ],
    }


class SimulationProgress:
    """Says on stderr how far a simulation is, once it takes longer than QUIET_S."""

    def __init__(self, updates: int):
        self._updates, self._begun = updates, time.monotonic()
        self._told = self._begun

    def __call__(self, update: TrainedUpdate) -> None:
        now = time.monotonic()
        if now - self._told >= QUIET_S:
            self._told = now
            print(
                f"{update.version + 1} of {self._updates} updates, {update.end / 3600:,.2f} h of the run, in "
                f"{now - self._begun:,.0f} s",
                file=sys.stderr,
            )


def main(arguments: list[str] | None = None) -> int:
    guard()
    parser = Parser("areal_megatron.planning.simulate", __doc__)
    parser.add_config()
    parser.add_argument("--gpu", required=True, help="a100, h100, h800, h200, b200, or a JSON file with its rates")
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="GPUs of a node")
    parser.add_argument("--gpu-gb", type=float, default=0, metavar="GIB", help="GiB of a GPU, if not as usual")
    add_lengths(parser)
    parser.add_argument("--simulate", type=int, default=0, metavar="N", help="stop after N updates")
    parser.add_argument(
        "--filtered", type=float, default=0, metavar="SHARE", help="share of the groups that are filtered"
    )
    parser.add_argument("--wait", action="store_true", help="engines let answers end before they take new weights")
    parser.add_argument("--mtbf-hours", type=float, default=float("inf"), help="mean time between failures of a node")
    parser.add_argument("--return-s", type=float, default=300, help="seconds until engines, or the run, are back")
    parser.add_argument("--seed", type=int, default=0, help="seed of lengths and failures; default 0")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_intermixed_args(arguments)
    try:
        gpu = accelerator(options.gpu)
        config = config_file.load(options.config, options.overrides)
        if config.mode != "rl":
            raise ConfigError(f"mode: a run of mode={config.mode} has no schedule; there is nothing to simulate")
        if options.simulate < 0 or options.gpus < 1 or not 0 <= options.gpu_gb < math.inf:
            raise ConfigError(
                f"--simulate {options.simulate} --gpus {options.gpus} --gpu-gb {options.gpu_gb:g}: expected a number "
                "of updates, at least one GPU and a size"
            )
        config.model.path = hub.model_folder(config.model.path, "model.path", weights=False)
        lengths = given_lengths(options, config)
        around = Circumstances(
            interruption=not options.wait,
            filtered=options.filtered,
            node_mtbf_s=3600 * options.mtbf_hours,
            return_s=options.return_s,
            node_gpus=options.gpus,
            seed=options.seed,
        )
        config, times = times_of(config, gpu, options.gpus, options.gpu_gb)
        updates = min(options.simulate or config.updates, config.updates)
        run = Simulator(config, times, lengths, around).run(updates, SimulationProgress(updates))
        print(table(config, gpu, times, run))
        write_output("--json", options.json, report(config, run))
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
