"""The efficiencies of the machines that a finished run was on, from its timeline and its trajectories.

Each is a least-squares fit of how long something took to what was done in that time:

    a group's answers ≈ steps × (its own part of a step) + pauses for commits
    a mini-batch's passes ≈ products + attention + micro-batches × pass_s

so that the same formulas foretell another run (engine_time.py, trainer_time.py). Pure; imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from areal_megatron import config_file
from areal_megatron.config import Config, ConfigError
from areal_megatron.data import dumps
from areal_megatron.model_check import trained_config
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.observe.spans import Span, read_spans
from areal_megatron.run import Run
from launch.forecast.accelerators import Accelerator, Efficiencies
from launch.forecast.engine_time import EngineTime
from launch.forecast.trainer_time import TrainerTime

SETTLING = 0.2
"""The share of a run at its beginning that is left out: memory is allocated, and caches are filled."""
FEWEST = 20
"""The fewest groups, and mini-batches, from which something is told."""
UNLIKE = 0.1
"""How much the attention of mini-batches, in relation to their products, has to spread over its mean for each to get an
efficiency of its own."""
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
    def of(cls, run: Run) -> FinishedRun:
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


def _passes(runs: Sequence[FinishedRun], gpu: Accelerator) -> dict[str, float]:
    """Returns the shares of products and attention, and the seconds of a pass besides."""
    rows, seconds = [], []
    for run in runs:
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
    ratios = np.array([attention / products for products, attention, _ in rows])
    if len(rows) and ratios.std() < UNLIKE * ratios.mean():
        both, pass_s = _fit(
            [(products + attention, fixed) for products, attention, fixed in rows], seconds, "mini-batches"
        )
        products = attention = both
    else:
        products, attention, pass_s = _fit(rows, seconds, "mini-batches")
    shares = {
        name: min(1.0, 1 / max(took, _LEAST)) for name, took in (("products", products), ("attention", attention))
    }
    return shares | {"pass_s": min(1.0, pass_s)}


def _trainer(run: FinishedRun, gpu: Accelerator, attention: float, pass_s: float) -> TrainerTime:
    bare = replace(gpu.efficiencies, products=1.0, attention=attention, pass_s=pass_s, batch_s=0.0)
    return TrainerTime(run.config, run.hf_config, replace(gpu, efficiencies=bare))


def _batches(runs: Sequence[FinishedRun], gpu: Accelerator) -> float:
    """Returns the seconds that trainers take for a batch besides passes."""
    rest = []
    for run in runs:
        trainer = TrainerTime(run.config, run.hf_config, gpu)
        for version, (batch, update) in enumerate(zip(run.batches, run.updates, strict=True)):
            if version >= SETTLING * len(run.batches):
                rest.append(update["update_s"] - update["trainer_wait_s"] - trainer.update(*batch, version))
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
    """Returns the efficiencies with those of engines: a step, a request in it, and a pause."""
    bare = replace(gpu.efficiencies, step_s=0.0, request_s=0.0)
    rows, rest, again = [], [], []
    for run in runs:
        time = EngineTime(run.config, run.hf_config, replace(gpu, efficiencies=bare))
        for process in sorted({span.process for span in run.named("generate")}):
            for row, seconds, prefilled in _answers(run, process, time):
                rows.append(row)
                rest.append(seconds)
                again.append(prefilled)
    step_s, request_s, pause_s = _fit(rows, rest, "groups")
    pause_s = max(0.0, pause_s - float(np.mean(again)))
    return replace(bare, step_s=min(1.0, step_s), request_s=min(1.0, request_s), pause_s=min(1.0, pause_s))


def _answers(run: FinishedRun, process: str, time: EngineTime) -> list[tuple[tuple[float, float, float], float, float]]:
    """Returns for each group that the engine has answered: its steps, the requests in all of these together, and the
    commits meanwhile; the seconds that they do not explain; and the seconds in which a commit has keys and values of
    all that runs computed again."""
    groups = [(span, run.groups[key]) for span in run.named("generate", process) if (key := _key(span)) in run.groups]
    commits = [span.start for span in run.named("commit", process)]
    if len(groups) < FEWEST:
        raise ConfigError(f"{process} has answered {len(groups)} groups: calibration needs {FEWEST} at least")
    starts = np.concatenate([np.full(len(own), span.start) for span, own in groups])
    ends = np.concatenate([span.start + span.duration * own / own.max() for span, own in groups])
    starts_sorted, ends_sorted = np.sort(starts), np.sort(ends)
    mean_prompt = float(np.mean(np.concatenate([prompt for prompt, _ in run.batches])))
    begin, found = groups[0][0].start + SETTLING * (groups[-1][0].end - groups[0][0].start), []
    arrivals = np.sort([span.start for span, _ in groups])
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
        again = time.prefill(running * contexts, running * contexts**2 / 2)
        found.append(((steps, steps * running, float(paused)), span.duration - known, again))
    return found


def _key(span: Span) -> tuple[int, int]:
    return span.args["prompt"], span.args["tokens"]


def _fit(rows: Sequence[Sequence[float]], seconds: Sequence[float], of: str) -> list[float]:
    """Returns the coefficients, none below 0, with which the columns come nearest to the seconds."""
    if len(rows) < FEWEST:
        raise ConfigError(f"the runs have {len(rows)} {of}: calibration needs {FEWEST} at least")
    table, found = np.array(rows, dtype=float), np.zeros(len(rows[0]))
    kept = [column for column in range(table.shape[1]) if table[:, column].any()]
    while kept:
        own = np.linalg.lstsq(table[:, kept], np.array(seconds), rcond=None)[0]
        if (own >= 0).all():
            found[kept] = own
            break
        kept.remove(kept[int(own.argmin())])
    return found.tolist()
