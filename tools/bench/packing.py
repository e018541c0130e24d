"""How many micro-batches a batch takes, how balanced the replicas are, and how long planning takes.

    python tools/bench/packing.py [--lengths FILE] [--dp 8] [--cap 32768] [--minibatches 1] [--model DIR] [--seeds 3]
                                  [--repetitions 5] [--cp 2,4,8] [--json FILE]

FILE has one length in tokens a line, or is a JSON list of them; --json then also writes the assignment: indices of
lengths by replica, mini-batch and micro-batch. Without --lengths, three distributions are generated, with `--seeds`
draws of each. areal_megatron/packing/partition.py is compared with Algorithm 1 of the paper (arXiv 2505.24298). The
config.json in DIR decides what a sequence costs.

Columns, summed over mini-batches: micro-batches of all replicas; the bound L2 of Martello and Toth on their number,
rounded up to equally many on every replica; the sum of lengths divided by the cap; micro-batches that exceed the cap (a
single longer sequence does not count, and is taken as one of the cap's length); (highest − lowest) / mean over replicas
of FLOPs and of tokens, in the worst mini-batch; CPU time.

Without --lengths there is a second table, of groups of 16 answers whose prompt may be computed once. Its columns, as
shares of the FLOPs of all trajectories alone: all FLOPs; those of the costliest replica, summed over mini-batches,
times the number of replicas; the FLOPs if no group were divided. Then micro-batches that exceed the cap, and CPU time,
also without sharing.

With --cp there is a last table, of the rows that context-parallel ranks divide: how many rows are cut; in those, the
worst (highest − lowest) / mean of the ranks' FLOPs of attention; the worst (highest / mean − 1) of the ranks' FLOPs,
filler included, over all rows; CPU time of one rank.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_megatron.config import ConfigError
from areal_megatron.data.trajectory import BatchPart, Trajectory
from areal_megatron.models.architecture import read_config
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.packing.bins import lower_bound
from areal_megatron.packing.partition import aligned, partition, split
from areal_megatron.packing.row import Division, TokenRow, View, divide
from tools.bench import common
from tools.bench.common import ROOT, cell, positive, spread

Plan = list[list[list[list[int]]]]
"""Indices by [replica][mini-batch][micro-batch]."""

MODEL = ROOT / "configs" / "models" / "Qwen2.5-32B"
FLOPS = SequenceFlops.of(read_config(MODEL))
MEAN, SIGMA, LONGEST = 8192, 0.8, 32768
"""Generated lengths: the mean of the lognormal ones, the standard deviation of their logarithm, and the longest."""

PEERS = """\
Reported by other systems, not measured here: one draw of 512 lognormal lengths, mean 8k, cap 32,768, dp 8
(taken from their public repositories; spread and seed of the lengths and the machine are not known)

