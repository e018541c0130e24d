"""The memory plan against what Megatron's own modules allocate and save, byte for byte where it says so."""

import json
from dataclasses import replace
from functools import cache

import pytest

from areal_megatron.config import Config, CriticConfig, DataConfig, ModelConfig, PPOConfig, TrainerConfig
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.planning.memory import activations
from areal_megatron.planning.memory.trainer import stage_memory
from tests.support.tiny_models import save_model

FAMILIES = ("qwen2", "qwen3", "qwen3_moe")
LATENTS = "deepseek_moe"
"""A model whose layers all have experts here: of two kinds of layers the larger one is counted."""
TOKENS = 512
TP = [1, pytest.param(2, marks=pytest.mark.soak)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    for name in FAMILIES:
        save_model(name, folder / name)
    save_model("deepseek_v3", folder / LATENTS, first_k_dense_replace=0)
    return folder


@pytest.fixture(scope="module")
def measured(world, tmp_path_factory, start_ranks):
    """Returns what the first of `tp` tensor-parallel ranks holds."""

    @cache
    def of(tp):
        folder = tmp_path_factory.mktemp("ranks")
        start_ranks(folder, "memory_checks:write_measured", tp, models=str(world), tp=tp)
        return json.loads((folder / "measured.json").read_text())

    return of


def config(world, name, tp, dtype, recompute, layers=0, megatron=None):
    trainer = TrainerConfig(tp=tp, recompute=recompute, recompute_layers=layers, microbatch_tokens=TOKENS)
    return Config(
        name="t",
        updates=1,
        mode="sft",
        model=ModelConfig(str(world / name), dtype),
        data=DataConfig(""),
        batch_size=1,
        trainer=replace(trainer, megatron=megatron or {}),
    )


@pytest.mark.soak
@pytest.mark.parametrize("tp", TP)
def test_buffers_and_optimizer_states(world, measured, tp):
    assert {name for name, *_ in measured(tp)["models"]} == {*FAMILIES, LATENTS}
    for name, *case, found in measured(tp)["models"]:
        plan = stage_memory(config(world, name, *case), read_config(world / name), 0, on_cuda=False)
        elements = plan.of("parameters") // ITEMSIZE[case[1]]
        # DDP's buffers begin each tensor at a multiple of 64 elements
        assert plan.of("parameters") <= found["parameters"] <= 1.03 * plan.of("parameters"), (name, case)
        assert 4 * elements <= found["gradients"] <= 1.03 * 4 * elements, (name, case)
        # No optimizer moves the biases of the routers of four layers: in half precision, it has no float32 copy either.
        biases = 4 * 8 * (8 if case[1] == "float32" else 12) * (name == LATENTS)
        assert plan.of("optimizer") == found["optimizer"] + biases, (name, case)
        asked = replace(config(world, name, *case), mode="rl", ppo=PPOConfig(critic=CriticConfig(lr=1e-5)))
        critic = stage_memory(asked, read_config(world / name), 0, on_cuda=False).of("critic")
        assert critic <= found["critic"] <= 1.03 * critic, (name, case)


@pytest.mark.parametrize("tp", TP)
def test_saved_activations(world, measured, tp):
    """One sequence, so that attention on CPU copies nothing."""
    for name, *case, found in measured(tp)["models"]:
        hf, asked = read_config(world / name), config(world, name, *case)
        layer = activations.layer_of(asked, architecture(hf), hf.get("num_experts_per_tok") or 0, on_cuda=False)
        counted = TOKENS * activations.kept(asked, layer, 0)
        assert counted == pytest.approx(found["saved"], rel=2e-3), (name, case)


@pytest.mark.parametrize("tp", TP)
def test_saved_activations_of_gated_delta_nets(tmp_path, start_ranks, tp):
    """All layers together, since each counts as the mean of both kinds."""
    rotated = {"partial_rotary_factor": 1.0}  # a part of a head is planned as if it were all of it
    rope = {"rope_type": "default", "rope_theta": 1e4, **rotated}
    save_model("qwen3_next", tmp_path / "models" / "next_moe", rope_parameters=rope, **rotated)
    models = str(tmp_path / "models")
    start_ranks(tmp_path, "memory_checks:write_measured", tp, models=models, tp=tp)
    for name, *case, found in json.loads((tmp_path / "measured.json").read_text())["models"]:
        path = tmp_path / "models" / name
        hf, asked = read_config(path), config(path.parent, name, *case)
        layer = activations.layer_of(asked, architecture(hf), hf["num_experts_per_tok"], on_cuda=False)
        counted = TOKENS * activations.kept(asked, layer, 0)
        within = 0.2 if asked.trainer.recompute_layers else 2e-3
        assert counted == pytest.approx(found["saved"], rel=within), (name, case)


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_context_parallel_ranks_divide_the_activations(world, tmp_path_factory, start_ranks, cp):
    found = []
    for ranks in (1, cp):
        folder = tmp_path_factory.mktemp("ranks")
        start_ranks(folder, "memory_checks:write_alive", ranks, models=str(world), cp=ranks)
        found.append([json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)])
    [whole], parts = found
    assert len(whole) == 2 * len((*FAMILIES, LATENTS))
    for case, size in whole.items():
        for part in parts:
            assert part[case] == pytest.approx(size / cp, rel=0.1), case


def test_forward_passes_in_flight(world, measured):
    for pp, vpp, stage, microbatches, warm_up in measured(1)["warm_up"]:
        asked = config(world, "qwen3", 1, "bfloat16", "none")
        asked.trainer.pp, asked.trainer.vpp, asked.batch_size = pp, vpp, microbatches
        assert activations.in_flight(asked, stage) == min(warm_up + 1, vpp * microbatches)
