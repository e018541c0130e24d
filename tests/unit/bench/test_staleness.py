"""The pure parts of the staleness sweep: intervals, tables, which cells are missing, what a run has trained."""

import json
import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from areal_megatron import config_file
from areal_megatron.config import ConfigError
from areal_megatron.run import Run
from tests.conftest import ROOT
from tools.bench import staleness as sweep
from tools.bench import staleness_table as table

EMPTY = {"overrides": ["updates=3"], "cells": {}}


def run_of(accuracy: float, rate: str = "5e-5") -> dict:
    return {
        "accuracy": accuracy,
        "rate": rate,
        "items": 1000,
        "commit": "abc",
        "staleness_mean": 3.25,
        "staleness_max": 8,
        "token_staleness_mean": 2.5,
        "clip_share": 0.125,
        "capped_share": 0.0,
        "training_accuracy": [0.1, 0.2, 0.3, accuracy - 0.5, 0.4, 0.5, 0.6, 0.7],
    }


def grid(means: dict[str, float]) -> dict[str, dict]:
    return {
        f"grid-lr{rate}-seed{seed}": run_of(value + 0.001 * offset, rate)
        for rate, value in means.items()
        for seed, offset in zip(table.GRID_SEEDS, (-1, 0, 1), strict=True)
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


def test_the_interval_of_a_run_is_that_of_its_items():
    interval = table.binomial({"accuracy": 0.9, "items": 1000})
    assert interval.value == 0.9
    half = 1.96 * math.sqrt(0.9 * 0.1 / 1000)
    assert (interval.low, interval.high) == pytest.approx((0.9 - half, 0.9 + half), abs=0.002)


def test_the_rate_is_the_best_of_the_whole_grid_and_of_nothing_else():
    cells = grid({"1e-5": 0.8, "2.5e-5": 0.93, "5e-5": 0.95, "1e-4": 0.9})
    results = {**EMPTY, "cells": cells | {"naive-eta16-seed1": run_of(0.99)}}
    assert table.chosen_rate(results) == "5e-5"
    del cells["grid-lr1e-5-seed12"]
    assert table.chosen_rate({**EMPTY, "cells": cells}) is None
    failed = {**EMPTY, "cells": cells | {"grid-lr1e-5-seed12": {"failed": "exit code 1"}}}
    assert table.chosen_rate(failed) is None


def test_cells_are_the_grid_and_then_whole_seeds():
    cells = sweep.all_cells()
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names) == 4 * 3 + 2 * 6 * 3
    assert all(name.startswith("grid-") for name in names[:12])
    assert [name.endswith(f"-seed{seed}") for seed in (1, 2, 3) for name in names[12 * seed : 12 * seed + 12]] == [
        True
    ] * 36
    assert all((cell.objective, cell.eta) == ("naive", 0) for cell in cells[:12])
    for cell in cells:  # settings and cells are words of the configuration
        overrides = [*sweep.SETTINGS, *cell.overrides] if cell.rate else [*sweep.SETTINGS, *cell.overrides[:-1]]
        config = config_file.load(ROOT / "configs" / "tiny_cpu.yaml", overrides)
        assert (config.ppo.objective, config.rollout.max_staleness, config.seed) == (
            cell.objective,
            cell.eta,
            cell.seed,
        )
        assert config.updates > 2 * max(table.ETAS)


def test_what_failed_or_is_not_there_is_missing():
    cells = sweep.selected(sweep.all_cells(), ["*-eta4-*", "naive-eta16-seed1"])
    assert len(cells) == 7
    chosen = grid({"1e-5": 0.8, "2.5e-5": 0.93, "5e-5": 0.95, "1e-4": 0.9})
    results = {
        "cells": chosen
        | {"naive-eta4-seed1": run_of(0.9), "naive-eta4-seed2": {"failed": "exit code 1: out of memory"}}
    }
    assert [cell.name for cell in sweep.missing(cells, results)] == [
        "decoupled-eta4-seed1",
        "naive-eta16-seed1",
        "naive-eta4-seed2",
        "decoupled-eta4-seed2",
        "naive-eta4-seed3",
        "decoupled-eta4-seed3",
    ]
    other = {"cells": results["cells"] | grid({"2.5e-5": 0.97})}
    assert "naive-eta4-seed1" in [cell.name for cell in sweep.missing(cells, other)]
    assert "naive-eta4-seed2            exit code 1: out of memory" in sweep.listing(cells, results)
    assert "1 of 7 cells are there" in sweep.listing(cells, results)
    with pytest.raises(ConfigError, match="'naive-eta3' matches no cell"):
        sweep.selected(sweep.all_cells(), ["grid-*", "naive-eta3"])


