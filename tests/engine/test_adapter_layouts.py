"""What an update writes into an engine's slot of an adapter, against what vLLM itself writes of the same one."""

import json

import pytest
from safetensors.torch import save_file

from areal_megatron.models.adapter import Adapter
from areal_megatron.models.architecture import architecture, read_config
from tests.support.adapter_oracle import random_adapter
from tests.support.loading import load
from tests.support.reshard_oracle import MODELS, write_model

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ADAPTERS = {
    "llama": Adapter(8, 16.0, (*ATTENTION, *MLP)),
    "qwen2": Adapter(5, 12.0, (*ATTENTION, *MLP), use_rslora=True),
    "qwen3-tied": Adapter(1, 3.0, ("v_proj", "down_proj")),
    "qwen3": Adapter(16, 32.0, ("q_proj", "up_proj")),
    "qwen3-moe": Adapter(8, 16.0, ATTENTION),
    "glm4-moe": Adapter(8, 16.0, (*ATTENTION, *MLP)),
    "deepseek-v3-moe": Adapter(8, 16.0, LATENT),
    "moonlight-moe": Adapter(8, 16.0, ("q_proj", *LATENT[2:], *MLP)),
    "qwen3-next-moe": Adapter(8, 16.0, ("in_proj_qkvz", "in_proj_ba", "out_proj", *ATTENTION, *MLP)),
    "qwen3.5": Adapter(5, 12.0, ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", *ATTENTION, *MLP)),
    "qwen3.5-moe": Adapter(8, 16.0, ("in_proj_qkv", "in_proj_a", "down_proj")),
}
CASES = [*((name, tp, False, "float32") for tp in (1, 2) for name in ADAPTERS), ("two-kv-heads", 4, False, "bfloat16")]
FUSED = ("qkv_proj", "gate_up_proj", "in_proj_qkvz", "in_proj_ba")
"""Layers of engines in which several targets lie side by side: those without an adapter stay empty."""
RANKS = 4


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Each rank's case → [layers, those in which vLLM's slot is empty, those that differ, those in the last slot]."""
    folder = tmp_path_factory.mktemp("models")
    for name, adapter in {**ADAPTERS, "two-kv-heads": ADAPTERS["qwen2"]}.items():
        model, sizes = (name, {}) if name in MODELS else ("qwen2", {"num_key_value_heads": 2})
        tensors = write_model(model, folder / name, hidden_size=256, **sizes)
        known = Adapter(1, 1.0, ("all-linear",)).modules(architecture(read_config(folder / name)))
        assert set(adapter.targets) <= set(known)
        (folder / name / "adapter").mkdir()
        factors = random_adapter(tensors, adapter.targets, adapter.rank, seed=0)
        save_file(factors, folder / name / "adapter" / "model.safetensors", {"format": "pt"})
        (folder / name / "adapter.json").write_text(json.dumps(adapter.told))
    return load(folder, CASES, RANKS, {}, "loaded_adapters.py")


@pytest.mark.parametrize(("name", "tp", "expert_parallel", "dtype"), CASES)
def test_an_update_writes_what_vllm_writes(written, name, tp, expert_parallel, dtype):
    for rank in range(tp):
        layers, empty, different, in_the_last = written[rank][f"{name} {tp} {expert_parallel} {dtype}"]
        assert layers and not different and not in_the_last
        assert all(layer.endswith(FUSED) for layer in empty)
