"""Efficiencies that a made-up run has are found again in its timeline."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from areal_megatron.config import ConfigError
from areal_megatron.observe.spans import Span
from launch.calibrate import contents
from launch.forecast.accelerators import Accelerator, Efficiencies, accelerator
from launch.forecast.calibration import FinishedRun, calibrated
from launch.forecast.engine_time import EngineTime
from launch.forecast.simulated_engine import RunningAnswer, SimulatedEngine
from launch.forecast.trainer_time import TrainerTime
from tests.unit.launch.test_forecast import DENSE, config

PEAK = Accelerator("a core", 1e11, 2e10, 1e10, 1e10, 1e10, 8, "")
TRUTH = Efficiencies(
    products=0.3, attention=0.3, links=0.05, step_s=4e-3, request_s=2e-4, pause_s=0.03, pass_s=5e-3, batch_s=0.05,
    reward_s=0.01
)  # fmt: skip
PROMPT, N = 16, 2


def answered(engine, running, rng, count):
    """Spans of an engine that runs so many answers as long as there are groups, and commits once a second."""
    spans, groups, begun, left = [], {}, {}, {}
    commit = 0.5
    while len(groups) < count or begun:
        while len(groups) < count and engine.load <= running - N:
            number, length = len(groups), int(rng.integers(20, 64))
            groups[number, N * length], begun[number], left[number] = np.full(N, length), engine.now, N
            engine.take([RunningAnswer(number, PROMPT, length) for _ in range(N)], engine.now)
        time = engine.next_event()
        if commit < time:
            engine.pause(max(commit, engine.now), TRUTH.pause_s, again=True)
            spans.append(Span("engine-0", "", "commit", commit, engine.now))
            commit += 1.0
            continue
        for answer in engine.advance(time):
            left[answer.group] -= 1
            if not left[answer.group]:
                args = {"prompt": answer.group, "answers": N, "tokens": N * answer.tokens}
                spans.append(Span("engine-0", "", "generate", begun.pop(answer.group), time, args))
                spans.append(Span("controller", "", "reward", time, time + TRUTH.reward_s))
    return spans, groups


def played(running, seed, updates=40):
    """A run of one engine that runs so many answers, and of one trainer rank."""
    made = config(trainer={"microbatch_tokens": 256}, rollout={"group_size": N, "max_running": running})
    rng, gpu = np.random.default_rng(seed), replace(PEAK, efficiencies=TRUTH)
    trainer = TrainerTime(made, DENSE, gpu)
    engine = SimulatedEngine(0, EngineTime(made, DENSE, gpu), math.inf, 0)
    spans, groups = answered(engine, running, rng, updates * 8)
    batches, lines = [], []
    lengths = np.concatenate([*groups.values()])
    for version in range(updates):
        answers = lengths[version * 8 * N : (version + 1) * 8 * N]
        batch = np.full(len(answers), PROMPT), answers
        at, packed = float(version), trainer.packed(*batch, version)
        for seconds in trainer.passes(packed)[1][:, 0]:
            spans.append(Span("trainer-0", "", "train", at, at + seconds))
            at += seconds
        spans.append(Span("trainer-0", "", "publish", at, at + 0.2, {"bytes": int(0.2 * 1e10 * TRUTH.links)}))
        batches.append(batch)
        lines.append({"update_s": trainer.update(*batch, version) + 0.3, "trainer_wait_s": 0.3})
    return FinishedRun(made, DENSE, lines, sorted(spans, key=lambda span: span.start), batches, groups)


def test_what_a_run_was_made_of_is_found_again():
    found = calibrated([played(32, 0), played(96, 1)], PEAK).efficiencies
    for name in ("products", "pass_s", "batch_s", "links", "reward_s", "step_s", "request_s", "pause_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.15), name


def test_runs_that_tell_too_little_are_refused():
    run = played(32, 0)
    with pytest.raises(ConfigError, match="engine-0 has answered 19 groups: calibration needs 20"):
        calibrated([replace(run, groups=dict([*run.groups.items()][:19]))], PEAK)
    with pytest.raises(ConfigError, match="0 mini-batches"):
        calibrated([replace(run, spans=[span for span in run.spans if span.name != "train"])], PEAK)
    other = config()
    other.machine.device = {"cuda": "cpu", "cpu": "cuda"}[run.config.machine.device]
    with pytest.raises(ConfigError, match="on GPUs and on CPU cores"):
        calibrated([run, replace(run, config=other)], PEAK)


def test_a_calibration_is_read_back_and_refused_by_another_version(tmp_path):
    path, measured = tmp_path / "my_gpu.json", replace(PEAK, efficiencies=TRUTH)
    path.write_text(json.dumps(contents(measured)))
    assert replace(accelerator(str(path)), name=PEAK.name, source="") == measured
    path.write_text(json.dumps(contents(measured) | {"version": "0.0.1"}))
    with pytest.raises(ConfigError, match=r"^--gpu: .*my_gpu.json was measured by version '0\.0\.1', and this is "):
        accelerator(str(path))