algorithm                              bins / bound   over the cap   tokens     FLOPs             CPU time
AReaL, FFD (Algorithm 1)                      1.000              0    0.38%     0.58%               775 ms
slime, first fit + Karmarkar-Karp             1.000              0     1.2%     0.64%               1.6 ms
verl, Karmarkar-Karp twice                    1.000      55 of 131    0.09%     0.06%               129 ms
NeMo-RL, FFD / concatenation          1.000 / 1.224              0   3.1 / 5.6%   3.3 / 6.3%  1 / 0.1 ms
prime-rl, FFD + exchanges                     1.000              0     4.1%     0.00%             1,406 ms"""


@dataclass(frozen=True)
class Task:
    dp: int = 8
    cap: int = 32768
    minibatches: int = 1
    seed: int = 0
    """Shuffles the sequences into mini-batches."""
    flops: SequenceFlops = FLOPS


def lognormal(random: np.random.Generator, count: int) -> np.ndarray:
    return random.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, count)


def bimodal(random: np.random.Generator, count: int) -> np.ndarray:
    """Draws lengths of which seven in ten are short and most of the others exceed half the cap."""
    return np.where(random.random(count) < 0.7, random.normal(3000, 800, count), random.normal(22000, 4000, count))


DISTRIBUTIONS: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], int]] = {
    "512 lognormal": (lognormal, 512),
    "2048 lognormal": (lognormal, 2048),
    "2048 bimodal": (bimodal, 2048),
}


def generate(name: str, seed: int) -> np.ndarray:
    """Returns lengths, int64 [n], drawn from one of DISTRIBUTIONS."""
    draw, count = DISTRIBUTIONS[name]
    return np.clip(draw(np.random.default_rng(seed), count), 100, LONGEST).astype(np.int64)


@dataclass(frozen=True)
class Groups:
    """Groups of SAMPLED answers; prompts and answers have lognormal lengths."""

    count: int
    prompt: int
    """The median length of prompts."""
    answer: int
    """The median length of answers."""

    def __str__(self) -> str:
        return f"{self.count} groups, prompts {self.prompt}, answers {self.answer}"

    def generate(self, seed: int) -> list[Trajectory]:
        random = np.random.default_rng(seed)
        prompts = _lognormal(random, self.prompt, 0.5, self.count)
        answers = _lognormal(random, self.answer, 1.0, self.count * SAMPLED)
        tokens = [random.integers(0, 1000, length, dtype=np.int32) for length in prompts]
        return [
            Trajectory(
                uid=uid,
                epoch=0,
                prompt_id=uid // SAMPLED,
                admission_version=0,
                prompt=tokens[uid // SAMPLED].copy(),
                response=np.zeros(length, np.int32),
                logprobs=np.zeros(length, np.float32),
                versions=np.zeros(length, np.int32),
                loss_mask=np.ones(length, np.uint8),
                reward=0.0,
                truncated=False,
            )
            for uid, length in enumerate(answers.tolist())
        ]


def _lognormal(random: np.random.Generator, median: int, sigma: float, count: int) -> np.ndarray:
    return np.clip(random.lognormal(np.log(median), sigma, count), 2, LONGEST // 2).astype(np.int64)


SAMPLED = 16
GROUPS = (
    Groups(128, prompt=512, answer=128),
    Groups(32, prompt=512, answer=128),
    Groups(16, prompt=512, answer=128),
    Groups(128, prompt=8192, answer=512),
    Groups(128, prompt=128, answer=4096),
)


def ours(lengths: np.ndarray, task: Task) -> Plan:
    return partition(lengths, task.dp, task.minibatches, task.cap, task.seed, task.flops(lengths, lengths))


def packed_rows(lengths: np.ndarray, task: Task) -> list[np.ndarray]:
    """Returns the lengths of the sequences of each micro-batch, of all replicas."""
    plan = ours(lengths, task)
    return [lengths[m] for replica in plan for minibatch in replica for m in minibatch if len(m)]


def paper(lengths: np.ndarray, task: Task) -> Plan:
    return algorithm_1(lengths, task.dp, task.minibatches, task.cap, task.seed)


def algorithm_1(
    lengths: Sequence[int], replicas: int, minibatches: int, cap: int, seed: int
) -> list[list[list[list[int]]]]:
    """Returns indices of sequences by [replica][mini-batch][micro-batch]: balanced by tokens, then Algorithm 1.

    Gives the guarantees of `areal_megatron.packing.partition.partition`. Every replica has as many micro-batches as
    the one that needs most.
    """
    sizes = np.asarray(lengths)
    order = np.random.default_rng(seed).permutation(len(sizes))
    plan: list[list[list[list[int]]]] = [[] for _ in range(replicas)]
    for chosen in np.array_split(order, minibatches):
        if len(chosen) < replicas:
            raise ValueError(f"a mini-batch of {len(chosen)} sequences cannot be split over {replicas} replicas")
        shares = [chosen[share] for share in balance(sizes[chosen], replicas)]
        least = max(len(allocate(sizes[share], cap)) for share in shares)
        packed = [allocate(sizes[share], cap, least) for share in shares]
        count = max(map(len, packed))
        for replica, (share, bins) in enumerate(zip(shares, packed, strict=True)):
            microbatches = [share[members].tolist() for members in bins]
            plan[replica].append(microbatches + [[] for _ in range(count - len(bins))])
    return plan


def balance(sizes: np.ndarray, parts: int) -> list[list[int]]:
    """Returns indices in `parts` groups of about the same sum: the longest first, each to the lightest group."""
    groups: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    for index in np.argsort(-sizes, kind="stable").tolist():
        load, part = heapq.heappop(loads)
        groups[part].append(index)
        heapq.heappush(loads, (load + int(sizes[index]), part))
    return groups


def allocate(sizes: np.ndarray, cap: int, least: int = 1) -> list[list[int]]:
    """Returns indices in micro-batches of at most `cap` tokens, at least `least` of them if there are enough.

    Longest first; a new micro-batch is opened while there are fewer than `least` or none has room, otherwise
    the sequence joins the one with the fewest sequences among those with room.
    """
    bins: list[list[int]] = []
    room, count = np.empty(len(sizes), dtype=np.int64), np.empty(len(sizes), dtype=np.int64)
    for index in np.argsort(-sizes, kind="stable").tolist():
        opened, size = len(bins), int(sizes[index])
        open_to = np.flatnonzero(room[:opened] >= size)
        if opened < least or not len(open_to):
            bins.append([index])
            room[opened], count[opened] = cap - size, 1
        else:
            best = int(open_to[np.argmin(count[open_to])])
            bins[best].append(index)
            room[best] -= size
            count[best] += 1
    return bins


ALGORITHMS = {"packing.py": ours, "Algorithm 1": paper}


def judge(plan: Plan, lengths: np.ndarray, task: Task) -> dict[str, float]:
    """Returns the columns of the table except the time. Raises ValueError unless every sequence comes once."""
    flat = [i for replica in plan for minibatch in replica for microbatch in minibatch for i in microbatch]
    if sorted(flat) != list(range(len(lengths))):
        raise ValueError("not every sequence comes exactly once")
    figures = dict.fromkeys(("bins", "aligned L2", "sum / cap", "over the cap", "FLOP imbalance", "token imbalance"), 0)
    costs = task.flops(lengths, lengths)
    for shares in zip(*plan, strict=True):
        members = [[i for microbatch in share for i in microbatch] for share in shares]
        sizes = np.minimum(lengths[np.concatenate(members)], task.cap)
        figures["bins"] += task.dp * max(map(len, shares))
        figures["aligned L2"] += aligned(lower_bound(sizes, task.cap), task.dp)
        figures["sum / cap"] += int(-(-sizes.sum() // task.cap))
        figures["over the cap"] += sum(
            len(microbatch) > 1 and int(lengths[microbatch].sum()) > task.cap
            for share in shares
            for microbatch in share
        )
        for key, values in (("FLOP imbalance", costs), ("token imbalance", lengths)):
            totals = np.array([values[share].sum() for share in members])
            figures[key] = max(figures[key], float((totals.max() - totals.min()) / totals.mean()))
    return figures


def measure(name: str, lengths: np.ndarray, task: Task, repetitions: int) -> list[dict[str, Any]]:
    """Returns a row for each algorithm."""
    rows = []
    for algorithm, pack in ALGORITHMS.items():
        times = []
        for _ in range(repetitions):
            start = time.process_time()
            plan = pack(lengths, task)
            times.append(1e3 * (time.process_time() - start))
        row = {"lengths": name, "algorithm": algorithm} | judge(plan, lengths, task) | {"ms": spread(times)}
        rows.append(row | {"assignment": plan})
    return rows


def measure_groups(groups: Groups, seed: int, task: Task, repetitions: int) -> dict[str, Any]:
    """Returns a row of the second table."""
    trajectories = groups.generate(seed)
    settings = {
        "version": 0,
        "replicas": task.dp,
        "minibatches": task.minibatches,
        "cap": task.cap,
        "seed": task.seed,
        "flops": task.flops,
    }
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(repetitions):
        for share, taken in times.items():
            start = time.process_time()
            parts = split(trajectories, **settings, share_prompts=share)
            taken.append(1e3 * (time.process_time() - start))
            if share:
                figures = judge_bundles(parts, task)
    times_of = {"ms": spread(times[True]), "ms without sharing": spread(times[False])}
    return {"groups": str(groups), "seed": seed} | figures | times_of


def judge_bundles(parts: Sequence[BatchPart], task: Task) -> dict[str, float]:
    """Returns the columns of the second table except the time."""
    spent, over = np.zeros((task.dp, task.minibatches)), 0
    for replica, part in enumerate(parts):
        for m, minibatch in enumerate(part.minibatches):
            for microbatch in minibatch:
                bundles = [[part.trajectories[i] for i in bundle] for bundle in microbatch]
                spent[replica, m] += sum(bundle_flops(bundle, task.flops) for bundle in bundles)
                tokens = [sum(t.length for t in b) - (len(b) - 1) * (len(b[0].prompt) - 1) for b in bundles]
                over += sum(tokens) > task.cap and len(tokens) > 1
    trajectories = [t for part in parts for t in part.trajectories]
    whole: dict[int, list[Trajectory]] = {}
    for t in trajectories:
        whole.setdefault(t.prompt_id, []).append(t)
    alone = sum(bundle_flops([t], task.flops) for t in trajectories)
    return {
        "FLOPs": spent.sum() / alone,
        "costliest": spent.max(axis=0).sum() * task.dp / alone,
        "undivided": sum(bundle_flops(bundle, task.flops) for bundle in whole.values()) / alone,
        "over the cap": over,
    }


def bundle_flops(bundle: Sequence[Trajectory], flops: SequenceFlops) -> float:
    """Returns the FLOPs of answers whose prompt is computed once."""
    prefix, answers = len(bundle[0].prompt) - 1, np.array([1 + len(t.response) for t in bundle])
    return float(flops(prefix, 0) + flops(answers, [int(t.loss_mask.sum()) for t in bundle], prefix).sum())


def measure_rows(rows: Iterable[Sequence[int]], ranks: int, flops: SequenceFlops) -> dict[str, Any]:
    """Returns the columns of a line for rows, each given by the lengths of its sequences."""
    attention, total, cut, ms = [0.0], [0.0], 0, []
    for lengths in rows:
        row = TokenRow.of([int(length) for length in lengths])
        start = time.process_time()
        division = divide(row, ranks, 1, flops)
        View(row, division, 0)
        ms.append((time.process_time() - start) * 1e3)
        pairs, whole = rank_flops(row, division, flops)
        cut += division.cut
        total.append(whole.max() / ((pairs.sum() + flops.token * sum(row.lengths)) / ranks) - 1)
        if division.cut:
            attention.append((pairs.max() - pairs.min()) / pairs.mean())
    return {"rows": len(ms), "cut": cut, "attention": max(attention), "FLOPs": max(total), "ms": spread(ms)}


def rank_flops(row: TokenRow, division: Division, flops: SequenceFlops) -> tuple[np.ndarray, np.ndarray]:
    """Returns the FLOPs of each rank's attention, and with its whole row, filler included: float64 [ranks] each."""
    pairs = np.array([flops.pair * sum(row.pairs(run) for run in runs) for runs in division.runs])
    return pairs, pairs + flops.token * division.length


