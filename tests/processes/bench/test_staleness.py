"""The staleness sweep without its runs: intervals, tables, which cells are missing, what a run has trained."""

import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from areal_megatron.config import ConfigError, config_file
from areal_megatron.run.folder import RunFolder
from tests.conftest import ROOT
from tools.bench import staleness as sweep
from tools.bench import staleness_table as table

EMPTY = {"overrides": ["updates=3"], "cells": {}}


def run_of(accuracy: float, effective: float = 0.95) -> dict:
    return {
        "accuracy": accuracy,
        "commit": "abc",
        "staleness_mean": 3.25,
        "staleness_max": 8,
        "token_staleness_mean": 2.5,
        "effective_share": effective,
        "effective_share_min": 0.5,
        "kl_proximal": 0.0125,
        "clip_share": 0.125,
        "capped_share": 0.0,
        "masked_share": 0.25,
        "lr_factor": 0.5,
        "training_accuracy": [0.1, 0.2, 0.3, accuracy - 0.5, 0.4, 0.5, 0.6, 0.7],
    }


def test_intervals_over_seeds_hold_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(0)
    draws, base = rng.normal(0.7, 0.02, (4000, 3)), rng.normal(0.8, 0.02, (4000, 3))
    means = [table.mean_over_seeds(row) for row in draws.tolist()]
    assert np.mean([e.low <= 0.7 <= e.high for e in means]) == pytest.approx(0.95, abs=0.012)
    gaps = [table.difference(a, b) for a, b in zip(draws.tolist(), base.tolist(), strict=True)]
    assert np.mean([e.low <= -0.1 <= e.high for e in gaps]) == pytest.approx(0.95, abs=0.012)


