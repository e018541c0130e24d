"""Efficiencies that a made-up run has are found again in its timeline."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from areal_megatron.config import ConfigError, config_file
from areal_megatron.data import dumps
from areal_megatron.observe.spans import Span
from areal_megatron.observe.timeline import Timeline
from areal_megatron.planning import calibrate
from areal_megatron.planning.calibrate import contents
from areal_megatron.planning.forecast.accelerators import Accelerator, Efficiencies, accelerator
from areal_megatron.planning.forecast.calibration import FinishedRun, calibrated
from areal_megatron.planning.forecast.engine_time import EngineTime
from areal_megatron.planning.forecast.simulated_engine import RunningAnswer, SimulatedEngine
from areal_megatron.planning.forecast.trainer_time import TrainerTime
from areal_megatron.run.folder import RunFolder
from tests.unit.planning.test_forecast import DENSE, config, trajectory

PEAK = Accelerator("a core", 1e11, 2e10, 1e10, 1e10, 1e10, 8, "")
TRUTH = Efficiencies(
    products=0.3,
    attention=0.3,
    links=0.05,
    step_s=4e-3,
    request_s=2e-4,
    answer_s=1e-3,
    pause_s=0.03,
    pass_s=5e-3,
    batch_s=0.05,
    reward_s=0.01,
)
PROMPT, N = 16, 2


def answered(engine, running, lengths, rng, count):
    """Spans of an engine that runs so many answers as long as there are groups, and commits once a second."""
    spans, groups, begun, left = [], {}, {}, {}
    commit = 0.5
    while len(groups) < count or begun:
        while len(groups) < count and engine.load <= running - N:
            number, length = len(groups), int(rng.integers(*lengths))
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


def trainings(made, batches, truth=TRUTH):
    """Spans of a trainer rank, and the lines of its updates."""
    trainer, spans, lines = TrainerTime(made, DENSE, replace(PEAK, efficiencies=truth)), [], []
    for version, batch in enumerate(batches):
        at = float(version)
        for seconds in trainer.passes(trainer.packed(*batch, version))[1][:, 0]:
            spans.append(Span("trainer-0", "", "train", at, at + seconds))
            at += seconds
        spans.append(Span("trainer-0", "", "publish", at, at + 0.2, {"bytes": int(0.2 * 1e10 * TRUTH.links)}))
        lines.append({"update_s": trainer.update(*batch, version) + 0.3, "trainer_wait_s": 0.3})
    return spans, lines


def settings(running, microbatch_tokens=256):
    trainer = {"microbatch_tokens": microbatch_tokens}
    return config(trainer=trainer, rollout={"group_size": N, "max_running": running})


def played(running, seed, lengths=(20, 64), truth=TRUTH, updates=40):
    """A run of one engine that runs so many answers, and of one trainer rank."""
    made, rng, gpu = settings(running), np.random.default_rng(seed), replace(PEAK, efficiencies=truth)
    engine = SimulatedEngine(0, EngineTime(made, DENSE, gpu), math.inf, 0)
    spans, groups = answered(engine, running, lengths, rng, updates * 8)
    of_batches = np.concatenate([*groups.values()]).reshape(updates, 8 * N)
    batches = [(np.full(8 * N, PROMPT), answers) for answers in of_batches]
    trained, lines = trainings(made, batches, truth)
    return FinishedRun(made, DENSE, lines, sorted(spans + trained, key=lambda span: span.start), batches, groups)


def test_what_a_run_was_made_of_is_found_again():
    found = calibrated([played(32, 0), played(96, 1), played(32, 2, (4, 16))], PEAK).efficiencies
    for name in ("products", "pass_s", "batch_s", "links", "reward_s", "step_s", "request_s", "answer_s", "pause_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.15), name


def test_attention_is_told_from_products_by_runs_of_other_lengths():
    truth, rng = replace(TRUTH, attention=0.05), np.random.default_rng(1)
    run = played(32, 0, truth=truth)
    batches = [(np.full(16, PROMPT), rng.integers(2000, 6000, 16)) for _ in range(30)]
    made = settings(32, microbatch_tokens=8192)
    trained, lines = trainings(made, batches, truth)
    longer = replace(run, config=made, updates=lines, batches=batches, spans=trained + run.named("generate"))
    found = calibrated([run, longer], PEAK).efficiencies
    assert found.products == pytest.approx(truth.products, rel=0.1)
    assert found.attention == pytest.approx(truth.attention, rel=0.1)
    alike = calibrated([played(32, 0), played(96, 1)], PEAK).efficiencies
    assert alike.attention == alike.products, "nothing tells them apart"


def test_what_is_faster_alone_is_found_in_runs_that_take_turns():
    run, alone = played(32, 0), 0.8
    everywhere = Span("trainer-1", "", "probe", -1.0, 1e4)
    crowded = replace(run, spans=[everywhere, *run.spans])
    turns = [
        replace(span, start=alone * (span.start + after), end=alone * (span.end + after))
        for span in run.spans
        for after in [1e4 if span.process == "trainer-0" else 0.0]
    ]
    lines = [line | {"update_s": alone * (line["update_s"] - 0.3) + 0.3} for line in run.updates]
    found = calibrated([crowded, replace(run, spans=turns, updates=lines)], PEAK).efficiencies
    assert found.alone == alone
    together = calibrated([run], PEAK).efficiencies
    for name in ("products", "pass_s", "batch_s", "step_s", "request_s"):
        assert getattr(found, name) == pytest.approx(getattr(together, name), rel=0.05), name


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


@pytest.fixture
def finished(tmp_path):
    """The folder of a made-up run, and what it was made of."""
    played_ = played(32, 0)
    run, made = RunFolder(tmp_path / "run"), played_.config
    run.create()
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    made.model.path, made.data.train, made.rollout.dump = str(tmp_path), "prompts.jsonl", True
    config_file.save(made, run.config)
    lines = [
        {"time": 0.0, "kind": "update", "version": number} | line for number, line in enumerate(played_.updates, 1)
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for process in {span.process for span in played_.spans}:
        timeline = Timeline(run.timeline(process), process)
        for span in played_.spans:
            if span.process == process:
                timeline.event(span.name, round(span.start * 1e9), round(span.end * 1e9), **span.args)
        timeline.close()
    run.trajectories.mkdir(exist_ok=True)
    for number, (_, answers) in enumerate(played_.batches):
        own = [trajectory(i, 8 * number + i // N, PROMPT, tokens) for i, tokens in enumerate(answers.tolist())]
        dumps.write(dumps.Dump(number=number, version=number, trajectories=own), run.trajectories)
    return run, played_


def test_a_finished_run_becomes_a_file_that_forecasts_take(finished, tmp_path, capsys):
    run, played_ = finished
    out = tmp_path / "my_gpu.json"
    assert calibrate.main([str(run.folder), "--gpu", "h100", "--out", str(out)]) == 0
    own, expected = accelerator(str(out)).efficiencies, calibrated([played_], accelerator("h100")).efficiencies
    for name, value in vars(expected).items():
        assert getattr(own, name) == pytest.approx(value, rel=0.05), name  # rounded, other ends tie with starts
    rows = {name: float(value) for name, value, _ in map(str.split, capsys.readouterr().out.splitlines()[1:])}
    assert rows == pytest.approx(vars(own), rel=1e-3)


@pytest.mark.parametrize(
    ("spoil", "arguments", "words"),
    [
        (lambda run: None, [], "--gpu: say which GPU these runs were on, e.g. h100"),
        (lambda run: None, ["--gpu", "h1000"], "the nearest name is h100"),
        (lambda run: (run.trajectories / "batch-000003.msgpack").unlink(), ["--gpu", "h100"], "some were not kept"),
        (lambda run: run.config.unlink(), ["--gpu", "h100"], "config.yaml"),
        (
            lambda run: run.metrics.write_text(
                run.metrics.read_text() + '{"time": 0.0, "kind": "resume", "version": 40}\n'
            ),
            ["--gpu", "h100"],
            "was resumed: calibration needs a run that was never interrupted",
        ),
    ],
)
def test_wrong_input_of_a_calibration_is_one_line(finished, tmp_path, capsys, spoil, arguments, words):
    spoil(finished[0])
    out = tmp_path / "my_gpu.json"
    assert calibrate.main([str(finished[0].folder), *arguments, "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line and not out.exists()
