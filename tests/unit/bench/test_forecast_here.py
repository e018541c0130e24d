"""The comparison of simulated runs with those of this machine: what it makes of its figures."""

import json

import pytest

from tools.bench.forecast_here import CALIBRATING, FORETOLD, Compared, InOrder, workloads


def test_errors_are_those_of_each_repetition():
    """The machine becomes slower from one to the next, and what is foretold does too."""
    row = Compared(measured=[100.0, 80.0, 50.0], foretold=[110.0, 72.0, 51.0])
    assert row.errors == pytest.approx([-0.1, 0.02, 0.1])
    assert row.line("eta0").split() == ["eta0", "80", "measured", "72", "foretold", "+2%", "(-10%", "to", "+10%)"]
    assert Compared([100.0], [95.0]).line("eta0").split() == ["eta0", "100", "measured", "95", "foretold", "-5%"]


def test_runs_are_foretold_of_workloads_that_nothing_was_calibrated_on():
    texts = workloads()
    calibrated, foretold = ({workload for workload, _ in runs.values()} for runs in (CALIBRATING, FORETOLD))
    assert calibrated | foretold == texts.keys() and not calibrated & foretold
    rows = [json.loads(line) for line in texts["short"].splitlines()]
    lengths = InOrder(texts["short"])
    for row in [*rows, rows[0]]:
        prompt, answers = lengths.group(None, 2)
        assert prompt == len(row["prompt"]) and answers.tolist() == 2 * [row["response_tokens"]]
