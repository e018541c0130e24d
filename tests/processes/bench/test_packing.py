"""tools/bench/packing.py as it is called, and its figures against hand-made plans."""

import itertools
import json
import sys

import numpy as np
import pytest

from areal_megatron.data.trajectory import BatchPart
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.packing import row
from areal_megatron.packing.row import TokenRow, divide
from tools.bench import packing
from tools.bench.packing import Groups, Task, judge, judge_bundles

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


def test_figures_of_rows_over_ranks(monkeypatch):
    monkeypatch.setattr(row, "LEAST_CUT", 1)
    flops = SequenceFlops(token=1.0, trained=0.0, pair=1.0)
    found = packing.measure_rows([[8], [6, 6]], 2, flops)
    assert found | {"ms": None} == {"rows": 2, "cut": 1, "attention": 0.0, "FLOPs": 0.0, "ms": None}
    pairs, total = packing.rank_flops(TokenRow.of([5]), divide(TokenRow.of([5]), 2, 2, flops), flops)
    assert sorted(pairs.tolist()) == [5.0, 10.0]  # tokens 0 and 3 to 4, or 1 and 2
    assert (total - pairs).tolist() == [4.0, 4.0]


def test_attention_of_long_answers_is_balanced_over_ranks():
    for draw, cp in itertools.product(packing.DISTRIBUTIONS, (2, 4, 8)):
        rows = packing.packed_rows(packing.generate(draw, 0)[:512], Task())
        found = packing.measure_rows(rows, cp, packing.FLOPS)
        assert found["cut"] > 0 and found["attention"] < 0.02 and found["FLOPs"] < 0.06, (draw, cp)


def test_figures_of_bundles():
    trajectories = Groups(1, prompt=40, answer=20).generate(0)[:4]
    for t, length in zip(trajectories, (4, 5, 6, 5), strict=True):
        t.prompt, t.loss_mask, t.response = np.zeros(11, np.int32), np.ones(length, np.uint8), np.zeros(length)
    halves = [
        BatchPart(
            version=0,
            trajectories=trajectories[:3],
            minibatches=[[[[0, 1], [2]]]],
            groups=1,
            group_of=[0] * 3,
            episodes=3,
            episode_of=[0, 1, 2],
        ),
        BatchPart(
            version=0,
            trajectories=trajectories[3:],
            minibatches=[[[[0]]]],
            groups=1,
            group_of=[0],
            episodes=1,
            episode_of=[0],
        ),
    ]
    assert judge_bundles(halves, Task(dp=2, cap=38, flops=TOKENS)) == {
        "FLOPs": 54 / 64,  # 10 + 5 + 6, 17 and 16 of 64 tokens
        "costliest": 2 * 38 / 64,
        "undivided": 34 / 64,
        "over the cap": 0,
    }
    assert judge_bundles(halves, Task(dp=2, cap=37, flops=TOKENS))["over the cap"] == 1


def test_groups_have_a_table_of_their_own(monkeypatch, capsys):
    monkeypatch.setattr(packing, "GROUPS", (Groups(8, prompt=512, answer=128),))
    monkeypatch.setattr(packing, "DISTRIBUTIONS", {"few": (packing.lognormal, 32)})
    call(monkeypatch, "--seeds", 1, "--repetitions", 1)
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("8 groups, prompts 512")]
    share, costliest, undivided, over = map(float, row.split("seed 0")[1].split()[:4])
    assert 0 < undivided <= share <= costliest < 0.6 and over == 0


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
