"""The options with which engines serve adapters."""

from pathlib import Path
from typing import get_args

import pytest

from areal_megatron.config import Config, DataConfig, LoraConfig, ServedConfig, ServedModelConfig
from areal_megatron.engine.adapters import RANKS, Named, read, slots, told
from areal_megatron.engine.served import served
from areal_megatron.models.adapter import LARGEST, Adapter
from areal_megatron.models.architecture import architecture, read_config

MODELS = Path(__file__).resolve().parents[3] / "configs" / "models"


def test_a_served_model_has_no_adapter():
    lora, models = LoraConfig(rank=8), ServedConfig(user=ServedModelConfig(path=str(MODELS / "Qwen3-8B")))
    config = Config(name="x", updates=1, data=DataConfig(train="t"), lora=lora, served=models)
    assert config.engines_adapt and not served(config, "user").engines_adapt


def test_the_ranks_are_vllm_s():
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == RANKS and RANKS[-1] == LARGEST


@pytest.mark.parametrize(
    ("model", "targets", "modules", "together"),
    [
        ("Qwen3-8B", ("q_proj", "up_proj"), ("qkv_proj", "gate_up_proj"), "q_proj k_proj v_proj gate_proj up_proj"),
        ("DeepSeek-V3", ("q_a_proj",), ("fused_qkv_a_proj",), "q_a_proj kv_a_proj_with_mqa"),
        ("Moonlight-16B-A3B-Instruct", ("kv_a_proj_with_mqa",), ("kv_a_proj_with_mqa",), "kv_a_proj_with_mqa"),
    ],
)
def test_a_slot_has_the_layers_that_vllm_fuses(model, targets, modules, together):
    room = slots([Adapter(9, 18.0, targets)] * 3, architecture(read_config(MODELS / model)))
    assert room.modules == modules and room.each == Adapter(16, 18.0, tuple(together.split())) and room.count == 3
    assert " ".join(room.arguments).startswith(f"--enable-lora --max-lora-rank 16 --lora-target-modules {modules[0]}")


def test_slots_have_room_for_the_largest_rank_and_for_all_targets():
    several = [Adapter(4, 8.0, ("q_proj",)), Adapter(30, 30.0, ("down_proj", "k_proj")), Adapter(1, 1.0, ("up_proj",))]
    room = slots(several, architecture(read_config(MODELS / "Qwen3-8B")))
    assert room.count == 3 and room.each.rank == 32
    assert slots(several, architecture(read_config(MODELS / "Qwen3-8B")), driven=True).count == 4
    assert room.modules == ("qkv_proj", "gate_up_proj", "down_proj")
    named = [Named(f"adapter-{n}", f"/a/{n}", each) for n, each in enumerate(several)]
    assert read(told(named)) == named and read("") == []
