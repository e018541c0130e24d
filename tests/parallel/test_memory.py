"""The memory plan against what Megatron's own modules allocate and save, byte for byte where it says so."""

import json
import subprocess
import sys

import pytest
from tiny_models import save_model

from areal_megatron.config import Config, Data, Model, Trainer
from areal_megatron.reshard.architectures import architecture, read_config
from launch.memory import activations
from launch.memory.trainer import LOGITS_ELEMENTS, stage_memory
from tests.conftest import ROOT

FAMILIES = ("qwen2", "qwen3", "qwen3_moe")
TOKENS = 512


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    for name in FAMILIES:
        save_model(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def measured(world):
    done = subprocess.run([sys.executable, ROOT / "tests/parallel/memory_rank.py", world], cwd=ROOT, capture_output=True,
                          text=True, timeout=300, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def config(world, name, dtype, recompute):
    return Config(name="t", updates=1, mode="sft", model=Model(str(world / name), dtype), data=Data(""), batch_size=1,
                  trainer=Trainer(recompute=recompute, microbatch_tokens=TOKENS))  # fmt: skip


def test_buffers_and_optimizer_states(world, measured):
    assert {name for name, *_ in measured["models"]} == set(FAMILIES)
    for name, dtype, recompute, found in measured["models"]:
        hf = read_config(world / name)
        plan = stage_memory(config(world, name, dtype, recompute), hf, 0, on_cuda=False)
        parts = {part.name: part.bytes for part in plan.parts}
        elements = parts["parameters"] // {"bfloat16": 2, "float32": 4}[dtype]
        # DDP's buffers begin each tensor at a multiple of 64 elements
        assert parts["parameters"] <= found["parameters"] <= 1.03 * parts["parameters"], (name, dtype)
        assert 4 * elements <= found["gradients"] <= 1.03 * 4 * elements, (name, dtype)
        assert parts["optimizer"] == found["optimizer"], (name, dtype)


def test_saved_activations(world, measured):
    """One sequence, so that attention on CPU copies nothing."""
    for name, dtype, recompute, found in measured["models"]:
        hf, asked = read_config(world / name), config(world, name, dtype, recompute)
        layer = activations.layer_of(asked, architecture(hf), hf.get("num_experts_per_tok") or 0, on_cuda=False)
        passing = layer.passing + (layer.saved if recompute == "full" else 0)
        counted = activations.activations(asked, layer, 0) - TOKENS * passing
        assert counted == pytest.approx(found["saved"], rel=1e-3), (name, dtype, recompute)


def test_forward_passes_in_flight(world, measured):
    for pp, vpp, stage, microbatches, warm_up in measured["warm_up"]:
        asked = config(world, "qwen3", "bfloat16", "none")
        asked.trainer.pp, asked.trainer.vpp, asked.batch_size = pp, vpp, microbatches
        assert activations.in_flight(asked, stage) == min(warm_up + 1, vpp * microbatches)


def test_the_chunk_of_logits_is_the_trainers(measured):
    assert measured["logits_elements"] == LOGITS_ELEMENTS