def test_tables_say_what_is_there_and_what_is_not():
    values = {("naive", 0): [0.95, 0.96, 0.97], ("naive", 16): [0.80, 0.82, 0.84], ("decoupled", 4): [0.94]}
    cells = grid(dict.fromkeys(table.RATES, 0.9) | {"5e-5": 0.91}) | {
        f"{objective}-eta{eta}-seed{seed}": run_of(value)
        for (objective, eta), accuracies in values.items()
        for seed, value in enumerate(accuracies, 1)
    }
    text = table.tables({**EMPTY, "cells": cells})
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    whole = [row for row in rows if len(row) == 7 and row[0] in table.OBJECTIVES and row[1] not in "0124816"]
    paper, learning = ({row[0]: row[1:] for row in part} for part in (whole[:2], whole[2:]))
    assert paper["naive"] == ["96.0 (93.5 – 98.5)", "–", "–", "–", "–", "82.0 (77.0 – 87.0)"]
    assert paper["decoupled"] == ["–", "–", "–", "94.0", "–", "–"]
    # of eight updates the third and the fourth
    assert learning["naive"][5].startswith("31.0 (28.5") and learning["decoupled"] == ["–", "–", "–", "37.0", "–", "–"]
    detail = {(row[0], row[1]): row[2:] for row in rows if row[1] in ("0", "16", "4")}
    assert detail["naive", "16"][1:] == ["-14.0 (-17.6 to -10.4)", "3.2, 8; 2.5", "12.5%", "0.0%"]
    assert detail["naive", "16"][0].startswith("80.0 (77.") and detail["naive", "0"][1] == "–"
    assert detail["decoupled", "4"][1] == "–"  # one run has no spread
    assert "Commits: abc" in text and "`updates=3`" in text


def test_the_plot_is_a_picture_of_any_part_of_the_results():
    for cells in (
        {},
        {"naive-eta0-seed1": run_of(0.95)},
        {f"naive-eta8-seed{seed}": run_of(0.9) for seed in (1, 2, 3)},
    ):
        assert ElementTree.fromstring(table.plot({**EMPTY, "cells": cells})).tag.endswith("svg")


def update(version: int, staleness: dict[str, int], tokens: dict[str, int]) -> dict:
    return {
        "time": 0.0,
        "kind": "update",
        "version": version,
        "staleness_histogram": staleness,
        "token_staleness_histogram": tokens,
        "clip_share": 0.1 * version,
        "capped_share": 0.0,
        "effective_tokens_per_s": 100.0,
        "trainer_idle_share": 0.5,
        "accuracy": 0.5,
    }


def test_a_run_is_measured_over_all_its_answers(tmp_path):
    lines = [
        {"time": 0.0, "kind": "eval", "version": 0, "accuracy": 0.45, "items": 1000},
        update(1, {"0": 64}, {"0": 500}),
        update(2, {"0": 16, "1": 48}, {"0": 400, "1": 100}),
        {"time": 0.0, "kind": "eval", "version": 2, "accuracy": 0.9, "items": 1000},
    ]
    config = config_file.load(
        ROOT / "configs" / "tiny_cpu.yaml", ["name=cell", "updates=2", "batch_size=64", "rollout.max_staleness=1"]
    )
    run = Run(tmp_path / "cell")
    run.create()
    config_file.save(config, run.config)
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = sweep.measure(run.folder)
    assert (figures["accuracy"], figures["accuracy_before"], figures["items"]) == (0.9, 0.45, 1000)
    assert figures["staleness_mean"] == pytest.approx(48 / 128) and figures["staleness_max"] == 1
    assert figures["token_staleness_mean"] == pytest.approx(0.1) and figures["trained_answers"] == 128
    assert figures["clip_share"] == pytest.approx(0.15)
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    with pytest.raises(sweep.RunFailed, match="2 of 2 updates, 1 of 2 evaluations"):
        sweep.measure(run.folder)


def test_a_folder_belongs_to_one_sweep_and_its_settings(tmp_path):
    first = sweep.Sweep(tmp_path / "sweep", [])
    cell = sweep.all_cells()[12]
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