def test_students_quantiles_cut_off_two_and_a_half_percent():
    for freedom, quantile in enumerate(table.STUDENT, 1):
        x = np.linspace(0, quantile, 20001)
        density = (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
        density *= math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
        assert np.trapezoid(density, x) == pytest.approx(0.475, abs=2e-5)  # of three decimals


def test_cells_are_whole_seeds_and_configs_that_hold():
    cells = sweep.all_cells()
    names = [cell.name for cell in cells]
    of_seed = len(names) // 3
    assert len(set(names)) == len(names)
    assert [cell.seed for cell in cells] == [seed for seed in (1, 2, 3) for _ in range(of_seed)]
    for arm in table.ARMS:
        assert arm.like in ("", *(other.name for other in table.ARMS))
        assert {eta for _, eta in arm.cells} == {0, *arm.etas} - ({0} if arm.like else set())
    for cell in cells:
        config = config_file.load(ROOT / "configs" / "tiny_cpu.yaml", [*sweep.SETTINGS, *cell.overrides])
        assert (config.ppo.objective, config.rollout.max_staleness, config.seed) == (
            cell.objective,
            cell.eta,
            cell.seed,
        )
        assert config.updates > 2 * max(table.ETAS)


def test_what_failed_or_is_not_there_is_missing():
    cells = sweep.selected(sweep.all_cells(), ["constant-*-eta8-*", "masked-*-eta16-seed1"])
    assert len(cells) == 7
    results = {
        "cells": {
            "constant-naive-eta8-seed1": run_of(0.9),
            "constant-naive-eta8-seed2": {"failed": "exit code 1: out of memory"},
        }
    }
    assert [cell.name for cell in sweep.missing(cells, results)] == [
        "constant-decoupled-eta8-seed1",
        "masked-decoupled-eta16-seed1",
        "constant-naive-eta8-seed2",
        "constant-decoupled-eta8-seed2",
        "constant-naive-eta8-seed3",
        "constant-decoupled-eta8-seed3",
    ]
    said = sweep.listing(cells, results).splitlines()
    assert ["constant-naive-eta8-seed2", "exit code 1: out of memory"] in [line.split(maxsplit=1) for line in said]
    assert said[-1] == "1 of 7 cells are there"
    with pytest.raises(ConfigError, match="'naive-eta3' matches no cell"):
        sweep.selected(sweep.all_cells(), ["slow-*", "naive-eta3"])


def results_of(values: dict[tuple[str, str, int], list[float]]) -> dict:
    cells = {
        f"{arm}-{objective}-eta{eta}-seed{seed}": run_of(value)
        for (arm, objective, eta), accuracies in values.items()
        for seed, value in enumerate(accuracies, 1)
    }
    return {**EMPTY, "cells": cells}


def test_tables_say_what_is_there_and_what_is_not():
    results = results_of(
        {
            ("constant", "decoupled", 0): [0.95, 0.96, 0.97],
            ("constant", "naive", 16): [0.80, 0.82, 0.84],
            ("masked", "decoupled", 8): [0.93, 0.94, 0.95],
            ("falling", "naive", 8): [0.94],
        }
    )
    text = table.tables(results)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    over_seeds = [row for row in rows if len(row) == 5 and "," in row[0]]
    held_out, learning = (
        {row[0]: row[1:] for row in part}
        for part in (over_seeds[: len(over_seeds) // 2], over_seeds[len(over_seeds) // 2 :])
    )
    constant = "rate 2.5e-5, constant"
    both = "96.0 (93.5 – 98.5)"
    assert held_out[f"naive, {constant}"] == [both, "–", "–", "82.0 (77.0 – 87.0)"]
    assert held_out[f"decoupled, {constant}"] == [both, "–", "–", "–"], "at η = 0 the objectives are one"
    assert held_out["decoupled, constant, sequences masked"][0] == both, "a mask does nothing at η = 0"
    assert held_out["naive, rate 2.5e-5, falling linearly to 0"] == ["–", "–", "94.0", "–"]
    # of eight updates the third and the fourth
    assert learning[f"naive, {constant}"][3].startswith("31.0 (28.5")
    detail = {tuple(row[:3]): row[3:] for row in rows if len(row) == 14}
    assert detail["constant", "naive", "16"] == [
        "80.0, 82.0, 84.0",
        "-14.0 (-17.6 to -10.4)",
        "3.2; 2.5",
        "0.950",
        "0.500",
        "0.0125",
        "12.5%",
        "25.0%",
        "0.50",
        "0.0",
        "never; never",
    ]
    assert detail["masked", "decoupled", "8"][1] == "-2.0 (-4.3 to +0.3)"
    assert detail["constant", "both", "0"][1] == "–"
    assert detail["falling", "naive", "8"][1] == "–", "one run has no spread"
    assert "Commits: abc" in text and "`updates=3`" in text


def test_the_largest_fall_is_of_means_in_the_second_half():
    rising = [0.01 * n for n in range(64)]
    assert table.largest_fall(rising) == 0
    assert table.largest_fall([0.9] * 10 + [0.1] * 54) == 0, "in the first half"
    assert table.largest_fall([0.5] * 40 + [0.9] * 12 + [0.6] * 12) == pytest.approx(0.3)
    assert table.largest_fall([0.5] * 40 + [0.9] * 12 + [0.8] * 5 + [0.9] * 7) == pytest.approx(0.05)


def test_a_level_is_reached_by_the_mean_of_ten():
    assert table.updates_to([0.79] * 9 + [0.9] * 20, 0.8) == 10
    assert table.updates_to([0.5] * 20 + [1.0] * 10, 0.8) == 26
    assert table.updates_to([0.5] * 20 + [1.0] * 3, 0.8) is None


def test_the_plot_is_a_picture_of_any_part_of_the_results():
    for cells in (
        {},
        {("falling", "decoupled", 0): [0.95]},
        {("falling", "naive", 8): [0.9, 0.91, 0.92], ("masked", "decoupled", 16): [0.9]},
        {("constant", "decoupled", 0): [0.95, 0.96], ("masked", "decoupled", 16): [0.9, 0.91]},
    ):
        drawn = ElementTree.fromstring(table.plot(results_of(cells)))
        assert drawn.tag.endswith("svg")
        styles = "".join(element.get("style", "") for element in drawn.iter())
        assert "var(--paper)" in styles and not re.search("#000000|#ffffff", styles), "of a light page alone"


def update(version: int, staleness: dict[str, int], tokens: dict[str, int]) -> dict:
    return {
        "time": 0.0,
        "kind": "update",
        "version": version,
        "staleness_histogram": staleness,
        "token_staleness_histogram": tokens,
        "clip_share": 0.1 * version,
        "capped_share": 0.0,
        "masked_share": 0.0,
        "effective_share": 1 - 0.1 * version,
        "kl_proximal": 0.01,
        "accuracy": 0.5,
    }


def test_a_run_is_measured_over_all_its_answers(tmp_path):
    lines = [
        {"time": 0.0, "kind": "eval", "version": 0, "accuracy": 0.45, "items": 1000},
        update(1, {"0": 64}, {"0": 500}),
        {"time": 0.0, "kind": "eval", "version": 1, "accuracy": 0.8, "items": 1000},
        update(2, {"0": 16, "1": 48}, {"0": 400, "1": 100}),
        {"time": 0.0, "kind": "eval", "version": 2, "accuracy": 0.9, "items": 1000},
    ]
    config = config_file.load(
        ROOT / "configs" / "tiny_cpu.yaml", ["name=cell", "updates=2", "batch_size=64", "rollout.max_staleness=1"]
    )
    run = RunFolder(tmp_path / "cell")
    run.create()
    config_file.save(config, run.config)
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = sweep.measure(run.folder)
    assert figures["accuracy"] == pytest.approx(0.85) and figures["accuracy_before"] == 0.45
    assert figures["effective_share"] == pytest.approx(0.85) and figures["effective_share_min"] == pytest.approx(0.8)
    assert figures["staleness_mean"] == pytest.approx(48 / 128) and figures["staleness_max"] == 1
    assert figures["token_staleness_mean"] == pytest.approx(0.1) and figures["trained_answers"] == 128
    assert figures["clip_share"] == pytest.approx(0.15)
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    with pytest.raises(sweep.RunFailed, match="2 of 2 updates, 1 of 2 evaluations"):
        sweep.measure(run.folder)


def test_a_folder_belongs_to_one_sweep_and_its_settings(tmp_path):
    first = sweep.Sweep(tmp_path / "sweep", [])
    cell = sweep.all_cells()[0]
    with first:
        first.keep(cell, run_of(0.9))
        with pytest.raises(ConfigError, match="still at work"), sweep.Sweep(tmp_path / "sweep", []):
            pass
    with sweep.Sweep(tmp_path / "sweep", []) as again:
        assert again.results["cells"] == {cell.name: run_of(0.9)}
    with pytest.raises(ConfigError, match="choose another --out"):
        sweep.Sweep(tmp_path / "sweep", ["updates=50"])
    with pytest.raises(ConfigError, match="did you mean"):
        sweep.Sweep(tmp_path / "other", ["update=50"])


def test_a_launcher_that_outlives_its_sweep_keeps_the_folder(tmp_path):
    with sweep.Sweep(tmp_path / "sweep", []) as first:
        left = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[first._lock.fileno()]
        )
    try:
        with pytest.raises(ConfigError, match="still at work"), sweep.Sweep(tmp_path / "sweep", []):
            pass
    finally:
        left.communicate(os.linesep.encode(), timeout=30)
    with sweep.Sweep(tmp_path / "sweep", []):
        pass
