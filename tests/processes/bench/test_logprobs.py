"""tools/bench/logprobs.py as it is called, and the plain code that it compares with against full logits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from areal_megatron.trainer.logprobs import Vocabulary
from tools.bench import logprobs

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("entropy", [pytest.param("none", marks=pytest.mark.soak), "gradient"])
def test_one_command_compares_three_ways(tmp_path, entropy):
    file = tmp_path / "report.json"
    sizes = ["--tokens", "300", "--vocabulary", "2000", "--full-tokens", "100", "--repetitions", "2"]
    command = [sys.executable, "tools/bench/logprobs.py", *sizes, "--dtype", "bfloat16", "--entropy", entropy]
    done = subprocess.run([*command, "--json", file], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert report["entropy"] == entropy and report["dtype"] == "bfloat16"
    for name in logprobs.RUNS:
        assert report[name]["seconds"]["min"] > 0
        ratio = report[name]["seconds_over_tiles"]
        assert ratio["min"] <= ratio["median"] <= ratio["max"]
        assert f"\n{name} " in done.stdout
    assert report["tiles"]["seconds_over_tiles"]["median"] == 1


def test_whole_rows_make_the_numbers_of_full_logits(monkeypatch):
    monkeypatch.setattr(logprobs, "ROWS", 7 * 100)  # so that tokens take several chunks
    torch.manual_seed(0)
    vocabulary = Vocabulary(100, 0.7, 1, sequence_parallel=False)
    labels, results = torch.randint(100, (30,)), []
    hidden, weight = torch.randn(30, 8, dtype=torch.float32), torch.randn(100, 8)
    for function in (logprobs.rows, logprobs.full):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        values, entropies = function(*leaves, labels, vocabulary)
        (values - 0.3 * entropies).square().sum().backward()
        results.append([values, entropies, *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results, strict=True):  # an element of a gradient is as exact as what it is a sum of
        assert (found - expected).norm() <= 2e-6 * expected.norm()
