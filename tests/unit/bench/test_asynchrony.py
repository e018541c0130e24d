import json
import math
import random
from statistics import median

import pytest

from tools.bench import asynchrony


def test_the_workload_in_the_repository_is_the_generated_one():
    assert asynchrony.WORKLOAD.read_text() == asynchrony.workload()


def test_lengths_are_lognormal_with_median_24_and_cap_256():
    lengths = [json.loads(line)["response_tokens"] for line in asynchrony.WORKLOAD.read_text().splitlines()]
    assert median(lengths) == 24 and max(lengths) == 256
    for z, share in ((-1, 0.159), (1, 0.841), (2, 0.977)):
        assert sum(math.log(length) <= math.log(24) + z for length in lengths) / len(lengths) == pytest.approx(
            share, abs=0.02
        )


def test_generation_and_tail_agree_with_counting_on_a_grid():
    rng = random.Random(0)
    for _ in range(100):
        answering = [
            (a, a + rng.randrange(1, 9), rng.randrange(1, 5)) for a in (rng.randrange(-5, 40) for _ in range(6))
        ]
        begin, end = sorted(rng.sample(range(45), 2))
        running = [sum(n for a, b, n in answering if a <= t < b) for t in range(begin, end)]
        expected = (sum(n > 0 for n in running), sum(0 < n < 4 for n in running))
        assert asynchrony.generation_seconds(answering, begin, end, few=4) == expected


def test_speedups_are_paired_by_repetition():
    def runs(*speeds):
        return [{"tokens_per_s": speed, "update_s": 1.0} for speed in speeds]

    report = asynchrony.summary(
        {"eta0": runs(100, 50, 80), "eta4": runs(170, 100, 80), "colocated": runs(100, 100, 100)}
    )
    assert report["speedup_eta4_over_eta0"] == pytest.approx(1.7)
    assert report["speedup_eta4_over_eta0_spread"] == pytest.approx({"median": 1.7, "min": 1.0, "max": 2.0})
    assert report["speedup_eta4_over_colocated"] == pytest.approx(1.0)
    assert report["variants"]["eta0"]["tokens_per_s"] == {"median": 80, "min": 50, "max": 100}
    assert "1.70 (1.00 – 2.00)" in asynchrony.table(report)
