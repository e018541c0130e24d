"""Rotary embeddings of latent attention: what engines and transformers compute otherwise is refused."""

import math
from itertools import product

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.deepseek_v2 import yarn_get_mscale

from areal_megatron.config import ConfigError
from areal_megatron.model_check import check_model
from tests.unit.test_model_check import GOOD, LATENTS, YARN, config

SETTINGS = [
    {},
    *({"mscale": one, "mscale_all_dim": other} for one, other in product((0.7, 1.0), repeat=2)),
    {"mscale": 0.0},
    {"mscale": 0.0, "mscale_all_dim": 0.0},
    {"mscale_all_dim": 0.0},
    {"attention_factor": 1.0},
    {"attention_factor": 1.2},
    {"attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"truncate": True},
    {"truncate": False},
    {"beta_fast": 16.0, "beta_slow": 2.0},
]


def of_transformers(hf):
    """Frequencies, the factor of what is rotated, and the factor of the softmax's scale (DeepseekV3Attention)."""
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](hf, device="cpu")
    every = hf.rope_parameters.get("mscale_all_dim") or 0
    return frequencies, factor, (0.1 * every * math.log(hf.rope_parameters["factor"]) + 1) ** 2


def of_vllm(hf):
    """The same as DeepseekV2Attention of vLLM has them."""
    has_factor = hf.rope_parameters.get("attention_factor") == 1.0
    kind = "deepseek_llama_scaling" if has_factor else "deepseek_yarn"
    given = dict(hf.rope_parameters) | {"rope_type": kind}
    with set_current_vllm_config(VllmConfig()):
        made = get_rope(hf.qk_rope_head_dim, 4096, is_neox_style=False, rope_parameters=given, dtype=torch.float32)
    every = float(given.get("mscale_all_dim", False))
    scale = 1 if has_factor else yarn_get_mscale(given["factor"], every) ** 2
    return made._compute_inv_freq(made.scaling_factor), made.mscale, scale


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_is_taken_with_latents_is_computed_alike(tmp_path, settings):
    described = GOOD | LATENTS | {"rope_scaling": YARN | settings}
    hf = DeepseekV3Config(**{key: value for key, value in described.items() if key != "model_type"})
    alike = all(
        torch.allclose(torch.as_tensor(one).float(), torch.as_tensor(other).float(), rtol=1e-6)
        for one, other in zip(of_transformers(hf), of_vllm(hf), strict=True)
    )
    try:
        check_model(config(tmp_path, described))
    except ConfigError as e:
        assert not alike and "rotary" in str(e)
    else:
        assert alike
