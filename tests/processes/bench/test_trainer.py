"""tools/bench/trainer.py as it is called, and its plain loop against the trainer."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT
from tools.bench.trainer import DRAWS, SHARED, Lengths, batches, configure, parse, tiny, useful_flops

LENGTHS = Lengths(answers=400, group=8, prompt=5, median=20, sigma=1.0, longest=200)


def test_lengths_are_as_asked():
    generator = np.random.default_rng(0)
    drawn = {name: LENGTHS.draw(name, generator) for name in DRAWS}
    assert {len(lengths) for lengths in drawn.values()} == {400}
    assert set(drawn["equal"]) == {20}
    assert set(drawn["short"]) <= set(range(8, 14)) and np.ptp(drawn["short"]) > 0
    tail = drawn["long-tail"]
    assert 15 <= np.median(tail) <= 25 and tail.max() == 200 and tail.mean() > 1.3 * np.median(tail)


def test_a_batch_is_packed_and_its_useful_flops_counted(tmp_path):
    options = parse(["--answers", "24", "--group", "4", "--cap", "100", "--minibatches", "3"])
    hf, config = tiny("demo"), configure(options, tmp_path)
    lengths = Lengths(24, 4, 12, 20, 1.0, 60)
    part, shared = batches(lengths, "long-tail", 64, config, hf, seed=1)
    assert {len(bundle) for minibatch in part.minibatches for bundles in minibatch for bundle in bundles} == {1}
    assert max(len(bundle) for minibatch in shared.minibatches for bundles in minibatch for bundle in bundles) > 1
    chosen = [i for minibatch in part.members for members in minibatch for i in members]
    assert sorted(chosen) == list(range(24)) and len(part.minibatches) == 3
    sums = [sum(part.trajectories[i].length for i in members) for each in part.members for members in each]
    assert max(sums) <= 100 and part.groups == 6
    assert len({(t.prompt_id, t.prompt.tobytes()) for t in part.trajectories}) == 6
    one, _ = batches(lengths, "long-tail", 64, configure(parse(["--minibatches", "1"]), tmp_path), hf, seed=1)
    assert 1.2 < useful_flops(part, hf) / useful_flops(one, hf) < 1.25  # two of three mini-batches need a proximal pass


@pytest.mark.soak
@pytest.mark.parametrize("model", ["demo", "experts"])
def test_the_plain_loop_trains_as_the_trainer_does(model, tmp_path):
    report = tmp_path / "report.json"
    options = f"--model {model} --layers 2 --answers 24 --cap 200 --minibatches 2 --repetitions 1 --lora 4"
    options += " --draw short long-tail --idle 0.5"
    command = [sys.executable, "-m", "tools.bench.trainer", *options.split(), "--json", str(report)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "NO REASON" not in done.stdout and "the fastest packed" in done.stdout
    rows = json.loads(report.read_text())["rows"]
    assert [row["draw"] for row in rows] == ["short", "long-tail"]
    for row in rows:
        norms = row["gradient_norms"]
        assert set(norms) == {"trainer", "padded", "packed, block mask", "packed, call a length"}
        assert norms == pytest.approx(dict.fromkeys(norms, norms["trainer"]), rel=1e-4)
        assert row["packed"].startswith("packed") and set(row["ratio"]) == set(norms) - {"trainer"} | {SHARED}
        assert row["adapters"]["median"] > 0 and row["idle"]["median"] < 1
        assert 0 < row["mfu"]["trainer"]["median"] < 1 and row["memory"]["planned_bytes"] > 0
        assert any("clip_grads" in found["file"] for found in row["synchronisations"])


@pytest.mark.soak
def test_a_gated_delta_net_is_no_slower_than_half_of_attention(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tools.bench.trainer", "--delta-nets", "--repetitions", "3", "--json", str(report)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())["rows"]
    assert [row["sequences"] for row in rows] == [1, 8, 64]
    assert all(set(row["tokens_per_s"]) == set(row["weights"]) for row in rows)
    assert rows[0]["ratio"][""]["median"] >= 0.5 and "2,048 tokens" in done.stdout


def test_wrong_options_are_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--answers", "2", "--minibatches", "4"])
    assert ended.value.code == 2
    assert "--answers 2 are too few for --minibatches 4" in capsys.readouterr().err
    for alone in (["--idle", "1"], ["--idle", "0.5", "--group", "1"]):
        with pytest.raises(SystemExit):
            parse(alone)
        assert "--idle is a share between 0 and 1 of groups of several answers" in capsys.readouterr().err
