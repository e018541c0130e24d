"""The efficiencies of the machines that a finished run was on, from its timeline and its trajectories.

Each is a least-squares fit, of relative errors, of how long something took to what was done in that time:

    a group's answers ≈ steps × (their own part of a step) + answers begun meanwhile + pauses for commits
    a mini-batch's passes ≈ products + attention + micro-batches × pass_s

both times `alone` while nothing else of the run computed, so that the same formulas predict another run
(engine_time.py, trainer_time.py). Pure; imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.data import dumps
from areal_megatron.model_check import trained_config
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.observe.spans import Span, read_spans, union
from areal_megatron.planning.forecast.accelerators import Accelerator, Efficiencies
from areal_megatron.planning.forecast.engine_time import EngineTime
from areal_megatron.planning.forecast.trainer_time import TrainerTime
from areal_megatron.run.folder import RunFolder

SETTLING = 0.2
"""The share of a run at its beginning that is left out: memory is allocated, and caches are filled."""
FEWEST = 20
"""The fewest groups, and mini-batches, from which something is told."""
UNLIKE = 0.1
"""How much the attention of mini-batches, in relation to their products, has to spread over its mean for each to get an
efficiency of its own."""
ALONE = tuple(share / 100 for share in range(100, 48, -2))
"""The values of `alone` that are tried."""
_BETTER = 0.02
"""By how much the squares of what a fit leaves have to fall for a lower value of `alone`."""
_WORK = ("generate", "train", "proximal", "reference", "values", "train critic", "probe")
"""Spans in which a process computes."""
_LEAST = 1e-9
"""What stands for a share or a time of zero."""


@dataclass(frozen=True)
class FinishedRun:
    """What is known of a finished run."""

    config: Config
    hf_config: Mapping[str, Any]
    updates: list[dict[str, Any]]
    """Update lines of metrics.jsonl."""
    spans: list[Span]
    batches: list[tuple[np.ndarray, np.ndarray]]
    """Prompt and answer tokens of each batch's trajectories, int64 each."""
    groups: dict[tuple[int, int], np.ndarray]
    """Prompt, and tokens of all its answers → the lengths of these, of the groups that were trained."""

    @classmethod
    def of(cls, run: RunFolder) -> FinishedRun:
        """Reads the run. Raises ConfigError if it did not keep its trajectories, was resumed or is too short."""
        config = config_file.load(run.config)
        if config.mode != "rl" or not config.rollout.dump:
            raise ConfigError(f"{run.folder}: calibration needs a run of mode=rl with rollout.dump=true")
        lines = read_metrics(run)
        updates = [line for line in lines if line["kind"] == "update"]
        if any(line["kind"] == "resume" for line in lines):
            raise ConfigError(f"{run.folder} was resumed: calibration needs a run that was never interrupted")
        batches, groups = [], defaultdict(list)
        for number, path in dumps.dumped(run.trajectories).items():
            trajectories = dumps.read(path).trajectories
            batches.append(
                (np.array([len(t.prompt) for t in trajectories]), np.array([len(t.response) for t in trajectories]))
            )
            for each in trajectories:
                groups[number, each.prompt_id].append(len(each.response))
        if len(batches) != len(updates):
            raise ConfigError(f"{run.folder}: {len(updates)} updates and {len(batches)} batches: some were not kept")
        lengths = {(prompt, sum(own)): np.array(own) for (_, prompt), own in groups.items()}
        return cls(config, trained_config(config), updates, read_spans(run), batches, lengths)

    def named(self, name: str, process: str = "") -> list[Span]:
        return [span for span in self.spans if span.name == name and span.process.startswith(process)]


def calibrated(runs: Sequence[FinishedRun], gpu: Accelerator) -> Accelerator:
    """Returns the GPU with the efficiencies that these runs had. Raises ConfigError if they tell too little, or ran on
    other kinds of devices than each other."""
    if len({run.config.machine.device for run in runs}) > 1:
        raise ConfigError("the runs were on GPUs and on CPU cores: calibrate each kind by itself")
    found = replace(gpu.efficiencies, **_passes(runs, gpu), batch_s=0.0)
    found = replace(found, batch_s=_batches(runs, replace(gpu, efficiencies=found)), **_transfers(runs, gpu))
    return replace(gpu, efficiencies=_engines(runs, replace(gpu, efficiencies=found)))