def row_table(lines: list[dict[str, Any]]) -> str:
    title = "rows over context-parallel ranks"
    found = [f"{title:<36}{'cp':>4}{'rows':>7}{'cut':>7}{'attention':>11}{'FLOPs':>9}   ms a row"]
    for line in lines:
        found.append(
            f"{line['lengths']:<36}{line['cp']:>4}{line['rows']:>7}{line['cut']:>7}{line['attention']:>11.2%}"
            f"{line['FLOPs']:>9.2%}   {cell(line['ms'], 2, width=5)}"
        )
    return "\n".join(found)


def group_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'groups of ' + str(SAMPLED):<52}{'FLOPs':>8}{'costliest':>11}{'undivided':>11}{'over cap':>10}"
        f"   {'ms of CPU time':<22}without sharing"
    ]
    for row in rows:
        lines.append(
            f"{row['groups'] + ', seed ' + str(row['seed']):<52}{row['FLOPs']:>8.3f}{row['costliest']:>11.3f}"
            f"{row['undivided']:>11.3f}{row['over the cap']:>10}   {cell(row['ms'], 1, width=5):<22}"
            f"{cell(row['ms without sharing'], 1, width=5)}"
        )
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'lengths':<26}{'algorithm':<13}{'bins':>6}{'aligned L2':>12}{'sum/cap':>9}{'over cap':>10}"
        f"{'FLOPs':>9}{'tokens':>9}   ms of CPU time"
    ]
    for row in rows:
        lines.append(
            f"{row['lengths']:<26}{row['algorithm']:<13}{row['bins']:>6}{row['aligned L2']:>12}{row['sum / cap']:>9}"
            f"{row['over the cap']:>10}{row['FLOP imbalance']:>9.3%}{row['token imbalance']:>9.3%}"
            f"   {cell(row['ms'], 1, width=5)}"
        )
    return "\n".join(lines)


