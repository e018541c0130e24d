import json
import math
import random
import sys
from statistics import median
from subprocess import PIPE

import psutil
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


def test_short_answers_have_18_tokens_on_average():
    lengths = [json.loads(line)["response_tokens"] for line in asynchrony.short_workload().splitlines()]
    assert sum(lengths) / len(lengths) == 18 and (min(lengths), max(lengths)) == (12, 24)


def test_processor_time_is_that_of_the_processes_of_a_part():
    """A launcher that computes little, with a trainer that computes more: the command lines are all that counts."""
    burn = "import sys, time\nwhile time.process_time() < 0.6: pass\nprint(flush=True)\nsys.stdin.read()"
    script = (
        "import subprocess, sys, time\nwhile time.process_time() < 0.2: pass\n"
        "subprocess.run([sys.executable, '-c', sys.argv[1], 'areal_megatron.' + 'train'])"
    )
    with psutil.Popen([sys.executable, "-c", script, burn], stdin=PIPE, stdout=PIPE) as launcher:
        launcher.stdout.readline()
        spent = asynchrony.processor_s(launcher)
    assert 0.5 <= spent["trainer"] < 0.9 and 0.1 <= spent["others"] < 0.5
    assert spent["engine_core"] == spent["engine_server"] == spent["controller"] == 0


def test_processor_time_is_divided_by_the_completions_between_the_marks():
    begin, end = (6, {"trainer": 1.0, "others": 0.5}), (16, {"trainer": 5.0, "others": 1.0})
    spent = asynchrony.per_completion(begin, end, batch_size=128)
    assert spent == pytest.approx({"trainer_ms": 4000 / 1280, "others_ms": 500 / 1280, "all_ms": 4500 / 1280})


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


def test_without_eta0_one_speedup_is_left():
    one = {"tokens_per_s": 1.0}
    report = asynchrony.summary({"eta4": [one], "colocated": [one]})
    assert "speedup_eta4_over_colocated" in report and "eta0" not in asynchrony.table(report)