class _Others:
    """When others than a process of a run computed."""

    def __init__(self, run: FinishedRun, process: str):
        spans = [span for span in run.spans if span.name in _WORK and span.process != process]
        covered = union([(span.start, span.end) for span in spans]) or [(0.0, 0.0)]
        self._edges = np.array(covered).ravel()
        seconds = np.zeros(len(self._edges))
        seconds[1::2] = np.diff(covered, axis=1)[:, 0]
        self._seconds = seconds.cumsum()

    def pace(self, start: float, end: float, alone: float) -> float:
        """Returns what a time was multiplied with, since nobody else computed in a part of it."""
        both = np.interp([start, end], self._edges, self._seconds)
        return _pace(alone, (both[1] - both[0]) / max(end - start, _LEAST))


def _pace(alone: float, crowded: Any) -> Any:
    """Returns what times are multiplied with, of whose seconds others computed in these shares (a number or array)."""
    return 1 - (1 - alone) * (1 - crowded)


def _passes(runs: Sequence[FinishedRun], gpu: Accelerator) -> dict[str, float]:
    """Returns the shares of products and attention, the seconds of a pass besides, and `alone`."""
    rows, seconds, crowded = [], [], []
    for run in runs:
        others = _Others(run, "trainer-0")
        bare, slow_attention, slow_passes = (_trainer(run, gpu, *each) for each in ((1.0, 0.0), (0.5, 0.0), (1.0, 1.0)))
        spans = iter(run.named("train", "trainer-0"))
        for version, batch in enumerate(run.batches):
            packed = bare.packed(*batch, version)
            all_, twice, fixed = (time.passes(packed)[1][:, 0] for time in (bare, slow_attention, slow_passes))
            for row in zip(2 * all_ - twice, twice - all_, fixed - all_, strict=True):
                span = next(spans, None)
                if span is not None and version >= SETTLING * len(run.batches):
                    rows.append(row)
                    seconds.append(span.duration)
                    crowded.append(others.pace(span.start, span.end, 0.0))
    if len(rows) < FEWEST:
        raise ConfigError(f"the runs have {len(rows)} mini-batches: calibration needs {FEWEST} at least")
    table, measured, busy = np.array(rows, dtype=float), np.array(seconds), np.array(crowded)
    ratios = table[:, 1] / table[:, 0]
    if ratios.std() < UNLIKE * ratios.mean():
        table = np.stack([table[:, 0] + table[:, 1], table[:, 2]], axis=1)
    alone, found = 1.0, []
    least = np.inf
    for share in ALONE:
        pace = _pace(share, busy)
        own = _fit(table, measured / pace, measured / pace)
        left = float(((pace * (table @ own) / measured - 1) ** 2).sum())
        if left < (1 - _BETTER) * least:
            alone, found, least = share, own.tolist(), left
    products, attention, pass_s = found if len(found) == 3 else (found[0], *found)
    shares = {
        name: min(1.0, 1 / max(took, _LEAST)) for name, took in (("products", products), ("attention", attention))
    }
    return shares | {"pass_s": min(1.0, pass_s), "alone": alone}


def _trainer(run: FinishedRun, gpu: Accelerator, attention: float, pass_s: float) -> TrainerTime:
    bare = replace(gpu.efficiencies, products=1.0, attention=attention, pass_s=pass_s, batch_s=0.0)
    return TrainerTime(run.config, run.hf_config, replace(gpu, efficiencies=bare))


def _batches(runs: Sequence[FinishedRun], gpu: Accelerator) -> float:
    """Returns the seconds that trainers take for a batch besides passes."""
    rest = []
    for run in runs:
        trainer, others = TrainerTime(run.config, run.hf_config, gpu), _Others(run, "trainer-0")
        spans = run.named("train", "trainer-0")
        pace = np.mean([others.pace(span.start, span.end, gpu.efficiencies.alone) for span in spans])
        for version, (batch, update) in enumerate(zip(run.batches, run.updates, strict=True)):
            if version >= SETTLING * len(run.batches):
                worked = update["update_s"] - update["trainer_wait_s"]
                rest.append(worked / pace - trainer.update(*batch, version))
    return float(np.clip(np.mean(rest), 0.0, 1.0))