def summary(rows: list[dict[str, Any]]) -> str:
    """Says for each distribution how many draws reach the bound, and the worst of the other columns."""
    lines = []
    for name in DISTRIBUTIONS:
        for algorithm in ALGORITHMS:
            mine = [row for row in rows if row["lengths"].startswith(name) and row["algorithm"] == algorithm]
            reached = sum(row["bins"] == row["aligned L2"] for row in mine)
            imbalance, slowest = (max(row["FLOP imbalance"] for row in mine), max(row["ms"]["median"] for row in mine))
            lines.append(
                f"{name:<16}{algorithm:<13}{reached:>4} of {len(mine)} draws at the bound, "
                f"{sum(row['over the cap'] for row in mine)} over the cap; at most {imbalance:.3%} of FLOPs, "
                f"{slowest:,.1f} ms"
            )
    return "\n".join(lines)


def read_lengths(path: Path, task: Task) -> np.ndarray:
    """Returns int64 [n]. Raises ConfigError, naming the line, if a length is no positive whole number or too few
    are there."""
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if text.lstrip().startswith("[") else text.split("\n")
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: cannot be read: {e}") from None
    lengths = []
    for number, value in enumerate(values, 1):
        if not str(value).strip():
            continue
        if not str(value).strip().isdecimal() or int(value) == 0:
            raise ConfigError(f"{path}:{number}: {str(value)[:40]!r} is no positive whole number of tokens")
        lengths.append(int(value))
    if len(lengths) < task.dp * task.minibatches:
        raise ConfigError(
            f"{path}: {len(lengths)} lengths are too few for {task.minibatches} mini-batches on --dp {task.dp}"
        )
    return np.array(lengths, dtype=np.int64)


