"""What a model's folder says, as the trainer reads it."""

import json

from transformers import DeepseekV3Config

from areal_megatron.trainer.model import described
from tests.support.tiny_models import LATENTS, SIZES


def test_a_model_that_transformers_knows_by_its_class_alone(tmp_path):
    config = DeepseekV3Config(**SIZES | LATENTS, architectures=["DeepseekV3ForCausalLM"])
    written = json.loads(config.to_json_string()) | {"model_type": "kimi_k2"}
    (tmp_path / "config.json").write_text(json.dumps(written))
    hf, held = described(str(tmp_path))
    assert type(hf) is DeepseekV3Config and hf.qk_head_dim == held.dimensions.head_dim == 80
    assert held.dimensions.latent == hf.kv_lora_rank == 512
