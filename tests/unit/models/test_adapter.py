"""Adapters' tensors against the linear layers of transformers' models, which PEFT would give one each."""

from copy import deepcopy
from math import prod

import pytest
import torch

from areal_megatron.config import ConfigError
from areal_megatron.models.adapter import Adapter, adapted
from areal_megatron.models.architecture import architecture
from areal_megatron.reshard.boxes import expand
from areal_megatron.reshard.trainer_layout import MegatronSizes, layouts
from tests.support.adapter_oracle import random_adapter
from tests.support.tiny_models import MODELS, SIZES

RANK = 3
CLASSIC = ("q_proj", "v_proj")


def described(name):
    make_config, make_model, own = MODELS[name]
    config = make_config(**deepcopy(SIZES | own))  # transformers writes into rope_parameters
    config.architectures = [make_model.__name__]
    return config, make_model


def linear_layers(name) -> dict[str, torch.nn.Linear]:
    config, make_model = described(name)
    with torch.device("meta"):
        model = make_model(config)
    layers = {path: each for path, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    return {path: each for path, each in layers.items() if path != "lm_head" and not path.endswith("expert_gate")}


def factors(name, *targets) -> dict[str, tuple[int, ...]]:
    model = architecture(described(name)[0].to_dict())
    return expand(adapted(model, Adapter(RANK, 16.0, targets or ("all-linear",))).canonical)


@pytest.mark.parametrize("name", MODELS)
def test_every_linear_layer_but_the_last_has_two_factors(name):
    expected = {}
    for path, layer in linear_layers(name).items():
        expected[f"{path}.lora_A.weight"] = (RANK, layer.in_features)
        expected[f"{path}.lora_B.weight"] = (layer.out_features, RANK)
    assert factors(name) == expected


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "deepseek_v3", "qwen3_5_moe"])
@pytest.mark.parametrize("targets", [("all-linear",), ("up_proj", "o_proj")], ids=str)
def test_experts_have_factors_where_they_are_asked_for(name, targets):
    config, make_model = described(name)
    with torch.device("meta"):
        tensors = make_model(config).state_dict()
    expected = random_adapter(tensors, targets, RANK, experts=True)
    adapter = Adapter(RANK, 16.0, targets, experts=True)
    found = expand(adapted(architecture(config.to_dict()), adapter).canonical)
    assert found == {tensor: tuple(values.shape) for tensor, values in expected.items()}
    assert any(".mlp.experts.3.up_proj." in tensor for tensor in found)


def test_only_the_named_layers_have_them():
    named = {path for path in linear_layers("qwen3") if path.endswith(CLASSIC)}
    assert {path.rpartition(".lora_")[0] for path in factors("qwen3", *CLASSIC)} == named


@pytest.mark.parametrize(
    ("name", "target", "problem"),
    [
        ("qwen3", "q_prj", "q_prj is no linear layer, did you mean q_proj"),
        (
            "qwen3",
            "lm_head",
            "lm_head is no linear layer; Qwen3ForCausalLM has q_proj, k_proj, v_proj, o_proj, ",
        ),
        (
            "qwen3_moe",
            "gate_proj",
            "gate_proj is of experts; set lora.experts=true; Qwen3MoeForCausalLM has q_proj, k_proj, ",
        ),
        ("qwen3_moe", "gate", "gate is no linear layer"),
        ("deepseek_v3", "q_proj", "q_proj is no linear layer"),
    ],
)
def test_a_target_that_the_model_lacks(name, target, problem):
    with pytest.raises(ConfigError, match=f"lora.targets: {problem}"):
        factors(name, target)


def test_the_scale_is_peft_s():
    assert Adapter(16, 32.0, ("all-linear",)).scale == 2
    assert Adapter(16, 32.0, ("all-linear",), use_rslora=True).scale == 8


@pytest.mark.parametrize(
    "sizes", [{}, {"tp": 2}, {"tp": 4}, {"tp": 2, "pp": 2, "vpp": 2}, {"dp": 2, "ep": 2, "cp": 2}], ids=str
)
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen3", ("all-linear",)),
        ("llama", CLASSIC),
        ("deepseek_v3", ("all-linear",)),
        ("qwen3_5", ("all-linear",)),
        ("glm4_moe", ("all-linear",)),
    ],
)
def test_trainer_ranks_hold_every_element_of_the_factors(name, targets, sizes):
    adapter, config = Adapter(RANK, 16.0, targets, experts="moe" in name), described(name)[0].to_dict()
    held = layouts(config, MegatronSizes(**sizes), adapter)
    model = adapted(architecture(config), adapter)
    for tensor, shape in model.canonical.items():
        boxes = {piece.box for layout in held for piece in layout.pieces if piece.tensor == tensor}
        whole = torch.zeros(shape, dtype=torch.int)
        for box in boxes:
            whole[box.slices] += 1
        assert whole.eq(1).all(), tensor
    for layout in held:
        covered = sum(piece.box.size for piece in layout.pieces)
        assert covered == sum(prod(shape) for shape in layout.held.values())
