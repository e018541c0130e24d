"""What a config passes through to megatron-core's TransformerConfig."""

import contextlib
from dataclasses import fields
from pathlib import Path

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from areal_megatron.config import Config, ConfigError, DataConfig, MachineConfig, ModelConfig, TrainerConfig
from areal_megatron.config.passed_through import MEGATRON_OWNED
from areal_megatron.trainer import check_fields
from areal_megatron.trainer.megatron_fields import with_fields
from tests.support.tiny_models import save_model

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
OWNED = [name for group in MEGATRON_OWNED for name in group.names]


def test_fields_have_the_types_of_megatron_core():
    given = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"], "moe_aux_loss_coeff": 1}
    made = with_fields(SIZES, given)
    assert (made.recompute_modules, made.recompute_granularity) == (["core_attn", "mlp"], "selective")
    assert (made.num_layers, made.moe_aux_loss_coeff) == (2, 1.0)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"recompute_module": ["mlp"]}, r"\.recompute_module: .* has no such field, did you mean recompute_modules\?"),
        ({"recompute_modules": "mlp"}, r"\.recompute_modules: Expected `array \| null`, got `str`, is 'mlp'"),
        ({"deterministic_mode": 1}, r"\.deterministic_mode: Expected `bool`, got `int`, is 1"),
        ({"moe_router_dtype": "fp16"}, r"\.moe_router_dtype: Invalid enum value 'fp16'"),
        ({"cpu_offloading": True, "cpu_offloading_num_layers": 9}, r": megatron-core refuses it: CPU offloading .*"),
    ],
)
def test_a_mistake_is_refused_in_a_line_that_names_the_key(given, problem):
    with pytest.raises(ConfigError, match=r"^trainer\.megatron" + problem) as refused:
        with_fields(SIZES, given)
    assert "\n" not in str(refused.value)


def test_no_field_changes_one_that_is_not_passed_through():
    """Whatever it is given: no field of megatron-core decides another one of these."""
    values = [True, False, 0, 1, 0.5, "selective", "fp32", "aux_loss", "x", ["core_attn"], ["aux_loss"], None]
    bases = [SIZES, SIZES | {"recompute_granularity": "selective"}, SIZES | {"num_moe_experts": 4}]
    made = 0
    for base in bases:
        plain = TransformerConfig(**base)
        told = [name for name in OWNED if not callable(getattr(plain, name))]
        for field in fields(TransformerConfig):
            for value in values if field.name not in OWNED else ():
                with contextlib.suppress(ConfigError):
                    found = with_fields(base, {field.name: value})
                    assert [n for n in told if getattr(found, n) != getattr(plain, n)] == [], (field.name, value)
                    made += 1
    assert made > 100


def config_of(folder, **fields):
    return Config(
        name="t",
        updates=1,
        model=ModelConfig(str(folder)),
        data=DataConfig(""),
        machine=MachineConfig(device="cpu"),
        trainer=TrainerConfig(megatron=fields),
    )


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        ({"attention": "fa3"}, r"^trainer\.attention: fa3 cannot be used: flash_attn_interface is missing"),
        ({"expert_dispatch": "flex"}, r"^trainer\.expert_dispatch: flex needs DeepEP, and deep_ep is missing; install"),
    ],
)
def test_a_kernel_that_is_missing_is_refused(tmp_path, kernel, problem):
    config = config_of(tmp_path)
    config.machine.device, config.trainer = "cuda", TrainerConfig(**kernel)
    with pytest.raises(ConfigError, match=problem):
        check_fields.check(config)


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe", "glm4_moe"])
def test_a_rate_of_biases_that_no_router_has_is_refused(tmp_path, model):
    save_model(model, tmp_path)
    check_fields.check(config_of(tmp_path, moe_router_bias_update_rate=0))
    config = config_of(tmp_path, moe_router_bias_update_rate=1e-3)
    if model == "glm4_moe":
        check_fields.check(config)
        return
    with pytest.raises(ConfigError, match=r"^trainer\.megatron\.moe_router_bias_update_rate: .* has no routers with a"):
        check_fields.check(config)


def test_a_field_is_checked_with_the_model(tmp_path):
    save_model("qwen3", tmp_path)
    config = config_of(tmp_path, moe_z_loss_coeff=1e-3)
    check_fields.check(config)
    config.trainer.megatron = {"cpu_offloading": True, "cpu_offloading_num_layers": 99}
    with pytest.raises(ConfigError, match="only for layers less than"):
        check_fields.check(config)


def test_the_page_says_of_every_field_whether_it_is_passed_through():
    known = [field.name for field in fields(TransformerConfig)]
    assert sorted(OWNED) == sorted({*OWNED}) and {*OWNED} <= {*known}
    page = (Path(__file__).parents[3] / "docs" / "options.md").read_text()
    assert "\n" + ", ".join(f"`{name}`" for name in known if name not in OWNED) + "\n" in page
