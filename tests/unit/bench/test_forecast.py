"""The benchmark of simulated runs: the lengths that it assumes are those that it says."""

from pathlib import Path

import numpy as np
import pytest

from areal_megatron.controller.schedule import Schedule
from areal_megatron.planning.forecast.lengths import LognormalLengths
from tools.bench import forecast

ROOT = Path(__file__).resolve().parents[3]


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
