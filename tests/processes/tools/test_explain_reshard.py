"""tools/explain_reshard.py as it is called: the sums of a plan, without processes and without torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LARGE = [
    "model.path=configs/models/Qwen3-235B-A22B-Thinking-2507",
    "model.dtype=bfloat16",
    "trainer.tp=4",
    "trainer.pp=4",
    "trainer.dp=8",
    "trainer.ep=8",
    "trainer.etp=1",
    "rollout.engines=8",
    "rollout.tp=16",
]


def explain(*arguments, code=0):
    done = subprocess.run(
        [sys.executable, "tools/explain_reshard.py", "configs/tiny_cpu.yaml", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
        timeout=500,
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_sums_of_a_large_model(tmp_path):
    text = explain(*LARGE, "--json", tmp_path / "figures.json")
    assert "23+24+24+23 layers" in text
    figures = json.loads((tmp_path / "figures.json").read_text())
    # 235.1 billion parameters; an engine rank holds 1/16 of all but norms, router and its one of four KV heads
    assert figures["model_gb"] == pytest.approx(470.2, abs=0.1)
    own = (470.2e9 / 2 - 94 * (2 * 512 * 4096 + 128 * 4096)) / 16 + 94 * (2 * 128 * 4096 + 128 * 4096)
    assert figures["received_gb_per_engine_rank"] * 1e9 / 2 == pytest.approx(own, rel=1e-3)
    assert figures["bytes_over_minimum"] == 1.0
    assert figures["busiest_sender_over_mean"] <= 1.05
    # each of the 4 stages has 8 parts of the experts, of which an engine rank needs a part each
    assert figures["sources_per_engine_rank"] == 32 and " messages from 32 trainer ranks" in text
    assert figures["communicators_per_trainer_rank"] == 2, "8 engines over 4 replicas"
    assert figures["predicted_transfer_s"] == figures["sent_gb_per_trainer_rank_max"] / 45


def test_sums_of_the_largest_model(tmp_path):
    sizes = ["trainer.tp=8", "trainer.pp=8", "trainer.dp=8", "trainer.ep=8", "trainer.etp=1", "rollout.tp=16"]
    model = ["model.path=configs/models/DeepSeek-V3", "model.dtype=bfloat16", "machine.device=cuda"]
    text = explain(*model, *sizes, "rollout.engines=8", "--json", tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    # 671.03 billion parameters; an engine rank holds 1/16 of all but norms, routers and the projections to latents
    assert figures["model_gb"] == pytest.approx(1342.05, abs=0.1)
    whole = 61 * ((2 + 1536 + 576) * 7168 + 1536 + 512) + 58 * 256 * 7169
    own = (671.026e9 - whole) / 16 + whole
    assert figures["received_gb_per_engine_rank"] * 1e9 / 2 == pytest.approx(own, rel=1e-3)
    assert figures["bytes_over_minimum"] == 1.0
    seconds, megabytes = re.search(r"planned in ([0-9.]+) s of one core with ([0-9]+) MB", text).groups()
    assert float(seconds) <= 5 and int(megabytes) <= 1000


def test_one_rank_is_listed_by_tensor():
    lines = explain(*LARGE, "--rank", 37).splitlines()
    # rank 37: second stage (layers 23 to 46), expert-parallel rank 5 of 8 (experts 80 to 95)
    experts = [line for line in lines if ".experts." in line]
    assert experts and all("experts.{80–95}" in line for line in experts)
    layers = {line.split("layers.{")[1].split("}")[0] for line in lines[1:]}
    assert all(23 <= int(edge) <= 46 for span in layers for edge in span.split("–"))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["model.path=nowhere"], "cannot read nowhere/config.json"),
        ([*LARGE, "trainer.ep=3"], "trainer.ep: 3 times etp=1 does not divide the 32 ranks of a pipeline stage"),
        ([*LARGE, "rollout.tp=5"], "rollout.tp: 5 does not divide num_attention_heads=64"),
        ([*LARGE, "--rank", "128"], "--rank: 128 is none of the 128 trainer ranks"),
    ],
)
def test_what_cannot_work_is_one_line(arguments, problem):
    assert problem in explain(*arguments, code=2)