def _transfers(runs: Sequence[FinishedRun], gpu: Accelerator) -> dict[str, float]:
    """Returns the efficiency of the links that carry weights, and the time of a reward."""
    published = [span for run in runs for span in run.named("publish") if span.args.get("bytes")]
    rewards = [span.duration for run in runs for span in run.named("reward")]
    found = {"reward_s": min(1.0, float(np.mean(rewards)))} if rewards else {}
    if published:
        rate = sum(span.args["bytes"] for span in published) / sum(span.duration for span in published)
        found["links"] = float(min(1.0, rate / gpu.network))
    return found


def _engines(runs: Sequence[FinishedRun], gpu: Accelerator) -> Efficiencies:
    """Returns the efficiencies with the engines' own fitted: a step, a request in it, an answer's begin, and a
    pause."""
    bare = replace(gpu.efficiencies, step_s=0.0, request_s=0.0, answer_s=0.0)
    rows, rest, took = [], [], []
    for run in runs:
        time, alone = EngineTime(run.config, run.hf_config, replace(gpu, efficiencies=bare)), bare.alone
        for process in sorted({span.process for span in run.named("generate")}):
            for row, seconds, known in _answers(run, process, time, alone):
                rows.append(row)
                rest.append(seconds - known)
                took.append(seconds)
    if len(rows) < FEWEST:
        raise ConfigError(f"the runs have {len(rows)} groups: calibration needs {FEWEST} at least")
    found = _fit(np.array(rows), np.array(rest), np.array(took)).tolist()
    names = ("step_s", "request_s", "answer_s", "pause_s")
    return replace(bare, **{name: min(1.0, seconds) for name, seconds in zip(names, found, strict=True)})


def _answers(
    run: FinishedRun, process: str, time: EngineTime, alone: float
) -> list[tuple[tuple[float, ...], float, float]]:
    """Returns for each group that the engine has answered: its steps, the requests summed over its steps, the answers
    begun and the commits meanwhile; the seconds that it took; and the seconds already explained by products, weights,
    keys and values, and prefill after commits."""
    groups = [(span, run.groups[key]) for span in run.named("generate", process) if (key := _key(span)) in run.groups]
    commits = [span.start for span in run.named("commit", process)]
    if len(groups) < FEWEST:
        raise ConfigError(f"{process} has answered {len(groups)} groups: calibration needs {FEWEST} at least")
    starts = np.concatenate([np.full(len(own), span.start) for span, own in groups])
    ends = np.concatenate([span.start + span.duration * own / own.max() for span, own in groups])
    starts_sorted, ends_sorted = np.sort(starts), np.sort(ends)
    mean_prompt = float(np.mean(np.concatenate([prompt for prompt, _ in run.batches])))
    begin, found = groups[0][0].start + SETTLING * (groups[-1][0].end - groups[0][0].start), []
    arrivals, others = np.sort([span.start for span, _ in groups]), _Others(run, process)
    for span, own in groups:
        if span.start < begin:
            continue
        looks = np.linspace(span.start, span.end, 16)
        running = (np.searchsorted(starts_sorted, looks, "right") - np.searchsorted(ends_sorted, looks)).mean()
        steps = float(own.max())
        paused = bisect_left(commits, span.end) - bisect_left(commits, span.start)
        joined = int(np.searchsorted(arrivals, span.end) - np.searchsorted(arrivals, span.start))
        contexts = mean_prompt + own.mean() / 2
        known = steps * (time.step(running) + time.per_token * running * contexts)
        known += joined * time.prefill(mean_prompt, mean_prompt**2 / 2)
        known += paused * time.prefill(running * contexts, running * contexts**2 / 2)
        took = span.duration / others.pace(span.start, span.end, alone)
        found.append(((steps, steps * running, joined * len(own), float(paused)), took, known))
    return found


def _key(span: Span) -> tuple[int, int]:
    return span.args["prompt"], span.args["tokens"]


def _fit(table: np.ndarray, seconds: np.ndarray, took: np.ndarray) -> np.ndarray:
    """Returns the coefficients, none below 0, with which the columns come nearest to the seconds: by the least squares
    of the differences over `took`."""
    table, seconds = table / took[:, None], seconds / took
    found = np.zeros(table.shape[1])
    kept = [column for column in range(table.shape[1]) if table[:, column].any()]
    while kept:
        own = np.linalg.lstsq(table[:, kept], seconds, rcond=None)[0]
        if (own >= 0).all():
            found[kept] = own
            break
        kept.remove(kept[int(own.argmin())])
    return found