def parse() -> argparse.Namespace:
    parser = common.parser(__doc__, repetitions=5)
    parser.add_argument("--lengths", type=Path, help="one length a line, or a JSON list")
    parser.add_argument("--dp", type=positive, default=Task.dp, help="data-parallel replicas")
    parser.add_argument("--cap", type=positive, default=Task.cap, help="tokens of a micro-batch")
    parser.add_argument("--minibatches", type=positive, default=Task.minibatches, help="optimizer steps of the batch")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder with the config.json that decides the cost")
    parser.add_argument("--seeds", type=positive, default=3, help="draws of each generated distribution")
    parser.add_argument("--cp", default="", help="context-parallel ranks that divide each row, such as 2,4,8")
    return parser.parse_args()


def main() -> None:
    options = parse()
    try:
        flops = SequenceFlops.of(read_config(options.model))
        task = Task(options.dp, options.cap, options.minibatches, flops=flops)
        draws = [
            (f"{name}, seed {seed}", generate(name, seed)) for name in DISTRIBUTIONS for seed in range(options.seeds)
        ]
        if options.lengths:
            draws = [(options.lengths.name, read_lengths(options.lengths, task))]
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    rows = [row for name, lengths in draws for row in measure(name, lengths, task, options.repetitions)]
    print(
        f"dp {task.dp}, cap {task.cap:,}, mini-batches: {task.minibatches}, FLOPs of {options.model.name}; "
        f"ms: median (lowest – highest) of {options.repetitions}\n"
    )
    print(table(rows))
    grouped = []
    if not options.lengths:
        grouped = [
            measure_groups(groups, seed, task, options.repetitions)
            for groups in GROUPS
            for seed in range(min(options.seeds, 3))
        ]
        print("\n" + summary(rows) + "\n\n" + PEERS + "\n\n" + group_table(grouped))
    divided = [
        {"lengths": name, "cp": cp} | measure_rows(packed_rows(lengths, task), cp, task.flops)
        for name, lengths in draws
        for cp in (int(text) for text in options.cp.split(",") if text)
    ]
    if divided:
        print("\n" + row_table(divided))
    kept = [{key: value for key, value in row.items() if options.lengths or key != "assignment"} for row in rows]
    settings = {"dp": task.dp, "cap": task.cap, "minibatches": task.minibatches, "model": options.model.name}
    common.keep(options.json, settings | {"rows": kept, "groups": grouped, "divided": divided})


if __name__ == "__main__":
    main()
