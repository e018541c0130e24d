"""tools/bench/packing.py as it is called, and its figures against hand-made plans."""

import json
import sys

import numpy as np
import pytest

from areal_megatron.models.flops import SequenceFlops
from tools.bench import packing
from tools.bench.packing import Task, judge

TOKENS = SequenceFlops(token=1.0, trained=0.0, pair=0.0)


def call(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_packing.py", *map(str, arguments)])
    packing.main()


def test_figures_of_a_plan():
    lengths, task = np.array([60, 50, 40, 30, 120]), Task(dp=2, cap=100, flops=TOKENS)
    plan = [[[[0, 2], [3]]], [[[4], [1]]]]
    assert judge(plan, lengths, task) == {
        "bins": 4,
        "aligned L2": 4,  # 280 tokens, the longest counting as 100
        "sum / cap": 3,
        "over the cap": 0,  # 120 is alone
        "FLOP imbalance": 40 / 150,
        "token imbalance": 40 / 150,
    }
    assert judge([[[[0, 1], [3]]], [[[4], [2]]]], lengths, task)["over the cap"] == 1
    with pytest.raises(ValueError, match="exactly once"):
        judge([[[[0, 1], [3]]], [[[4], [3]]]], lengths, task)


@pytest.mark.parametrize("as_json", [False, True])
def test_anybodys_lengths_with_their_assignment(as_json, tmp_path, monkeypatch, capsys):
    lengths = np.random.default_rng(0).integers(1, 1200, 60).tolist()
    file, report = tmp_path / "lengths", tmp_path / "report.json"
    file.write_text(json.dumps(lengths) if as_json else "\n".join(map(str, lengths)) + "\n")
    call(monkeypatch, "--lengths", file, "--dp", 4, "--cap", 1000, "--minibatches", 3, "--json", report)
    assert "Algorithm 1" in capsys.readouterr().out
    [row, _] = json.loads(report.read_text())["rows"]
    assert len(row["assignment"]) == 4 and {len(replica) for replica in row["assignment"]} == {3}
    microbatches = [m for replica in row["assignment"] for minibatch in replica for m in minibatch]
    assert sorted(i for m in microbatches for i in m) == list(range(60))
    assert all(sum(lengths[i] for i in m) <= 1000 or len(m) == 1 for m in microbatches)
    assert row["bins"] == len(microbatches) and row["over the cap"] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10\n\nten\n", ":3: 'ten' is no positive whole number of tokens"),
        ("[10, 2.5]", ":2: '2.5' is no positive"),
        ("10\n0\n", ":2: '0' is no positive"),
        ("5\n6\n", "2 lengths are too few for 1 mini-batches on --dp 8"),
        ("[1, 2", "cannot be read"),
    ],
)
def test_bad_lengths_are_named(text, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(SystemExit) as e:
        call(monkeypatch, "--lengths", tmp_path / "lengths")
    assert e.value.code == 2 and message in capsys.readouterr().err
