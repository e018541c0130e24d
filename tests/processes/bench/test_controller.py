"""The benchmark of the controller: its engines' answers are what the product reads, its figures those of the window."""

import msgspec
import pytest

from areal_megatron.engine.answers import decode
from areal_megatron.engine.client import _completion
from tools.bench.controller import GROUP, figures
from tools.bench.standin_engines import answers


def test_answers_are_read_as_an_engines():
    for version in ("default", "7"):
        completions = [_completion(answer, None) for answer in decode(answers(version, tokens=40, group=3, variant=1))]
        assert [len(c.tokens) for c in completions] == [40, 40, 40] and len({tuple(c.tokens) for c in completions}) == 3
        assert all((c.versions == (7 if version == "7" else 0)).all() and (c.logprobs < 0).all() for c in completions)


def test_figures_are_those_of_the_last_seconds():
    """The first ten seconds were slow, late and large."""
    samples = [
        {
            "time": float(t),
            "in_flight": 100 + t,
            "groups": 0 if t < 10 else 5 * (t - 10),
            "rss_gb": 9.0 if t < 10 else 1.5,
            "cpu_s": t * 0.5,
            "late": 10 * t,
        }
        for t in range(21)
    ]
    late = [1.0] * 100 + [0.001] * 99 + [0.3] + [7.0]
    measured = figures(msgspec.json.encode({"samples": samples, "late": late}), seconds=10)
    assert measured["trajectories_per_s"] == pytest.approx(5 * GROUP)
    assert (
        measured["in_flight"] == 115 and measured["core_share"] == pytest.approx(0.5) and measured["rss_gb_max"] == 1.5
    )
    assert measured["late_ms_p50"] == pytest.approx(1.0) and measured["late_ms_max"] == 7000
