"""The benchmark of simulated runs: the lengths that it assumes, what it lists and draws, what it makes of figures."""

import json
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from areal_megatron.controller.schedule import Schedule
from areal_megatron.planning.forecast.lengths import LognormalLengths
from tools.bench import forecast
from tools.bench.common import ROOT
from tools.bench.forecast_here import CALIBRATING, PREDICTED, Compared, InOrder, workloads


def test_the_mean_is_that_of_the_papers_throughput():
    assert pytest.approx(9670, rel=1e-3) == forecast.MEAN


@pytest.mark.parametrize("mean", (forecast.MEAN, *forecast.PROGRAM_MEANS))
def test_lengths_have_the_mean_that_is_asked_for(mean):
    median = forecast.median_of(mean, forecast.SIGMA, forecast.LONGEST)
    lengths, rng = LognormalLengths(median, forecast.SIGMA, forecast.LONGEST), np.random.default_rng(0)
    drawn = np.concatenate([lengths.group(rng, 16)[1] for _ in range(5000)])
    assert drawn.mean() == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize("model", forecast.TABLE_1)
def test_the_runs_are_as_large_as_the_papers(model, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = forecast.load(model)
    assert config.trainer_ranks + config.rollout.engines * config.rollout.tp == 8 * forecast.TABLE_1[model].nodes


def test_a_batch_of_synchronous_answers_is_simulated(monkeypatch):
    monkeypatch.chdir(ROOT)
    run = forecast.simulated(forecast.load("1.5B", *forecast.NODE_7), 2, synchronous=True)
    assert run.gpus == 8 and [update.staleness for update in run.updates] == [{0: 1024}] * 2


@pytest.mark.parametrize(("rules", "latest"), [(forecast.PaperSchedule, 3), (Schedule, 2)])
def test_by_the_papers_rule_an_answer_may_be_trained_late(monkeypatch, rules, latest):
    monkeypatch.chdir(ROOT)
    run = forecast.simulated(forecast.load("1.5B", *forecast.NODE_7, "rollout.max_staleness=2"), rules=rules)
    assert max(run.staleness) == latest


def test_the_best_sizes_are_listed_with_what_they_ask_for_and_drawn(tmp_path, monkeypatch, capsys):
    written, drawn = tmp_path / "scale.json", tmp_path / "scale.svg"
    asked = ["--gpus", "8", "--models", "1.5B,671B", "--json", str(written), "--svg", str(drawn)]
    monkeypatch.setattr(sys, "argv", ["forecast", "scale", *asked])
    monkeypatch.setattr(forecast, "FEWEST_ANSWERS", 32)  # for a test that is short
    forecast.main()
    *_, row, refused = capsys.readouterr().out.splitlines()
    assert refused.startswith("671B on 8 GPUs: --best: ") and "no engine has room for an answer" in refused
    (best,) = json.loads(written.read_text())
    assert row.startswith(f"| 1.5B | 8 | {best['trainer']} | {best['engines']} × {best['engine_tp']} |")
    ranks = int(best["trainer"].partition(":")[0])
    assert ranks + best["engines"] * best["engine_tp"] == 8 and best["batch"] == 128
    assert best["answers_per_s"] * best["update_s"] == pytest.approx(128)
    assert 0 < best["in_flight"] <= (forecast.ETA + 1) * 128
    ElementTree.parse(drawn)
    assert "<!-- 1.5B -->" in drawn.read_text() and "671B" not in drawn.read_text()


def test_errors_are_those_of_each_repetition():
    """The machine becomes slower from one to the next, and what is predicted does too."""
    row = Compared(measured=[100.0, 80.0, 50.0], predicted=[110.0, 72.0, 51.0])
    assert row.errors == pytest.approx([-0.1, 0.02, 0.1])
    assert row.line("eta0").split() == ["eta0", "80", "measured", "72", "predicted", "+2%", "(-10%", "to", "+10%)"]
    assert Compared([100.0], [95.0]).line("eta0").split() == ["eta0", "100", "measured", "95", "predicted", "-5%"]


def test_runs_are_predicted_of_workloads_that_nothing_was_calibrated_on():
    texts = workloads()
    calibrated, predicted = ({workload for workload, _ in runs.values()} for runs in (CALIBRATING, PREDICTED))
    assert calibrated | predicted == texts.keys() and not calibrated & predicted
    rows = [json.loads(line) for line in texts["short"].splitlines()]
    lengths = InOrder(texts["short"])
    for row in [*rows, rows[0]]:
        prompt, answers = lengths.group(None, 2)
        assert prompt == len(row["prompt"]) and answers.tolist() == 2 * [row["response_tokens"]]
